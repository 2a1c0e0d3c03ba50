// The functions of `ptx.cuh` on a CPU, under the same names.
#pragma once
#include "numbers.hpp"

using u32 = unsigned int;
using u64 = unsigned long long;

inline int uniform_warp_id() { return int(threadIdx.x) >> 5; }

inline u32 transpose_8x8(u32 a) {
    const auto all = emu::block->meet(~0u, a, "movmatrix");
    // The number in row r, column c lies in lane 4 r + c / 2, in its low half if c is even.
    const auto at = [&](unsigned r, unsigned c) { return all[4 * r + c / 2] >> (16 * (c % 2)) & 0xFFFF; };
    const unsigned row = lane_of_self() / 4, column = 2 * (lane_of_self() % 4);
    return at(column, row) | at(column + 1, row) << 16;
}

struct Pairs {
    u32 low, high;
};
inline Pairs e4m3x4_to_f16(u32 bytes) {
    const auto one = [&](int i) { return u32(emu::f32_to_f16(emu::e4m3_to_f32(bytes >> (8 * i) & 0xFF))); };
    return {one(0) | one(1) << 16, one(2) | one(3) << 16};
}
inline u32 f32_to_e4m3(float x) { return emu::f32_to_e4m3(x); }
inline u32 f32_to_f16x2(float low, float high) { return emu::f32_to_f16(low) | u32(emu::f32_to_f16(high)) << 16; }
inline u32 f32_to_bf16x2(float low, float high) { return emu::f32_to_bf16(low) | u32(emu::f32_to_bf16(high)) << 16; }
inline float f16_to_f32(unsigned short bits) { return emu::f16_to_f32(bits); }
inline float bf16_to_f32(unsigned short bits) { return emu::bf16_to_f32(bits); }
// A subnormal number counts as 0, before and after.
inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? 0.0f : x; }
inline float exp2_fast(float x) { return flushed(std::exp2(flushed(x))); }
inline float log2_fast(float x) { return std::log2(flushed(x)); }

inline u32 multiply_bf16x2(u32 a, u32 b) {
    return f32_to_bf16x2(bf16_to_f32(a & 0xFFFF) * bf16_to_f32(b & 0xFFFF), bf16_to_f32(a >> 16) * bf16_to_f32(b >> 16));
}
inline u32 max_u16x2(u32 a, u32 b) { return std::max(a & 0xFFFF, b & 0xFFFF) | std::max(a >> 16, b >> 16) << 16; }

inline u32 pick_bytes(u32 a, u32 b, u32 pick) {
    const u64 both = u64(b) << 32 | a;
    u32 d = 0;
    for (unsigned i = 0; i < 4; ++i) d |= u32(both >> (8 * (pick >> (4 * i) & 7)) & 0xFF) << (8 * i);
    return d;
}

namespace emu {

struct MatrixParts {
    u32 a[4], b[2];
};

// mma.sync m16n8k16: the fragments are drawn in `ptx.cuh`. Sums in float64, rounded once.
template <class Widen> void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, const char* what, Widen widen) {
    const auto all = block->meet(~0u, MatrixParts{{a[0], a[1], a[2], a[3]}, {b0, b1}}, what);
    const unsigned g = lane_of_self() / 4, t = lane_of_self() % 4;
    for (unsigned i = 0; i < 4; ++i) {
        const unsigned upper = i / 2, column = 2 * t + i % 2;  // row g or g + 8
        double sum = c[i];
        for (unsigned k = 0; k < 16; ++k) {
            const unsigned from = k % 8 / 2, shift = 16 * (k % 2);
            const u32 left = all[4 * g + from].a[upper + 2 * (k / 8)] >> shift;
            const u32 right = all[4 * column + from].b[k / 8] >> shift;
            sum += double(widen(left & 0xFFFF)) * double(widen(right & 0xFFFF));
        }
        c[i] = float(sum);
    }
}

}  // namespace emu

inline void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    emu::multiply(c, a, b0, b1, "mma.sync f16", emu::f16_to_f32);
}
inline void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    emu::multiply(c, a, b0, b1, "mma.sync bf16", emu::bf16_to_f32);
}

inline u32 shared_address(const void* pointer) {
    return u32(static_cast<const unsigned char*>(pointer) - memory);
}
inline bool elect_lane() {
    emu::block->meet(~0u, 0, "elect.sync");
    return lane_of_self() == 0;
}
inline void init_barrier(u32 barrier, int arrivals) {
    emu::phase_barriers[barrier] = {arrivals, arrivals, 0, 0, {}};
}
inline void expect_bytes(u32 barrier, u32 bytes) { emu::phase_barrier(barrier).arrive(bytes); }
inline void wait_for_phase(u32 barrier, u32 parity) {
    emu::PhaseBarrier& waited = emu::phase_barrier(barrier);
    emu::block->wait("a phase of an mbarrier", [&waited, parity] { return waited.is_over(parity); });
}
inline void copy_bulk(u32 shared, const void* global, u32 bytes, u32 barrier) {
    if (shared % 16 || reinterpret_cast<uintptr_t>(global) % 16 || bytes % 16 || shared + bytes > kSharedBytes)
        throw std::runtime_error("a bulk copy: addresses and size must be multiples of 16, and within shared memory");
    emu::phase_barrier(barrier).start({shared, global, bytes});
}
inline void fence_before_bulk_copies() {}

inline void copy_piece(u32 shared, const void* global, bool there) {
    alignas(16) static const unsigned char zeros[16] = {};
    if (shared % 16 || reinterpret_cast<uintptr_t>(global) % 16 || shared + 16 > kSharedBytes)
        throw std::runtime_error("a copy of 16 bytes: addresses must be multiples of 16, and within shared memory");
    emu::pieces[emu::self].push_back({shared, there ? global : zeros, 16});
}
inline void arrive_after_copies(u32 barrier) {
    auto& started = emu::pieces[emu::self];
    emu::PhaseBarrier& counting = emu::phase_barrier(barrier);
    counting.arrive(16 * started.size());
    for (const emu::Copy& copy : started) counting.start(copy);
    started.clear();
}

inline void prefetch_to_l2(const void*) {}

// Kernels run one after the other here: the one before has ended.
inline void let_next_kernel_start() {}
inline void wait_for_kernel_before() {}
