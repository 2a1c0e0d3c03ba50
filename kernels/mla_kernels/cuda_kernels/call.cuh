// What one call of sparse attention hands to a kernel, and the format of a cached row.
//
// arguments.py declares the same struct for ctypes: a field added here is added there.
#pragma once

#include "ptx.cuh"

// The 656-byte row: 512 e4m3 numbers in 4 groups of 128, a float32 scale for each group, and the
// rotary key of 64 bfloat16 numbers. 656 = 41 x 16, so a row is always aligned for 16-byte copies.
constexpr int latent = 512, rope = 64, groups = 4, group = 128;
constexpr int row_bytes = 656, scales_at = 512, rope_at = 528;
constexpr float infinity = __builtin_bit_cast(float, 0x7f800000);
constexpr float log2_e = 1.4426950408889634f, ln_2 = 0.6931471805599453f;
// Stands for -inf where two of them are subtracted: the difference is 0 and not NaN.
constexpr float lowest = -3.0e38f;

enum Number : int { bf16 = 0, fp16 = 1, fp32 = 2 };

struct Call {
  const void* q;               // [rows, heads, 576]
  const unsigned char* cache;  // [pages, page_size, row], rows without gaps inside
  const int* indices;          // [rows, topk] slots
  const int* counts;           // [rows], or null: all entries count
  const void* sink;            // [heads], or null
  void* out;                   // [rows, heads, 512]; of several splits: [splits, rows, heads, 512]
  float* lse;                  // [rows, heads]; of several splits: [splits, rows, heads]
  long long q_row, q_head, q_dim;    // strides in numbers
  long long page_stride, row_stride;  // strides in bytes
  long long list_row, count_row;      // strides of indices and counts in numbers
  long long out_row, out_head, lse_row, lse_head;  // strides in numbers
  long long out_split, lse_split;     // strides in numbers; not used with one split
  long long slots;                    // pages * page_size
  int rows, heads, topk, splits, split_length, page_size;
  int one_piece;             // pages follow each other without gaps
  int q_number, out_number, sink_number, sink_step;  // Number, and the stride of sink
  float scale;  // softmax scale
};

// The part of a row's list that one split covers.
struct Span {
  int begin, end;
};

__device__ __forceinline__ Span span_of(const Call& call, int row, int split) {
  int count = call.topk;
  if (call.counts) count = min(count, call.counts[row * call.count_row]);
  int begin = split * call.split_length;
  return {begin, min(begin + call.split_length, count)};
}

// Where the row in a slot begins, in bytes from the cache; -1 for a slot that is not in the cache.
// 64-bit throughout: slot 3,273,604 of 656 bytes lies beyond 2^31.
__device__ __forceinline__ long long row_offset(const Call& call, int slot) {
  long long offset = slot * call.row_stride;
  if (!call.one_piece) {  // a division takes 20 instructions
    const u32 page = u32(slot) / u32(call.page_size), place = u32(slot) - page * u32(call.page_size);
    offset = page * call.page_stride + place * call.row_stride;
  }
  return slot < 0 || slot >= call.slots ? -1 : offset;
}

__device__ __forceinline__ float load_number(const void* data, long long at, int number) {
  if (number == fp32) return static_cast<const float*>(data)[at];
  unsigned short bits = static_cast<const unsigned short*>(data)[at];
  return number == bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

// Four numbers in a row, rounded once from fp32.
__device__ __forceinline__ void store_4(void* data, long long at, int number, float4 x) {
  if (number == fp32) {
    *reinterpret_cast<float4*>(static_cast<float*>(data) + at) = x;
    return;
  }
  uint2 packed = number == bf16 ? uint2{f32_to_bf16x2(x.x, x.y), f32_to_bf16x2(x.z, x.w)}
                                : uint2{f32_to_f16x2(x.x, x.y), f32_to_f16x2(x.z, x.w)};
  *reinterpret_cast<uint2*>(static_cast<unsigned short*>(data) + at) = packed;
}

// The sink takes weight like one more key of value 0, once, after the last merge:
// 1 / (1 + exp(sink - lse)) is 0 or 1 at the extremes, never inf / inf.
__device__ __forceinline__ float sink_factor(const void* sink, long long at, int number, float lse) {
  const float score = sink ? load_number(sink, at, number) : -infinity;
  return score == -infinity ? 1.f : 1.f / (1.f + expf(score - lse));
}
