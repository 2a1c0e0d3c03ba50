// Sparse MLA attention over 656-byte rows, the readable version with tensor cores: 8 heads a block.
//
// Read this one second. In decode_simple.cu every head reads every row. Here a block reads a row once
// for 8 heads, and mma.sync multiplies. But no row comes while others are computed: see decode.cu.
//
// The products are S^T[16 tokens, 8 heads] = K Q^T and O^T[16 latent numbers, 8 heads] = V^T P^T.
// Eight heads fill the n8 of m16n8k16. With g = lane / 4 and t = lane % 4 a lane holds, of
//   C, that is S^T and O^T   rows g and g + 8, columns 2t and 2t + 1: two heads
//   A, that is K and V^T     rows g and g + 8, at the indices 2t, 2t + 1, 2t + 8, 2t + 9 of the sum
//   B, that is Q^T and P^T   column g, at the same four indices
// Lesson 15 draws it, in "The figure". A sum may run in any order that A and B share, so a lane takes
// for its four indices numbers of K, and of q, that lie in a row.
//
// Each of the 4 warps has one scale group, 128 latent numbers, and 16 of the 64 rotary ones. A turn is
// 32 tokens: (1) bring the rows to shared memory; (2) each warp puts its share of S^T there,
// scale[token] * (K Q^T of its group) + its rotary part; (3) each warp adds up the shares, P^T is
// 2^(S^T - anchor), and O^T of its group grows by V^T (P^T * scale[token]). A barrier ends each.
//
// e4m3 becomes bf16 beside q and fp16 beside P, both exact; scales stay outside, in fp32. P * scale has
// to fit fp16 whatever the scale. So the anchor is not the largest score but the largest score +
// log2(scale), less 8: the largest P * scale is 2^8. Scales below 2^-100 count as 2^-100 there, so P is
// 2^108 at most and its sum fits fp32. P below 2^-126 counts as 0.
#include "rows.cuh"

constexpr int warps = 4, threads = warps * 32, block_heads = 8;
constexpr int tiles = 2, tokens = tiles * tile_tokens;  // of a turn; a tile is the m16 of S^T
constexpr int row_pieces = row_bytes / 16, row_threads = threads / tokens;
constexpr float target = 8.f, smallest_log = -100.f;

struct Place { int warp, lane, g, t; };

struct Shared {
  uint4 rows[tokens][row_pieces];
  float shares[warps][tiles][4][32];  // a lane's four numbers of S^T, from each warp
  long long offsets[tokens];          // -1: the list has no row there

  __device__ const unsigned char* row(int token) const {
    return reinterpret_cast<const unsigned char*>(rows[token]);
  }
  __device__ float scale(int token, int warp) const {
    return reinterpret_cast<const float*>(row(token) + scales_at)[warp];
  }
};
static_assert(sizeof(Shared) == 25344, "what attention.py asks for");

struct Query {      // what the lane needs of head g, as B of K Q^T:
  uint4 latent[4];  // two steps each
  uint2 rope;       // one step
};

// What a lane keeps from turn to turn. O^T: heads 2t, 2t + 1, and 16 numbers of the warp's group from
// 16 token_of(g) on; number 4 w + b is tile 2 w + b / 2, row g + 8 (b % 2), see values_operand.
struct State {
  float out[8][4];
  float anchor[2], sum[2];
};

__device__ Query load_q(const Call& call, int row, int head, Place at) {
  if (head >= call.heads) return {};
  const auto* q = static_cast<const unsigned short*>(call.q) + row * call.q_row + head * call.q_head;
  // 16 numbers in a row from each half of the group, as score() takes them of a key.
  const auto* first = reinterpret_cast<const uint4*>(q + at.warp * group + at.t * 16);
  const auto* second = reinterpret_cast<const uint4*>(q + at.warp * group + 64 + at.t * 16);
  const auto* rotary = reinterpret_cast<const uint2*>(q + latent + at.warp * 16 + at.t * 4);
  return {{first[0], first[1], second[0], second[1]}, *rotary};
}

// The rows of `count` list entries, 4 threads a row; zeros where there is none, since 0 x V must be 0.
__device__ void bring_rows(Shared& shared, const Call& call, const int* list, int count) {
  const int token = threadIdx.x / row_threads, first = threadIdx.x % row_threads;
  const long long offset = token < count ? row_offset(call, list[token]) : -1;
  const auto* row = reinterpret_cast<const uint4*>(call.cache + offset);
  constexpr int most = (row_pieces + row_threads - 1) / row_threads;
  uint4 loaded[most] = {};  // all loads of a thread are on their way together
  if (offset >= 0)
#pragma unroll
    for (int i = 0; i < most; ++i)
      if (first + i * row_threads < row_pieces) loaded[i] = row[first + i * row_threads];
#pragma unroll
  for (int i = 0; i < most; ++i)
    if (first + i * row_threads < row_pieces) shared.rows[token][first + i * row_threads] = loaded[i];
  if (first == 0) shared.offsets[token] = offset;
}

// The warp's share of S^T of a tile.
__device__ void score(Shared& shared, const Query& q, int tile, Place at) {
  const int token = tile * tile_tokens + token_of(at.g);
  const unsigned char *low = shared.row(token), *high = shared.row(token + 8);
  float sums[4] = {}, rotary[4] = {};
  for (int half = 0; half < 2; ++half) {
    const uint4 x = load_16(low + at.warp * group + half * 64 + at.t * 16);
    const uint4 y = load_16(high + at.warp * group + half * 64 + at.t * 16);
    for (int j = 0; j < 4; ++j) {  // a step: one word, 4 numbers, of each row
      u32 a[4];
      keys_operand(a, word(x, j), word(y, j));
      for (u32& two : a) two = f32_to_bf16x2(f16_to_f32(two & 0xffff), f16_to_f32(two >> 16));
      const uint4 b = q.latent[half * 2 + j / 2];
      mma_bf16(sums, a, word(b, j % 2 * 2), word(b, j % 2 * 2 + 1));
    }
  }
  const uint2 x = *reinterpret_cast<const uint2*>(low + rope_at + at.warp * 32 + at.t * 8);
  const uint2 y = *reinterpret_cast<const uint2*>(high + rope_at + at.warp * 32 + at.t * 8);
  mma_bf16(rotary, {x.x, y.x, x.y, y.y}, q.rope.x, q.rope.y);
  for (int i = 0; i < 4; ++i)
    shared.shares[at.warp][tile][i][at.lane] =
        sums[i] * shared.scale(token + i / 2 * 8, at.warp) + rotary[i];
}

// A tile more: an online softmax as in decode_simple.cu, then the second product.
__device__ void add(State& state, const Shared& shared, float score_scale, int tile, Place at) {
  const int token = tile * tile_tokens + token_of(at.g);
  float scores[4] = {}, p[4], scales[4], logs[4];
  for (int i = 0; i < 4; ++i) {  // rows g, g, g + 8, g + 8; heads 2t, 2t + 1, 2t, 2t + 1
    for (int w = 0; w < warps; ++w) scores[i] += shared.shares[w][tile][i][at.lane] * score_scale;
    if (shared.offsets[token + i / 2 * 8] < 0) scores[i] = -infinity;
    scales[i] = shared.scale(token + i / 2 * 8, at.warp);
    logs[i] = fmaxf(log2_fast(scales[i]), smallest_log);
  }
  for (int e = 0; e < 2; ++e) {
    float anchor = fmaxf(scores[e] + logs[e], scores[2 + e] + logs[2 + e]) - target;
    for (int step = 4; step < 32; step *= 2)  // the lanes of one t have the 16 tokens
      anchor = fmaxf(anchor, __shfl_xor_sync(~0u, anchor, step));
    anchor = fmaxf(anchor, state.anchor[e]);
    const float shrink = exp2_fast(state.anchor[e] - anchor);
    for (int i = e; i < 4; i += 2) p[i] = exp2_fast(scores[i] - anchor);
    state.anchor[e] = anchor;
    state.sum[e] = state.sum[e] * shrink + (p[e] + p[2 + e]);
    for (int i = e; i < 32; i += 2) state.out[i / 4][i % 4] *= shrink;
  }
  // C has tokens where g is, B must have them where t is: a transpose.
  const u32 b0 = transpose_8x8(f32_to_f16x2(p[0] * scales[0], p[1] * scales[1]));
  const u32 b1 = transpose_8x8(f32_to_f16x2(p[2] * scales[2], p[3] * scales[3]));
  uint4 x[4];  // tokens t, t + 4, t + 8, t + 12 stand for the indices 2t, 2t + 1, 2t + 8, 2t + 9
  const int values = at.warp * group + token_of(at.g) * 16;
  for (int i = 0; i < 4; ++i)
    x[i] = load_16(shared.row(tile * tile_tokens + at.t + 4 * i) + values);
  for (int w = 0; w < 4; ++w) {
    u32 first[4], second[4];
    values_operand(first, second, word(x[0], w), word(x[1], w), word(x[2], w), word(x[3], w));
    mma_f16(state.out[2 * w], first, b0, b1);
    mma_f16(state.out[2 * w + 1], second, b0, b1);
  }
}

extern "C" __global__ void __launch_bounds__(threads) decode_mma(const __grid_constant__ Call call) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int row = blockIdx.x / call.splits, split = blockIdx.x % call.splits;
  const int head_0 = blockIdx.y * block_heads, lane = threadIdx.x % 32;
  const Place at{uniform_warp_id(), lane, lane / 4, lane % 4};

  const Query q = load_q(call, row, head_0 + at.g, at);
  State state = {{}, {lowest, lowest}, {}};
  const Span span = span_of(call, row, split);
  for (int i = span.begin; i < span.end; i += tokens) {
    bring_rows(shared, call, call.indices + row * call.list_row + i, span.end - i);
    __syncthreads();
    for (int tile = 0; tile < tiles; ++tile) score(shared, q, tile, at);
    __syncthreads();
    for (int tile = 0; tile < tiles; ++tile) add(state, shared, call.scale * log2_e, tile, at);
    __syncthreads();
  }

  for (int e = 0; e < 2; ++e) {
    const int head = head_0 + 2 * at.t + e;
    float sum = state.sum[e];
    for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (head >= call.heads) continue;
    const float lse = sum == 0.f ? -infinity : logf(sum) + state.anchor[e] * ln_2;
    const float sunk = sink_factor(call.sink, head * call.sink_step, call.sink_number, lse);
    const float factor = sum == 0.f ? 0.f : sunk / sum;
    const long long to = split * call.out_split + row * call.out_row + head * call.out_head;
    for (int w = 0; w < 4; ++w)
      store_4(call.out, to + at.warp * group + token_of(at.g) * 16 + w * 4, call.out_number,
              {state.out[2 * w][e] * factor, state.out[2 * w][2 + e] * factor,
               state.out[2 * w + 1][e] * factor, state.out[2 * w + 1][2 + e] * factor});
    if (at.warp == 0 && at.g == 0)
      call.lse[split * call.lse_split + row * call.lse_row + head * call.lse_head] = lse;
  }
}
