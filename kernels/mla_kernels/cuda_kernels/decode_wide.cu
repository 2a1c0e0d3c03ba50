// Sparse MLA attention over 656-byte rows on tensor cores: 32 heads of a row and one split a block.
//
// decode.cu reads and converts a row of the cache once for 8 heads; with 64 heads that is 8 times.
// Here 16 warps share each tile of 32 listed tokens and every row is read for 32 columns (heads).
//
// Data flow, one turn of the loop (two block barriers):
//
//   A   P V of the tile before, then K Q^T of this tile:
//       O^T[512, 32]: a warp owns 32 latent numbers of all columns, 32 registers a lane
//       S^T[32, 32]:  a warp has 16 tokens, 16 columns and one scale group (128 of the latent and 16
//                     of the rotary key), its part of q in 36 registers; the four groups' parts of
//                     a score go to shared memory in fp32, scale and all
//   --- barrier; the tile before is free, and the copy of the next but one starts in its place
//   B   softmax, a thread to two tokens of a column: adds the four parts, weights of the four groups
//       in fp16 to shared memory, in the order in which lanes read operand B of P V
//   --- barrier; if any reference rose, all warps rescale their sums
//
// Weights. p = 2^(score - top), and the weight of group G is p (scale[token, G] * unit[G]), with
// unit[G] = 2^(top - reference[G]) so that the largest weight of a group lies between 1 and 256
// whatever the scales are (decode.cu has it in the exponent, at five powers a score instead of one). A
// token whose p is below 2^-126 counts as 0 here, also if its scale would make up for it. References
// are those of decode.cu, and as lazy.
//
// Lanes: g = lane / 4, t = lane % 4. Of O^T a lane has, in column 8 n + 2 t + e, the four numbers from
// 32 warp + 4 g on, which leave as one 16-byte store: no exchange at the end.
#include "rows.cuh"

constexpr int warps = 16, threads = warps * 32, stages = 3, columns = 32, tile = 32;
constexpr int score_stride = tile + 4;         // of a column; 4 more keep banks apart
constexpr int weight_block = columns * 8 + 2;  // words of 16 tokens' weights; 2 more for the banks
constexpr float limit = 256.f;          // a larger weight makes the references rise
constexpr float smallest_log = -126.f;  // a scale of 0 is taken for this where references are chosen

struct Shared {
  unsigned char ring[stages][tile * row_bytes];
  float scores[groups][columns][score_stride];
  u32 weights[groups][tile / 16][weight_block];
  u64 arrived[stages];        // barriers: the rows of a tile are there
  u32 visible[stages][tile];  // bit c: column c sees the token
  float up[columns], q_factor[columns], rescale[groups][columns], reference[groups][columns];
};

static_assert(sizeof(Shared) == 91352, "what attention.py asks for; SM120 gives 101,376");

// The power of two that brings the largest latent number of a head of q to 16 .. 32; less where the
// rotary key, which is scaled with it, would come near the end of what a float holds.
__device__ void scale_q(Shared& shared, const Call& call, const unsigned short* q, int column,
                        int lane) {
  float largest = 0.f, rotary = 0.f;
  if (q) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 part = reinterpret_cast<const uint4*>(q)[lane * 2 + i];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const u32 two = word(part, w);
        largest = fmaxf(largest,
                        fmaxf(fabsf(bf16_to_f32(two & 0xffff)), fabsf(bf16_to_f32(two >> 16))));
      }
    }
    const u32 two = reinterpret_cast<const u32*>(q + latent)[lane];
    rotary = fmaxf(fabsf(bf16_to_f32(two & 0xffff)), fabsf(bf16_to_f32(two >> 16)));
  }
  largest = fmaxf(largest, rotary * 0x1p-60f);
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  int exponent = int(__float_as_uint(largest) >> 23) - 127 - 4;
  exponent = largest == 0.f ? 0 : max(-120, min(120, exponent));
  if (lane == 0) {
    shared.up[column] = __uint_as_float(u32(127 - exponent) << 23);
    shared.q_factor[column] = __uint_as_float(u32(127 + exponent) << 23) * call.scale * log2_e;
    for (int G = 0; G < groups; ++G) shared.reference[G][column] = lowest;
  }
}

// A warp's part of q as operand B: 16 columns, one group and a quarter of the rotary key.
struct Query {
  u32 latent[2][8][2];  // [8 columns][step of 16 numbers][register]
  u32 rotary[2][2];
};

__device__ void load_query(Query& query, const unsigned short* q, float up, int n, int G, int t) {
#pragma unroll
  for (int chunk = 0; chunk < 2; ++chunk)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto* from = reinterpret_cast<const uint4*>(q + G * group + chunk * 64 + t * 16) + i;
      const uint4 part = q ? *from : uint4{};
#pragma unroll
      for (int w = 0; w < 4; ++w)
        query.latent[n][chunk * 4 + i * 2 + w / 2][w % 2] = f32_to_f16x2(
            bf16_to_f32(word(part, w) & 0xffff) * up, bf16_to_f32(word(part, w) >> 16) * up);
    }
  const uint2 part = q ? *reinterpret_cast<const uint2*>(q + latent + G * 16 + t * 4) : uint2{};
  query.rotary[n][0] = f32_to_bf16x2(bf16_to_f32(part.x & 0xffff) * up, bf16_to_f32(part.x >> 16) * up);
  query.rotary[n][1] = f32_to_bf16x2(bf16_to_f32(part.y & 0xffff) * up, bf16_to_f32(part.y >> 16) * up);
}

// The part of a group in the scores of 16 tokens and 16 columns.
__device__ __forceinline__ void score(Shared& shared, const Query& query, const unsigned char* tokens,
                                      int token_0, int column_0, int G, int lane) {
  const int g = lane / 4, t = lane % 4;
  const unsigned char* low = tokens + (token_0 + token_of(g)) * row_bytes;
  const unsigned char* high = low + 8 * row_bytes;
  float sums[2][4] = {}, rotary[2][4] = {};
#pragma unroll
  for (int chunk = 0; chunk < 2; ++chunk) {
    const uint4 x = load_16(low + G * group + chunk * 64 + t * 16);
    const uint4 y = load_16(high + G * group + chunk * 64 + t * 16);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      u32 a[4];
      keys_operand(a, word(x, j), word(y, j));
#pragma unroll
      for (int n = 0; n < 2; ++n)
        mma_f16(sums[n], a, query.latent[n][chunk * 4 + j][0], query.latent[n][chunk * 4 + j][1]);
    }
  }
  const uint2 x = *reinterpret_cast<const uint2*>(low + rope_at + G * 32 + t * 8);
  const uint2 y = *reinterpret_cast<const uint2*>(high + rope_at + G * 32 + t * 8);
  const u32 a[4] = {x.x, y.x, x.y, y.y};
  const float scale[2] = {reinterpret_cast<const float*>(low + scales_at)[G],
                          reinterpret_cast<const float*>(high + scales_at)[G]};
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    mma_bf16(rotary[n], a, query.rotary[n][0], query.rotary[n][1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = column_0 + 8 * n + 2 * t + i % 2;
      shared.scores[G][column][token_0 + token_of(g) + i / 2 * 8] =
          scale[i / 2] * sums[n][i] + rotary[n][i];
    }
  }
}

// What the 16 threads of a column know.
struct Column {
  float q_factor, top = lowest, sum = 0.f, unit[groups] = {};
  bool rose = true;  // so what stands in `rescale` is not 1
};

__device__ __forceinline__ float largest_of_16(float x) {
#pragma unroll
  for (int step = 1; step < 16; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// Weights of two tokens of a column, in fp16 to shared memory; whether a reference rose.
__device__ __forceinline__ bool weigh(Shared& shared, Column& state, const unsigned char* tokens,
                                      const u32 (&visible)[tile], int column, int pair) {
  float2 score = {};
#pragma unroll
  for (int G = 0; G < groups; ++G) {
    const float2 part = reinterpret_cast<const float2*>(shared.scores[G][column])[pair];
    score = {score.x + part.x, score.y + part.y};
  }
  const uint2 seen = reinterpret_cast<const uint2*>(visible)[pair];
  score.x = seen.x >> column & 1 ? score.x * state.q_factor : -infinity;
  score.y = seen.y >> column & 1 ? score.y * state.q_factor : -infinity;
  const unsigned char* first = tokens + 2 * pair * row_bytes + scales_at;
  const float4 a = *reinterpret_cast<const float4*>(first);
  const float4 b = *reinterpret_cast<const float4*>(first + row_bytes);
  const float scale_a[groups] = {a.x, a.y, a.z, a.w}, scale_b[groups] = {b.x, b.y, b.z, b.w};

  float p_a = exp2_fast(score.x - state.top), p_b = exp2_fast(score.y - state.top);
  float weight_a[groups], weight_b[groups], largest = fmaxf(p_a, p_b);
#pragma unroll
  for (int G = 0; G < groups; ++G) {
    weight_a[G] = p_a * (scale_a[G] * state.unit[G]);
    weight_b[G] = p_b * (scale_b[G] * state.unit[G]);
    largest = fmaxf(largest, fmaxf(weight_a[G], weight_b[G]));
  }
  const bool raised = __any_sync(~0u, largest > limit);
  if (raised || state.rose) {
    const float top = raised ? fmaxf(state.top, largest_of_16(fmaxf(score.x, score.y))) : state.top;
    state.sum *= exp2_fast(state.top - top);
    state.top = top;
    p_a = exp2_fast(score.x - top);
    p_b = exp2_fast(score.y - top);
#pragma unroll
    for (int G = 0; G < groups; ++G) {
      const float log_a = fmaxf(log2_fast(scale_a[G]), smallest_log);
      const float log_b = fmaxf(log2_fast(scale_b[G]), smallest_log);
      const float high = largest_of_16(fmaxf(score.x + log_a, score.y + log_b));
      const float before = shared.reference[G][column];
      const float reference = raised ? fmaxf(before, high) : before;
      __syncwarp();  // all 16 have read it
      if (pair == G) {
        shared.reference[G][column] = reference;
        shared.rescale[G][column] = exp2_fast(before - reference);
      }
      state.unit[G] = exp2_fast(fminf(top - reference, 127.f));
      weight_a[G] = p_a * (scale_a[G] * state.unit[G]);
      weight_b[G] = p_b * (scale_b[G] * state.unit[G]);
    }
    state.rose = raised;
  }
  state.sum += p_a + p_b;
  // Word t of 16 tokens' weights of a column: two tokens; order 0, 4, 1, 5, 2, 6, 3, 7, so that the two
  // words that a lane needs as operand B lie side by side.
  const int at = column * 8 + pair % 4 * 2 + pair / 4 % 2;
#pragma unroll
  for (int G = 0; G < groups; ++G)
    shared.weights[G][pair / 8][at] = f32_to_f16x2(weight_a[G], weight_b[G]);
  return raised;
}

// O^T += V^T P^T for the warp's 32 latent numbers.
__device__ __forceinline__ void add_values(float (&out)[2][4][4], const Shared& shared,
                                           const unsigned char* tokens, int warp, int lane) {
  const int g = lane / 4, t = lane % 4, G = warp / 4;
#pragma unroll
  for (int block = 0; block < tile / 16; ++block) {
    const auto* from = reinterpret_cast<const u32*>(tokens + (block * 16 + 2 * t) * row_bytes) +
                       warp * 8 + g;
    constexpr int row = row_bytes / 4;
    u32 first[4], second[4];
    values_operand(first, second, from[0], from[row], from[8 * row], from[9 * row]);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const uint2 b =
          *reinterpret_cast<const uint2*>(&shared.weights[G][block][(n * 8 + g) * 8 + 2 * t]);
      mma_f16(out[0][n], first, b.x, b.y);
      mma_f16(out[1][n], second, b.x, b.y);
    }
  }
}

extern "C" __global__ void __launch_bounds__(threads, 1)
    decode_wide(const __grid_constant__ Call call) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  let_next_kernel_start();
  const int warp = uniform_warp_id(), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int row = blockIdx.x / call.splits, split = blockIdx.x % call.splits;
  const int head_0 = blockIdx.y * columns;

  // Of each tile a warp copies rows 2 warp and 2 warp + 1; lanes 0 and 1 hold their entries.
  const Span span = span_of(call, row, split);
  const int tiles = max(0, (span.end - span.begin + tile - 1) / tile);
  const int* list = call.indices + row * call.list_row;
  auto entry = [&](int i) {
    const int at = span.begin + i * tile + 2 * warp + lane;
    return lane < 2 && at < span.end ? list[at] : -1;
  };
  auto start_tile = [&](int i, int slot) {
    const int stage = i % stages;
    const long long offset = row_offset(call, slot);
    const u32 present = __ballot_sync(~0u, offset >= 0);
    unsigned char* rows = shared.ring[stage] + 2 * warp * row_bytes;
    if (lane < 2) shared.visible[stage][2 * warp + lane] = offset >= 0 ? ~0u : 0u;
    // Not only before the first use: an old row's scale may be too large for the column's unit.
    if (present != 3) clear_absent(rows, present | 0xfffc, lane);
    const u32 barrier = shared_address(&shared.arrived[stage]), target = shared_address(rows);
    const u64 source = reinterpret_cast<u64>(call.cache) + offset;
    if (elect_lane()) expect_bytes(barrier, __popc(present) * row_bytes);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto* from = reinterpret_cast<const void*>(__shfl_sync(~0u, source, r));
      if (present >> r & 1 && elect_lane())
        copy_bulk(target + r * row_bytes, from, row_bytes, barrier);
    }
  };
  if (threadIdx.x == 0)
    for (int i = 0; i < stages; ++i) init_barrier(shared_address(&shared.arrived[i]), warps);
  fence_before_bulk_copies();
  __syncthreads();
  int slot = entry(0), slot_next = entry(1);
#pragma unroll 1
  for (int i = 0; i < stages - 1; ++i) {
    if (i < tiles) start_tile(i, slot);
    slot = slot_next;
    slot_next = entry(i + 2);
  }

  const auto* q_row = static_cast<const unsigned short*>(call.q) + row * call.q_row;
  auto q_of = [&](int column) {
    const int head = head_0 + column;
    return head < call.heads ? q_row + head * call.q_head : nullptr;
  };
  for (int i = 0; i < 2; ++i) scale_q(shared, call, q_of(2 * warp + i), 2 * warp + i, lane);
  __syncthreads();
  const int G = warp / 4, token_0 = warp % 2 * 16, column_0 = warp / 2 % 2 * 16;
  Query query;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int column = column_0 + 8 * n + g;
    load_query(query, q_of(column), shared.up[column], n, G, t);
  }

  float out[2][4][4] = {};
  Column state;
  const int column = threadIdx.x / 16, pair = threadIdx.x % 16;
  state.q_factor = shared.q_factor[column];
#pragma unroll 1
  for (int i = 0; i < tiles; ++i) {
    const int stage = i % stages;
    if (i > 0) add_values(out, shared, shared.ring[(i - 1) % stages], warp, lane);
    wait_for_phase(shared_address(&shared.arrived[stage]), i / stages % 2);
    score(shared, query, shared.ring[stage], token_0, column_0, G, lane);
    __syncthreads();
    if (i + stages - 1 < tiles) start_tile(i + stages - 1, slot);
    slot = slot_next;
    slot_next = entry(i + stages + 1);
    const bool raised =
        weigh(shared, state, shared.ring[stage], shared.visible[stage], column, pair);
    if (__syncthreads_or(raised)) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float2 factor = *reinterpret_cast<const float2*>(&shared.rescale[G][n * 8 + 2 * t]);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          out[m][n][0] *= factor.x;
          out[m][n][1] *= factor.y;
          out[m][n][2] *= factor.x;
          out[m][n][3] *= factor.y;
        }
      }
    }
  }
  if (tiles > 0) add_values(out, shared, shared.ring[(tiles - 1) % stages], warp, lane);
  __syncthreads();  // a late warp may still read the factors of the last tile

  // The column's 16 threads hold its sum in parts; what remains is a factor for each group.
  float sum = state.sum;
#pragma unroll
  for (int step = 1; step < 16; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
  const bool empty = sum == 0.f;
  const float lse = empty ? -infinity : logf(sum) + state.top * ln_2;
  const int head = head_0 + column;
  float factor = 0.f;
  if (!empty && head < call.heads)
    factor = sink_factor(call.sink, head * call.sink_step, call.sink_number, lse) / sum;
  if (pair == 0 && head < call.heads)
    call.lse[split * call.lse_split + row * call.lse_row + head * call.lse_head] = lse;
#pragma unroll
  for (int k = 0; k < groups; ++k)
    if (pair == k)
      shared.rescale[k][column] = factor * exp2f(shared.reference[k][column] - state.top);
  __syncthreads();
#pragma unroll
  for (int n = 0; n < 4; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int c = n * 8 + 2 * t + e;
      if (head_0 + c >= call.heads) continue;
      const float x = shared.rescale[G][c];
      const long long to = split * call.out_split + row * call.out_row + (head_0 + c) * call.out_head;
      store_4(call.out, to + warp * 32 + g * 4, call.out_number,
              {out[0][n][e] * x, out[0][n][2 + e] * x, out[1][n][e] * x, out[1][n][2 + e] * x});
    }
}
