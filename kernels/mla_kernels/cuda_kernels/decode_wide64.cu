// Sparse MLA attention over 656-byte rows on tensor cores: 64 heads of a row and one split a block.
//
// decode_wide.cu reads and converts a row of the cache once for 32 heads, and its 16 warps compute
// twice what one could. Here 8 warps share each tile of 16 listed tokens for all 64 heads. O^T takes
// 128 KB of the 256 KB of registers and the latent q 64 KB: no other place on the chip holds them.
//
// A turn of the loop works on three tiles at once and ends with its only block barrier:
//
//   values  O^T[512, 64] += V^T P^T of tile i - 2. A warp has 64 latent numbers of all heads.
//   weigh   softmax of tile i - 1, a thread to two tokens of two heads: adds the four parts of a
//           score; a weight for each group, p scale[token, G], to shared memory in fp16.
//   score   S[64, 16] = Q K^T of tile i. A warp has 32 heads and one scale group (128 of the latent
//           and 16 of the rotary key), its part of the latent q in 64 registers; the four groups'
//           parts of a score go to shared memory in fp32, scale and all.
//
// No step needs what another of the same turn gives, so `values` and `weigh` are one run of
// instructions without a branch, and one hides what the other waits for.
//
// Weights. p = 2^(score - anchor), and the weight of a group is p scale, which must fit fp16 for any
// scale. So the anchor is a running maximum of score + log2(largest scale of the token), and p may
// be any number of fp32. It is lazy: it rises only when a weight would be 2^15 or more, and the
// largest is then 2^8 again; the sums that go with it are seldom rescaled. A scale below 2^-100
// counts as 2^-100 where the anchor is chosen; a token whose p is below 2^-126 counts as 0.
//
// Lanes: g = lane / 4, t = lane % 4. Of S a lane has entries 4 t .. 4 t + 3 of the tile for each of
// its heads. Of O^T it has, in column 8 n + 2 t + e, the eight latent numbers from 64 warp + 8 g on.
#include "rows.cuh"

constexpr int warps = 8, threads = warps * 32, stages = 4, columns = 64, tile = 16;
constexpr int batch = 8;       // tiles whose addresses are found at a time
constexpr int stride = 672;    // of a row in shared memory, see `place_of`
constexpr float target = 8.f;  // log2 of the largest weight after the anchor rose
constexpr float smallest_log = -100.f;
constexpr float largest_sum = 0x1p110f;  // of p; more makes the anchor rise, too

struct Shared {
  unsigned char ring[2][2][tile * stride];        // stages: tile i is in [i / 2 % 2][i % 2]
  float4 scores[2][groups][columns / 16][2][32];  // a group's part, as `score` leaves it
  uint2 weights[2][groups][columns][4];           // of entries 4 t .. 4 t + 3, in fp16
  uint4 rotary[warps][2][32];  // a warp's part of the rotary query as operand A, by lane
  u64 arrived[2][2];           // barriers: the rows of a tile are there
  float rescale[2][columns];   // what the sums of a head take after one of the anchors rose
  float q_factor[columns];     // of a score, to powers of two
  unsigned char visible[2][batch][tile / 2];  // two bits: whether there are these two entries
};

static_assert(sizeof(Shared) == 101280, "what attention.py asks for; SM120 gives 101,376");

// Where entry 4 t + e, e < 2, lies in a tile: entry 4 t in row 0, 1, 6 or 7, the next one two rows away
// from it. Entries 4 t + 2 and 4 t + 3 are 8 rows behind these. A lane of `score` reads 16 bytes of
// entry 4 (g / 2) + g % 2, a lane of `add_values` 8 bytes of entry 4 t + e. With rows at 42 pieces of 16
// bytes and in this order neither meets a bank conflict.
constexpr int second_half = 8 * stride;
__device__ __forceinline__ int place_of(int t, int e) {
  return ((t + 2 * (t & 2)) ^ (2 * e)) * stride;
}

// 2^exponent, for exponents of normal numbers.
__device__ __forceinline__ float power_of_two(int exponent) {
  return __uint_as_float(u32(127 + exponent) << 23);
}

// The exponent that brings the largest latent number of a head of q to 16 .. 32; more where the
// rotary key, which is scaled with it, would come near the end of what a float holds.
__device__ __forceinline__ int exponent_of(const float (&largest)[groups][columns], int column) {
  const float most = fmaxf(fmaxf(largest[0][column], largest[1][column]),
                           fmaxf(largest[2][column], largest[3][column]));
  const int exponent = int(__float_as_uint(most) >> 23) - 127 - 4;
  return most == 0.f ? 0 : max(-120, min(120, exponent));
}

__device__ __forceinline__ u32 scale_to_f16x2(u32 two, float up) {
  return f32_to_f16x2(bf16_to_f32(two & 0xffff) * up, bf16_to_f32(two >> 16) * up);
}

__device__ __forceinline__ u32 scale_to_bf16x2(u32 two, float up) {
  return f32_to_bf16x2(bf16_to_f32(two & 0xffff) * up, bf16_to_f32(two >> 16) * up);
}

// A lane's part of q, of one head: 32 latent numbers of the warp's group and 4 rotary ones.
struct Piece {
  uint4 latent[4];
  uint2 rotary;

  __device__ __forceinline__ void load(const unsigned short* q, int G, int t) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      latent[i] = q ? reinterpret_cast<const uint4*>(q + G * group)[i / 2 * 8 + t * 2 + i % 2]
                    : uint4{};
    rotary = q ? reinterpret_cast<const uint2*>(q + ::latent + G * 16)[t] : uint2{};
  }

  // The largest number, the rotary ones in units of 2^60.
  __device__ __forceinline__ float largest() const {
    constexpr u32 no_sign = 0x7fff7fff;
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int w = 0; w < 4; ++w) most = max_u16x2(most, word(latent[i], w) & no_sign);
    const u32 turned = max_u16x2(rotary.x & no_sign, rotary.y & no_sign);
    const float a = fmaxf(bf16_to_f32(most & 0xffff), bf16_to_f32(most >> 16));
    const float b = fmaxf(bf16_to_f32(turned & 0xffff), bf16_to_f32(turned >> 16));
    return fmaxf(a, b * 0x1p-60f);
  }
};

// A warp's part of the latent query as operand A: 32 heads and one group.
struct Query {
  u32 part[2][8][4];  // [16 heads][step of 16 numbers][register]
};

// The part of a group in the scores of a tile and 32 heads.
__device__ __forceinline__ void score(float4 (*scores)[2][32], const Query& query,
                                      const uint4 (&rotary)[2][32], const unsigned char* tokens,
                                      int G, int lane) {
  const int g = lane / 4, t = lane % 4;
  const unsigned char* keys = tokens + place_of(g / 2, g % 2);
  float sums[2][2][4] = {};  // [16 heads][entries 4 t + 2 n, and the next]
#pragma unroll
  for (int chunk = 0; chunk < 2; ++chunk) {
    uint4 x[2];
#pragma unroll
    for (int n = 0; n < 2; ++n)
      x[n] = load_16(keys + n * second_half + G * group + chunk * 64 + t * 16);
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const Pairs b = e4m3x4_to_f16(word(x[n], j));
#pragma unroll
        for (int m = 0; m < 2; ++m) mma_f16(sums[m][n], query.part[m][chunk * 4 + j], b.low, b.high);
      }
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const unsigned char* token = tokens + place_of(t, e) + scales_at + G * 4;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float scale = *reinterpret_cast<const float*>(token + n * second_half);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        sums[m][n][e] *= scale;
        sums[m][n][2 + e] *= scale;
      }
    }
  }
  uint2 x[2];
#pragma unroll
  for (int n = 0; n < 2; ++n)
    x[n] = *reinterpret_cast<const uint2*>(keys + n * second_half + rope_at + G * 32 + t * 8);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const uint4 q = rotary[m][lane];
    const u32 a[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int n = 0; n < 2; ++n) mma_bf16(sums[m][n], a, x[n].x, x[n].y);
  }
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < 2; ++n)
      scores[m][n][lane] = {sums[m][n][0], sums[m][n][1], sums[m][n][2], sums[m][n][3]};
}

// What the 8 threads of heads c and c + 8 know of them.
struct Heads {
  float anchor[2], sum[2];
};

// Two entries of two heads: p, and p times each scale as fp16.
__device__ __forceinline__ void weights_of(float (&p)[2][2], u32 (&weights)[2][groups],
                                           const float (&scores)[2][2], u32 visible,
                                           const float4& a, const float4& b, const Heads& heads) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    p[h][0] = visible & 1 ? exp2_fast(scores[h][0] - heads.anchor[h]) : 0.f;
    p[h][1] = visible & 2 ? exp2_fast(scores[h][1] - heads.anchor[h]) : 0.f;
    weights[h][0] = f32_to_f16x2(p[h][0] * a.x, p[h][1] * b.x);
    weights[h][1] = f32_to_f16x2(p[h][0] * a.y, p[h][1] * b.y);
    weights[h][2] = f32_to_f16x2(p[h][0] * a.z, p[h][1] * b.z);
    weights[h][3] = f32_to_f16x2(p[h][0] * a.w, p[h][1] * b.w);
  }
}

// log2 of a token's largest scale.
__device__ __forceinline__ float log_of_largest(const float4& scales) {
  const float largest = fmaxf(fmaxf(scales.x, scales.y), fmaxf(scales.z, scales.w));
  return fmaxf(log2_fast(largest), smallest_log);
}

// The softmax of heads c and c + 8, c = 16 (warp / 2) + 4 (warp % 2) + lane / 4 % 4, and entries
// 4 t + 2 n and the next, n = lane / 16. Whether an anchor rose.
// `meanwhile` is done after what is read is asked for.
template <class Meanwhile>
__device__ __forceinline__ bool weigh(Shared& shared, Heads& heads, int at,
                                      const unsigned char* tokens, u32 visible, int warp, int lane,
                                      Meanwhile meanwhile) {
  const int t = lane % 4, n = lane / 16, quarter = warp % 2 * 4 + lane / 4 % 4;
  const int column = warp / 2 * 16 + quarter;
  tokens += n * second_half + scales_at;
  float scores[2][2];
#pragma unroll
  for (int G = 0; G < groups; ++G) {
    const float4 part = shared.scores[at][G][warp / 2][n][quarter * 4 + t];
    scores[0][0] = G == 0 ? part.x : scores[0][0] + part.x;
    scores[0][1] = G == 0 ? part.y : scores[0][1] + part.y;
    scores[1][0] = G == 0 ? part.z : scores[1][0] + part.z;
    scores[1][1] = G == 0 ? part.w : scores[1][1] + part.w;
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float factor = shared.q_factor[column + 8 * h];
    scores[h][0] *= factor;
    scores[h][1] *= factor;
  }
  const float4 a = *reinterpret_cast<const float4*>(tokens + place_of(t, 0));
  const float4 b = *reinterpret_cast<const float4*>(tokens + place_of(t, 1));
  meanwhile();

  float p[2][2];
  u32 weights[2][groups], most = 0;
  weights_of(p, weights, scores, visible, a, b, heads);
#pragma unroll
  for (int G = 0; G < groups; ++G) most = max_u16x2(most, max_u16x2(weights[0][G], weights[1][G]));
  // A half of 2^15 or more has a sign after this.
  bool beyond = (most + 0x08000800) & 0x80008000;
  float sum[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    sum[h] = heads.sum[h] + (p[h][0] + p[h][1]);
    beyond |= sum[h] > largest_sum;
  }
  const bool raised = __any_sync(~0u, beyond);
  float rescale[2] = {1.f, 1.f};
  if (raised) [[unlikely]] {
    const float log_a = log_of_largest(a) - target, log_b = log_of_largest(b) - target;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float high = heads.anchor[h];
      if (visible & 1) high = fmaxf(high, scores[h][0] + log_a);
      if (visible & 2) high = fmaxf(high, scores[h][1] + log_b);
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 16));
      const float factor = exp2_fast(heads.anchor[h] - high);
      heads.anchor[h] = high;
      heads.sum[h] *= factor;
      rescale[h] = factor;
    }
    weights_of(p, weights, scores, visible, a, b, heads);
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] = heads.sum[h] + (p[h][0] + p[h][1]);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    heads.sum[h] = sum[h];
    if (n == 0 && t == 0) shared.rescale[at][column + 8 * h] = rescale[h];
#pragma unroll
    for (int G = 0; G < groups; ++G)
      reinterpret_cast<u32*>(&shared.weights[at][G][column + 8 * h][t])[n] = weights[h][G];
  }
  return raised;
}

// O^T += V^T P^T for the warp's 64 latent numbers.
__device__ __forceinline__ void add_values(float (&out)[4][8][4], const Shared& shared, int at,
                                           const unsigned char* tokens, bool raised, int warp,
                                           int lane) {
  const int t = lane % 4, g = lane / 4;
  if (raised) [[unlikely]] {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 factor = *reinterpret_cast<const float2*>(&shared.rescale[at][n * 8 + 2 * t]);
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        out[m][n][0] *= factor.x;
        out[m][n][1] *= factor.y;
        out[m][n][2] *= factor.x;
        out[m][n][3] *= factor.y;
      }
    }
  }
  const unsigned char* values = tokens + warp * 64 + g * 8;
  uint2 x[2][2];
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int n = 0; n < 2; ++n)
      x[n][e] = *reinterpret_cast<const uint2*>(values + place_of(t, e) + n * second_half);
  u32 a[4][4];
  values_operand(a[0], a[1], x[0][0].x, x[0][1].x, x[1][0].x, x[1][1].x);
  values_operand(a[2], a[3], x[0][0].y, x[0][1].y, x[1][0].y, x[1][1].y);
  const uint2* weights = &shared.weights[at][warp / 2][0][0] + lane;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const uint2 b = weights[n * 32];
#pragma unroll
    for (int m = 0; m < 4; ++m) mma_f16(out[m][n], a[m], b.x, b.y);
  }
}

extern "C" __global__ void __launch_bounds__(threads, 1)
    decode_wide64(const __grid_constant__ Call call) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  let_next_kernel_start();
  const int warp = uniform_warp_id(), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int row = blockIdx.x / call.splits, split = blockIdx.x % call.splits;
  const int head_0 = blockIdx.y * columns;

  const int G = warp / 2, half = warp % 2 * 32;
  const auto* q_row = static_cast<const unsigned short*>(call.q) + row * call.q_row;
  Piece piece[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int head = head_0 + half + 8 * k + g;
    piece[k].load(head < call.heads ? q_row + head * call.q_head : nullptr, G, t);
  }

  // Of each tile a warp copies entries 2 warp and 2 warp + 1, 41 pieces of 16 bytes each. Bulk copies, one
  // a row, are fewer instructions, but the 16 of a turn wait for each other, and a missing row needs a
  // branch. Places are found for a batch of tiles at a time: lane 2 k + r has entry 2 warp + r of tile k.
  constexpr u32 nowhere = ~0u;
  const Span span = span_of(call, row, split);
  const u32 tiles = max(0, span.end - span.begin + tile - 1) / tile;
  const int* list = call.indices + row * call.list_row;
  auto slot_of = [&](u32 i) {
    const int at = span.begin + (i + lane / 2) * tile + 2 * warp + lane % 2;
    return lane < 2 * batch && at < span.end ? list[at] : -1;
  };
  int slot = slot_of(0);
  u32 source;  // in pieces from the start of the cache (of 64 GiB at most), or `nowhere`
  auto next_batch = [&](u32 i) {
    const long long offset = row_offset(call, slot);
    slot = slot_of(i + batch);
    source = offset >= 0 ? u32(offset / 16) : nowhere;
    const u32 present = __ballot_sync(~0u, offset >= 0);
    if (lane < batch) shared.visible[i / batch % 2][lane][warp] = present >> (2 * lane) & 3;
  };
  // A row that is not there is filled with zeros: 0 x V must be 0, and an old row's scale may be too
  // large for the anchor. The last turns start tiles beyond the list, which has only such rows there.
  auto start_tile = [&](u32 i, const unsigned char* tokens, u64* arrived) {
    const int first = i % batch * 2, upper = lane / 16, part = lane % 16;
    const int step = place_of(warp / 2, 1) - place_of(warp / 2, 0);
    const u32 to = shared_address(tokens + place_of(warp / 2, 0) + warp % 2 * second_half);
    auto copy = [&](u32 to, u32 row, int piece) {
      copy_piece(to + piece * 16, call.cache + u64(row + piece) * 16, row != nowhere);
    };
    copy(to, __shfl_sync(~0u, source, first), lane);
    copy(to + step, __shfl_sync(~0u, source, first + 1), lane);
    const u32 row = __shfl_sync(~0u, source, first + upper);  // the last 9 pieces of both rows
    if (part < 9) copy(to + upper * step, row, 32 + part);
    arrive_after_copies(shared_address(arrived));
  };
  if (threadIdx.x == 0)
    for (int i = 0; i < stages; ++i)
      init_barrier(shared_address(&shared.arrived[i / 2][i % 2]), threads);
  __syncthreads();
  // Turn 1 multiplies weights that nobody has written by a tile that is not there.
  for (int k = threadIdx.x; k < sizeof(shared.weights) / 16; k += threads)
    reinterpret_cast<uint4*>(shared.weights)[k] = uint4{};
  for (int k = threadIdx.x; k < sizeof(shared.ring[1][1]) / 16; k += threads)
    reinterpret_cast<uint4*>(shared.ring[1][1])[k] = uint4{};
  next_batch(0);
#pragma unroll 1
  for (u32 i = 0; i < 2; ++i) start_tile(i, shared.ring[0][i], &shared.arrived[0][i]);

  const int column_0 = half + g;  // the lane's heads are this one and those 8, 16, 24 later
  auto& largest = reinterpret_cast<float(&)[groups][columns]>(shared.scores);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float x = piece[k].largest();
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
    if (t == 0) largest[G][column_0 + 8 * k] = x;
  }
  __syncthreads();
  Query query;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    u32 rotary[4];
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int k = m * 2 + upper;
      const float up = power_of_two(-exponent_of(largest, column_0 + 8 * k));
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int w = 0; w < 4; ++w)
          query.part[m][i * 2 + w / 2][upper + w % 2 * 2] =
              scale_to_f16x2(word(piece[k].latent[i], w), up);
      rotary[upper] = scale_to_bf16x2(piece[k].rotary.x, up);
      rotary[upper + 2] = scale_to_bf16x2(piece[k].rotary.y, up);
    }
    shared.rotary[warp][m][lane] = {rotary[0], rotary[1], rotary[2], rotary[3]};
  }
  const int column = warp / 2 * 16 + warp % 2 * 4 + g % 4;  // and that + 8: see `weigh`
  Heads heads;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (lane < 16 && t == 0)
      shared.q_factor[column + 8 * h] =
          power_of_two(exponent_of(largest, column + 8 * h)) * call.scale * log2_e;
    heads.anchor[h] = lowest;
    heads.sum[h] = 0.f;
  }
  __syncthreads();  // before `score` writes where `largest` was

  float out[4][8][4] = {};
  bool rose = false;  // an anchor did in the turn before
#pragma unroll 1
  for (u32 j = 0; 2 * j < tiles + 2; ++j) {
    auto& ring = shared.ring[j % 2];
    auto& other = shared.ring[j % 2 ^ 1];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const u32 i = 2 * j + h;
      if (h == 1 && (i + 1) % batch == 0) next_batch(i + 1);
      bool raised = false;
      if (i > 0 && i < tiles + 2) {
        const u32 visible = shared.visible[(i - 1) / batch % 2][(i - 1) % batch][2 * t + lane / 16];
        add_values(out, shared, h, other[h], rose, warp, lane);
        // In the middle of what has no branch: it hides the way to the addresses.
        auto start_next = [&] {
          if (h == 0) start_tile(i + 1, ring[1], &shared.arrived[j % 2][1]);
          if (h == 1) start_tile(i + 1, other[0], &shared.arrived[j % 2 ^ 1][0]);
        };
        raised = weigh(shared, heads, h ^ 1, h ? ring[0] : other[1], visible, warp, lane, start_next);
      }
      if (i < tiles) {
        wait_for_phase(shared_address(&shared.arrived[j % 2][h]), j / 2 % 2);
        score(&shared.scores[h][G][half / 16], query, shared.rotary[warp], ring[h], G, lane);
      }
      rose = __syncthreads_or(raised);
    }
  }

#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = heads.sum[h];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    sum += __shfl_xor_sync(~0u, sum, 16);
    const bool empty = sum == 0.f;
    const float lse = empty ? -infinity : logf(sum) + heads.anchor[h] * ln_2;
    const int c = column + 8 * h, head = head_0 + c;
    float factor = 0.f;
    if (head < call.heads && !empty)
      factor = sink_factor(call.sink, head * call.sink_step, call.sink_number, lse) / sum;
    if (lane < 16 && t == 0) {
      if (head < call.heads)
        call.lse[split * call.lse_split + row * call.lse_row + head * call.lse_head] = lse;
      shared.rescale[0][c] = factor;
    }
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int c = n * 8 + 2 * t + e;
      if (head_0 + c >= call.heads) continue;
      const float x = shared.rescale[0][c];
      const long long to = split * call.out_split + row * call.out_row +
                           (head_0 + c) * call.out_head + warp * 64 + g * 8;
#pragma unroll
      for (int w = 0; w < 2; ++w)
        store_4(call.out, to + w * 4, call.out_number,
                {out[2 * w][n][e] * x, out[2 * w][n][2 + e] * x, out[2 * w + 1][n][e] * x,
                 out[2 * w + 1][n][2 + e] * x});
    }
}
