// Runs the threads of one CUDA block on the CPU, one at a time, in an order drawn from a seed.
//
// A thread of the block is a stack of its own (`fiber.hpp`). It lets another run where the hardware
// could run somebody else for long: at a collective of its warp, at a block barrier, and while it
// waits for copies. Who is next is drawn, in one of two ways. By turns: any thread that can run, so
// that warps stay close together. By warps: a warp runs as far as it can before the next one does,
// in an order that is drawn anew at each barrier, so that what one warp does last before a barrier
// comes before what another one does first. So a result that depends on an order that no barrier
// guarantees comes out wrong for some seed, and a wait that nobody will ever end is an error that
// says who waits for what.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "fiber.hpp"

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emu {

constexpr unsigned kWarp = 32;

// Thrown in every thread of a block after one of them has failed, so that all of them end.
struct Stopped {};

// What the lanes of a warp bring to a collective: shuffle, vote, matrix product.
struct Meeting {
    unsigned expected = 0, arrived = 0, left = 0;
    const char* what = "";
    std::array<std::array<unsigned char, 128>, kWarp> brought{};
};

class Block;

// The block that runs, and the number of the running thread in it.
inline Block* block = nullptr;
inline unsigned self = 0;

class Block {
  public:
    Block(dim3 threads, uint64_t seed)
        : threads_(threads), size_(threads.x * threads.y * threads.z), by_warps_(seed / 2 % 2), random_(seed) {
        for (unsigned t = 0; t < size_; ++t) lanes_.push_back(std::make_unique<Lane>());
        meetings_.resize((size_ + kWarp - 1) / kWarp);
        order_.resize(meetings_.size());
        for (unsigned w = 0; w < order_.size(); ++w) order_[w] = w;
        draw_order();
    }

    // Runs `body` in every thread; throws what the first failing thread has thrown.
    void run(const std::function<void()>& body) {
        body_ = &body;
        block = this;
        pass_on(&home_);
        block = nullptr;
        if (error_) std::rethrow_exception(error_);
    }

    // Lets others run until `ready` holds; `what` names the wait if it never ends.
    template <class Ready> void wait(const char* what, Ready ready) {
        Lane& lane = *lanes_[self];
        lane.ready = ready;
        lane.waits_for = what;
        pass_on(&lane.fiber.sp);
        lane.ready = nullptr;
        if (stopping_) throw Stopped{};
    }

    // __syncthreads and __syncthreads_or: all threads of the block. Whether any brought a 1.
    bool barrier(bool own = false) {
        const uint64_t phase = barrier_.phase;
        barrier_.any |= own;
        if (++barrier_.arrived == size_) {
            barrier_ = {0, phase + 1, false, barrier_.any};
            draw_order();
        }
        wait("a block barrier", [this, phase] { return barrier_.phase != phase; });
        return barrier_.result;  // of this phase: the next one needs this thread too
    }

    // What each lane of the warp has brought; all lanes of `mask` must come, with the same `what`.
    template <class T> std::array<T, kWarp> meet(unsigned mask, const T& own, const char* what) {
        static_assert(sizeof(T) <= 128);
        const unsigned warp = self / kWarp, lane = self % kWarp;
        if (!(mask >> lane & 1)) throw std::runtime_error(std::string(what) + ": a lane is not in its own mask");
        auto& open = meetings_[warp][mask];
        if (!open) {
            open = std::make_shared<Meeting>();
            open->expected = mask;
            open->what = what;
        }
        auto meeting = open;
        if (std::strcmp(meeting->what, what))
            throw std::runtime_error(std::string("lanes of one warp meet at ") + meeting->what + " and at " + what);
        std::memcpy(meeting->brought[lane].data(), &own, sizeof(T));
        meeting->arrived |= 1u << lane;
        if (meeting->arrived == mask) open.reset();
        wait(what, [meeting] { return meeting->arrived == meeting->expected; });
        std::array<T, kWarp> all{};
        for (unsigned l = 0; l < kWarp; ++l) std::memcpy(&all[l], meeting->brought[l].data(), sizeof(T));
        return all;
    }

  private:
    struct Lane {
        Fiber fiber{&Block::begin};
        std::function<bool()> ready;
        const char* waits_for = "";
        bool done = false;
    };
    struct Barrier {
        unsigned arrived = 0;
        uint64_t phase = 0;
        bool any = false, result = false;
    };

    // Where every fiber starts.
    static void begin() {
        Block& own = *block;
        Lane& lane = *own.lanes_[self];
        if (!own.stopping_) try {
                (*own.body_)();
            } catch (const Stopped&) {
            } catch (...) {
                own.fail(std::current_exception());
            }
        lane.done = true;
        own.pass_on(&lane.fiber.sp);
    }

    void draw_order() {
        if (by_warps_) std::shuffle(order_.begin(), order_.end(), random_);
    }

    // The i-th thread to be asked whether it can run, where `start` is drawn.
    unsigned candidate(unsigned i, unsigned start) const {
        if (!by_warps_) return (start + i) % size_;
        return order_[i / kWarp] * kWarp + (start + i) % kWarp;
    }

    void fail(std::exception_ptr error) {
        if (!error_) error_ = error;
        stopping_ = true;
    }

    // Goes on with a thread that can run, or with `run` after the last one. It looks from a drawn
    // place, so that orders differ by seed.
    void pass_on(void** from) {
        const unsigned start = random_() % size_;
        for (unsigned i = 0; i < meetings_.size() * kWarp; ++i) {
            const unsigned next = candidate(i, start);
            if (next >= size_) continue;
            Lane& lane = *lanes_[next];
            if (lane.done || !(stopping_ || !lane.ready || lane.ready())) continue;
            self = next;
            threadIdx = {next % threads_.x, next / threads_.x % threads_.y, next / (threads_.x * threads_.y)};
            if (&lane.fiber.sp != from) emu_switch(from, lane.fiber.sp);
            return;
        }
        std::map<std::string, unsigned> waiting;
        for (auto& lane : lanes_)
            if (!lane->done) ++waiting[lane->waits_for];
        if (waiting.empty()) return emu_switch(from, home_);
        std::ostringstream words;
        words << "the block waits for ever:";
        for (auto& [what, count] : waiting) words << ' ' << count << " threads for " << what << ';';
        fail(std::make_exception_ptr(std::runtime_error(words.str())));
        pass_on(from);
    }

    dim3 threads_;
    unsigned size_;
    bool by_warps_;
    std::vector<unsigned> order_;
    std::mt19937_64 random_;
    const std::function<void()>* body_ = nullptr;
    void* home_ = nullptr;
    std::vector<std::unique_ptr<Lane>> lanes_;
    std::vector<std::map<unsigned, std::shared_ptr<Meeting>>> meetings_;
    Barrier barrier_;
    std::exception_ptr error_;
    bool stopping_ = false;
};

}  // namespace emu
