// The words of CUDA C++ that the kernels use, for a host compiler: qualifiers, vector types, warp
// functions. Everything that is PTX stands in `ptx.hpp`.
#pragma once
#include <cmath>

#include "launch.hpp"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __restrict__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__  // of every kernel it is the dynamic `memory` of copies.hpp

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <class To, class From> inline To bits_as(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}
inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return bits_as<float>(x); }
inline int __float_as_int(float x) { return bits_as<int>(x); }
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
template <class T> inline T __ldg(const T* p) { return *p; }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
template <class T> inline T min(T a, T b) { return b < a ? b : a; }
template <class T> inline T max(T a, T b) { return a < b ? b : a; }
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }

constexpr int warpSize = 32;

inline void __syncthreads() { emu::block->barrier(); }
inline int __syncthreads_or(int predicate) { return emu::block->barrier(predicate != 0); }
inline void __syncwarp(unsigned mask = ~0u) { emu::block->meet(mask, 0, "__syncwarp"); }
inline unsigned lane_of_self() { return emu::self % emu::kWarp; }

template <class T> inline T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
    const auto all = emu::block->meet(mask, value, "__shfl_sync");
    const int own = lane_of_self();
    return all[(own & ~(width - 1)) | (from & (width - 1))];
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32) {
    const auto all = emu::block->meet(mask, value, "__shfl_xor_sync");
    const int own = lane_of_self(), other = own ^ flip;
    return all[(other & ~(width - 1)) == (own & ~(width - 1)) ? other : own];
}
template <class T> inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
    const auto all = emu::block->meet(mask, value, "__shfl_down_sync");
    const int own = lane_of_self(), other = own + int(by);
    return all[(own & (width - 1)) + int(by) < width ? other : own];
}
template <class T> inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
    const auto all = emu::block->meet(mask, value, "__shfl_up_sync");
    const int own = lane_of_self();
    return all[(own & (width - 1)) >= int(by) ? own - int(by) : own];
}
// Only one thread runs at a time. Before an atomic another may run: which comes first is drawn.
template <class T, class Change> inline T atomic(T* at, Change change) {
    emu::block->wait("an atomic", [] { return true; });
    const T before = *at;
    *at = change(before);
    return before;
}
template <class T> inline T atomicAdd(T* at, T x) {
    return atomic(at, [x](T y) { return T(y + x); });
}
template <class T> inline T atomicMax(T* at, T x) {
    return atomic(at, [x](T y) { return y < x ? x : y; });
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
    const auto all = emu::block->meet(mask, predicate, "__ballot_sync");
    unsigned votes = 0;
    for (unsigned lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1 && all[lane]) votes |= 1u << lane;
    return votes;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }
