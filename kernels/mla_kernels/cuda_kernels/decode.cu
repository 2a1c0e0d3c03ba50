// Sparse MLA attention over 656-byte rows on tensor cores: 8 heads of a row and one split a block.
//
// Tokens go on M and heads on N:  S^T[16 tokens, 8 heads] = K Q^T  and  O^T[512, 8] = V^T P^T.
// Eight heads fill the n8 of m16n8k16; heads on M would fill half of m16 and waste the rest.
//
// Data flow of a block (4 warps, each for itself until the end: no block barrier in the loop):
//
//   list -> 16 slots -> 16 bulk copies -> [ring: 2 tiles of 16 rows a warp]  rows.cuh: copy_rows
//   K   e4m3 -> fp16 in registers, exact, no scale                         rows.cuh: keys_operand
//   S^T  = sum over the 4 groups of  scale[token, group] * (K Q^T of the group)   + rope in bf16
//   P    4 sets of weights, one a group: scale[token, group] * 2^(score - anchor[head]) in fp16, turned
//        from [token, head] to [head, token] by movmatrix
//   O^T += V^T P^T, V e4m3 -> fp16 in registers, no scale                  rows.cuh: values_operand
//   end: the 4 warps' O^T meet in shared memory, where the rings were, and leave as one result
//
// Lanes (g = lane / 4, t = lane % 4). Of S^T a lane holds tokens token_of(g) and that + 8, heads 2t
// and 2t + 1. Of O^T it holds heads 2t, 2t + 1 too, and in group G the 16 latent numbers from
// 128 G + 16 token_of(g) on: number 4 w + b of them is tile 2 w + b / 2, row g + 8 (b % 2).
//
// Weights. A weight times a scale must fit fp16, and a scale may be any fp32 number. So the anchor is a
// running maximum of score + log2(largest scale of the token), and p = 2^(score - anchor) may be any
// number of fp32. It is lazy: it rises only when a weight would be 2^15 or more, and the largest is
// then 2^8 again; the 128 sums that go with it are seldom rescaled. One power a score is enough for
// the four groups; where a group's scales are 2^20 below another's, its part of the result has few
// bits. A scale below 2^-100 counts as 2^-100 where the anchor is chosen; a token whose p is below
// 2^-126 counts as 0.
//
// q is multiplied by a power of two a head, exact, so that its largest number lies in 16 .. 32: bf16
// reaches 3e38 and fp16 ends at 65504. The factor is taken back in the score.
//
// Registers: 128 of O^T, 2 + 2 of anchors and sums, 32 of partial scores. One split gives the
// final result (that is `extend`); of several each writes an fp32 part with its LSE for merge.cu.
#include "rows.cuh"

constexpr int warps = 4, stages = 2, block_heads = 8;
constexpr int k_steps = (latent + rope) / 16;
constexpr int out_stride = latent + 4;  // of a head in shared memory; 4 more keep banks apart
constexpr float target = 8.f;  // log2 of the largest weight after the anchor rose
constexpr float smallest_log = -100.f;
constexpr float largest_sum = 0x1p110f;  // of p; more makes the anchor rise, too

struct Shared {
  unsigned char ring[warps][stages][tile_bytes];
  u64 arrived[warps][stages];  // barriers: the rows of a tile are there
  uint4 q[k_steps / 2][32];    // B of two steps as one lane needs it
  float q_factor[block_heads];
  float anchor[warps][block_heads], sum[warps][block_heads];
};

static_assert(block_heads * out_stride * 4 <= stages * tile_bytes, "O^T of a warp fits its ring");
static_assert(sizeof(Shared) == 93536, "what attention.py asks for; SM120 gives 101,376");

// Bring q to the L2 cache: 1,152 bytes a head, in nine lines of 128 bytes and part of a tenth.
__device__ __forceinline__ void prefetch_q(const Call& call, int row, int head_0) {
  const int head = head_0 + threadIdx.x / 16, line = threadIdx.x % 16 * 64;
  const auto* q = static_cast<const unsigned short*>(call.q) + row * call.q_row + head * call.q_head;
  if (head < call.heads && line < latent + rope) prefetch_to_l2(q + line);
}

// 16 threads a head, 32 latent numbers each: the head's largest number, then q in the order of the
// operand. Eight numbers in a row of q are what lane (g, t) needs for two steps.
__device__ void store_q(Shared& shared, const Call& call, int row, int head_0) {
  const int g = threadIdx.x / 16, u = threadIdx.x % 16, head = head_0 + g;
  const bool present = head < call.heads;
  const auto* q = static_cast<const unsigned short*>(call.q) + row * call.q_row + head * call.q_head;
  uint4 parts[4], rotary = {};
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    parts[i] = present ? reinterpret_cast<const uint4*>(q + u * 32)[i] : uint4{};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      largest = fmaxf(largest, fabsf(bf16_to_f32(word(parts[i], w) & 0xffff)));
      largest = fmaxf(largest, fabsf(bf16_to_f32(word(parts[i], w) >> 16)));
    }
  }
  if (present && u < 8) rotary = reinterpret_cast<const uint4*>(q + latent)[u];
#pragma unroll
  for (int step = 8; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));

  // 2^(4 - floor(log2 largest)), within what a float can hold.
  int exponent = int(__float_as_uint(largest) >> 23) - 127 - 4;
  exponent = largest == 0.f ? 0 : max(-120, min(120, exponent));
  const float up = __uint_as_float(u32(127 - exponent) << 23);
  if (u == 0)
    shared.q_factor[g] = __uint_as_float(u32(127 + exponent) << 23) * call.scale * log2_e;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 packed[4];
#pragma unroll
    for (int w = 0; w < 4; ++w)
      packed[w] = f32_to_f16x2(bf16_to_f32(word(parts[i], w) & 0xffff) * up,
                               bf16_to_f32(word(parts[i], w) >> 16) * up);
    const int chunk = u / 2, t = (u % 2) * 2 + i / 2;
    shared.q[chunk * 2 + i % 2][g * 4 + t] = {packed[0], packed[1], packed[2], packed[3]};
  }
  if (u < 8) shared.q[latent / 32 + u / 4][g * 4 + u % 4] = rotary;
}

// The running state of a warp: O^T and, for the lane's heads 2t and 2t + 1, what it is relative to.
struct State {
  float out[groups][8][4];
  float anchor[2], sum[2];
};

// scores[i] of (token g, head 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1), in powers of two.
__device__ __forceinline__ void score_tile(float (&scores)[4], const Shared& shared,
                                           const unsigned char* low, const unsigned char* high,
                                           const float (&scale_low)[4], const float (&scale_high)[4],
                                           float rope_scale, int lane) {
  const int t = lane % 4;
  float sums[4] = {};
#pragma unroll
  for (int G = 0; G < groups; ++G) {
    float part[2][4] = {};  // two chains: a product must wait for the one before in its chain
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int chunk = 2 * G + half;
      const uint4 x = load_16(low + chunk * 64 + t * 16), y = load_16(high + chunk * 64 + t * 16);
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const uint4 b = shared.q[chunk * 2 + j / 2][lane];
        u32 a[4];
        keys_operand(a, word(x, j), word(y, j));
        mma_f16(part[half], a, b.x, b.y);
        keys_operand(a, word(x, j + 1), word(y, j + 1));
        mma_f16(part[half], a, b.z, b.w);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      sums[i] += (i < 2 ? scale_low[G] : scale_high[G]) * (part[0][i] + part[1][i]);
  }
  float rotary[4] = {};
#pragma unroll
  for (int chunk = 0; chunk < 2; ++chunk) {
    const uint4 x = load_16(low + rope_at + chunk * 64 + t * 16);
    const uint4 y = load_16(high + rope_at + chunk * 64 + t * 16);
    const uint4 b = shared.q[latent / 32 + chunk][lane];
    const u32 first[4] = {x.x, y.x, x.y, y.y}, second[4] = {x.z, y.z, x.w, y.w};
    mma_bf16(rotary, first, b.x, b.y);
    mma_bf16(rotary, second, b.z, b.w);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    scores[i] = sums[i] * shared.q_factor[2 * t + i % 2] + rotary[i] * rope_scale;
}

__device__ __forceinline__ float largest_of_tokens(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// p of two tokens and the lane's two heads, and p times each scale as fp16.
__device__ __forceinline__ void weights_of(float (&p)[4], u32 (&weights)[groups][2],
                                           const float (&scores)[4], const float (&scale_low)[4],
                                           const float (&scale_high)[4], const State& state) {
#pragma unroll
  for (int i = 0; i < 4; ++i) p[i] = exp2_fast(scores[i] - state.anchor[i % 2]);
#pragma unroll
  for (int G = 0; G < groups; ++G) {
    weights[G][0] = f32_to_f16x2(p[0] * scale_low[G], p[1] * scale_low[G]);
    weights[G][1] = f32_to_f16x2(p[2] * scale_high[G], p[3] * scale_high[G]);
  }
}

// log2 of a token's largest scale.
__device__ __forceinline__ float log_of_largest(const float (&scales)[4]) {
  const float largest = fmaxf(fmaxf(scales[0], scales[1]), fmaxf(scales[2], scales[3]));
  return fmaxf(log2_fast(largest), smallest_log);
}

// Move the anchors up to the largest weight of the tile, and the sums with them.
__device__ __forceinline__ void raise_anchors(State& state, const float (&scores)[4], float log_low,
                                              float log_high) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float high = fmaxf(scores[e] + log_low, scores[2 + e] + log_high) - target;
    const float anchor = fmaxf(state.anchor[e], largest_of_tokens(high));
    const float factor = exp2_fast(state.anchor[e] - anchor);
    state.anchor[e] = anchor;
    state.sum[e] *= factor;
#pragma unroll
    for (int G = 0; G < groups; ++G)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        state.out[G][i][e] *= factor;
        state.out[G][i][2 + e] *= factor;
      }
  }
}

__device__ __forceinline__ void attend_tile(State& state, const Shared& shared,
                                            const unsigned char* tile, u32 present,
                                            float rope_scale, int lane) {
  const int g = lane / 4, t = lane % 4;
  const unsigned char *low = tile + token_of(g) * row_bytes, *high = low + 8 * row_bytes;
  const float4 sl = *reinterpret_cast<const float4*>(low + scales_at);
  const float4 sh = *reinterpret_cast<const float4*>(high + scales_at);
  const float scale_low[4] = {sl.x, sl.y, sl.z, sl.w}, scale_high[4] = {sh.x, sh.y, sh.z, sh.w};

  float scores[4];
  score_tile(scores, shared, low, high, scale_low, scale_high, rope_scale, lane);
  if (!(present >> token_of(g) & 1)) scores[0] = scores[1] = -infinity;
  if (!(present >> (token_of(g) + 8) & 1)) scores[2] = scores[3] = -infinity;

  float p[4];
  u32 weights[groups][2], most = 0;
  weights_of(p, weights, scores, scale_low, scale_high, state);
#pragma unroll
  for (int G = 0; G < groups; ++G) most = max_u16x2(most, max_u16x2(weights[G][0], weights[G][1]));
  // A half of 2^15 or more has a sign after this.
  bool beyond = (most + 0x08000800) & 0x80008000;
#pragma unroll
  for (int e = 0; e < 2; ++e) beyond |= state.sum[e] + (p[e] + p[2 + e]) > largest_sum;
  if (__any_sync(~0u, beyond)) [[unlikely]] {
    raise_anchors(state, scores, log_of_largest(scale_low), log_of_largest(scale_high));
    weights_of(p, weights, scores, scale_low, scale_high, state);
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) state.sum[e] += p[e] + p[2 + e];

  const unsigned char* values = tile + t * row_bytes + token_of(g) * 16;
#pragma unroll
  for (int G = 0; G < groups; ++G) {
    const u32 b0 = transpose_8x8(weights[G][0]), b1 = transpose_8x8(weights[G][1]);
    const uint4 x0 = load_16(values + G * group), x1 = load_16(values + 4 * row_bytes + G * group);
    const uint4 x8 = load_16(values + 8 * row_bytes + G * group);
    const uint4 x9 = load_16(values + 12 * row_bytes + G * group);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      u32 first[4], second[4];
      values_operand(first, second, word(x0, w), word(x1, w), word(x8, w), word(x9, w));
      mma_f16(state.out[G][2 * w], first, b0, b1);
      mma_f16(state.out[G][2 * w + 1], second, b0, b1);
    }
  }
}

// Put the warp's part where its ring was.
__device__ void store_part(Shared& shared, State& state, int warp, int lane) {
  const int g = lane / 4, t = lane % 4;
  auto* out = reinterpret_cast<float*>(shared.ring[warp]);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int head = 2 * t + e;
#pragma unroll
    for (int G = 0; G < groups; ++G)
#pragma unroll
      for (int w = 0; w < 4; ++w)
        *reinterpret_cast<float4*>(out + head * out_stride + G * group + token_of(g) * 16 + w * 4) =
            float4{state.out[G][2 * w][e], state.out[G][2 * w][2 + e], state.out[G][2 * w + 1][e],
                   state.out[G][2 * w + 1][2 + e]};
    float sum = state.sum[e];
#pragma unroll
    for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (g == 0) {
      shared.anchor[warp][head] = state.anchor[e];
      shared.sum[warp][head] = sum;
    }
  }
}

// Add the warps' parts, 16 threads a head, and write the block's result.
__device__ void write_result(const Shared& shared, const Call& call, int row, int split, int head_0) {
  const int g = threadIdx.x / 16, u = threadIdx.x % 16, head = head_0 + g;
  if (head >= call.heads) return;
  float top = lowest, sum = 0.f, share[warps];
  for (int w = 0; w < warps; ++w) top = fmaxf(top, shared.anchor[w][g]);
  for (int w = 0; w < warps; ++w) {
    share[w] = exp2_fast(shared.anchor[w][g] - top);
    sum += shared.sum[w][g] * share[w];
  }
  const bool empty = sum == 0.f;
  const float lse = empty ? -infinity : logf(sum) + top * ln_2;
  const float factor =
      empty ? 0.f : sink_factor(call.sink, head * call.sink_step, call.sink_number, lse) / sum;
  const long long to = split * call.out_split + row * call.out_row + head * call.out_head;
#pragma unroll 1  // this runs once, and code that is not in the cache costs more than a loop
  for (int d = u * 4; d < latent; d += 64) {
    float4 total = {};
#pragma unroll
    for (int w = 0; w < warps; ++w) {
      const auto* out = reinterpret_cast<const float*>(shared.ring[w]) + g * out_stride;
      const float4 x = *reinterpret_cast<const float4*>(out + d);
      total = {total.x + x.x * share[w], total.y + x.y * share[w], total.z + x.z * share[w],
               total.w + x.w * share[w]};
    }
    total = {total.x * factor, total.y * factor, total.z * factor, total.w * factor};
    store_4(call.out, to + d, call.out_number, total);
  }
  if (u == 0) call.lse[split * call.lse_split + row * call.lse_row + head * call.lse_head] = lse;
}

extern "C" __global__ void __launch_bounds__(warps * 32, 2) decode(const __grid_constant__ Call call) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  let_next_kernel_start();
  const int warp = uniform_warp_id(), lane = threadIdx.x % 32;
  const int row = blockIdx.x / call.splits, split = blockIdx.x % call.splits;
  const int head_0 = blockIdx.y * block_heads;

  // Tile i of this warp covers 16 entries of the list; lanes 0 to 15 hold one each.
  const Span span = span_of(call, row, split);
  const int first = span.begin + warp * tile_tokens, step = warps * tile_tokens;
  const int tiles = max(0, (span.end - first + step - 1) / step);
  const int* list = call.indices + row * call.list_row;
  auto entry = [&](int i) {
    const int at = first + i * step + lane;
    return lane < tile_tokens && i < tiles && at < span.end ? list[at] : -1;
  };
  auto start_tile = [&](int i, int slot) {
    const long long offset = row_offset(call, slot);
    const u32 present = __ballot_sync(~0u, offset >= 0);
    unsigned char* tile = shared.ring[warp][i % stages];
    if (i < stages && present != 0xffff) clear_absent(tile, present, lane);
    copy_rows(tile, shared_address(&shared.arrived[warp][i % stages]), call.cache, offset, present);
    return present;
  };
  if (elect_lane())
    for (int i = 0; i < stages; ++i) init_barrier(shared_address(&shared.arrived[warp][i]), 1);
  fence_before_bulk_copies();
  __syncwarp();

  State state = {};
#pragma unroll
  for (int e = 0; e < 2; ++e) state.anchor[e] = lowest;
  const float rope_scale = call.scale * log2_e;

  // Two turns ahead of the first tile only start copies; q is prepared while they are on their way.
  prefetch_q(call, row, head_0);
  int slot = entry(0);
  u32 present = 0, present_next = 0;
#pragma unroll 1
  for (int i = -stages; i < tiles; ++i) {
    if (i >= 0) {
      wait_for_phase(shared_address(&shared.arrived[warp][i % stages]), i / stages % 2);
      attend_tile(state, shared, shared.ring[warp][i % stages], present, rope_scale, lane);
      __syncwarp();  // every lane has read the tile before it is overwritten
    }
    present = present_next;
    if (i + stages < tiles) present_next = start_tile(i + stages, slot);
    slot = entry(i + stages + 1);
    if (i == -1) {
      store_q(shared, call, row, head_0);
      __syncthreads();
    }
  }
  store_part(shared, state, warp, lane);
  __syncthreads();
  write_result(shared, call, row, split, head_0);
}
