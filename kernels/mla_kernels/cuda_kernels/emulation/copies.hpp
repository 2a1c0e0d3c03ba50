// Bulk copies to shared memory, and the barriers that count them in.
//
// The hardware may let a copy land at any time before the wait for its barrier's phase is over. Here a
// block does one of two things, by its seed: copies land at the wait and not before, so that who reads
// too early reads the NaN that shared memory starts with, or an older tile; or they land at once, so
// that who still reads the older tile finds the newer one.
#pragma once
#include "scheduler.hpp"

constexpr unsigned kSharedBytes = 101376;  // of a block on SM120
// What every kernel declares: `extern __shared__ unsigned char memory[]`.
alignas(1024) unsigned char memory[kSharedBytes];

namespace emu {

struct Copy {
    unsigned shared;
    const void* global;
    unsigned bytes;
};

inline void land(const Copy& copy) { std::memcpy(memory + copy.shared, copy.global, copy.bytes); }

inline bool land_at_once = false;

// An mbarrier: a phase is over when all have arrived and all bytes that were expected have landed.
struct PhaseBarrier {
    int arrivals = 0, missing = 0;
    long long bytes_missing = 0;
    unsigned phase = 0;
    std::vector<Copy> on_their_way;

    void arrive(long long bytes) {
        bytes_missing += bytes;
        --missing;
        turn_if_complete();
    }

    void start(const Copy& copy) {
        if (!land_at_once) return on_their_way.push_back(copy);
        land(copy);
        bytes_missing -= copy.bytes;
        turn_if_complete();
    }

    bool is_over(unsigned parity) {
        for (const Copy& copy : on_their_way) {
            land(copy);
            bytes_missing -= copy.bytes;
        }
        on_their_way.clear();
        turn_if_complete();
        return phase % 2 != parity;
    }

  private:
    void turn_if_complete() {
        if (missing > 0 || bytes_missing != 0) return;
        missing = arrivals;
        ++phase;
    }
};

// Of the block that runs, by their address in shared memory; `launch` starts every block without any.
inline std::map<unsigned, PhaseBarrier> phase_barriers;

// Of each thread: copies of 16 bytes that no barrier counts yet.
inline std::map<unsigned, std::vector<Copy>> pieces;

inline PhaseBarrier& phase_barrier(unsigned address) {
    const auto found = phase_barriers.find(address);
    if (found == phase_barriers.end()) throw std::runtime_error("an mbarrier is used before it is initialised");
    return found->second;
}

}  // namespace emu
