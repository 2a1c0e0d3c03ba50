// Sparse MLA attention for rows of one request, which share most of their lists: each cached row that
// any of them lists is copied once and converted once.
//
// A verifier batch with three drafts has 4 rows a request. At 90 % overlap they name 2,660 different
// slots in 8,192 entries: 1.7 MB instead of 5.4 MB. 4 rows x 8 heads are 32 columns of S[columns, tokens]
// and O^T[512, columns]; union.cuh makes the list and says of each token which rows list it. A block has
// up to 4 rows and one split, a range of slot hashes. It also serves 2 rows x 16 heads, or 1 row x 32.
//
// Data flow, one turn of the loop (8 warps, tiles of 32 tokens, two block barriers):
//
//   A   the copy of the next tile starts; P V of the tile before; Q K^T of this tile. Warp (G, h) has scale
//       group G and h = 0 or 1:
//         O^T  64 of the group's 128 numbers, all columns: 64 registers
//         S    16 tokens (half h), 128 + 16 of the 576 numbers, all columns; q stays in 72 registers. Parts
//              of a score go to shared memory in fp32, scale and all.
//   --- barrier
//   B   softmax. A warp has 4 columns, all of one row, a thread 4 tokens of one: adds the four parts of
//       each score and leaves weights in fp16 where lanes read operand B of P V
//   --- barrier; where an anchor rose, sums are rescaled
//
// Q is operand A of the scores, so that a lane's scores are of two neighbouring tokens, which is what it
// needs of them as operand B of P V: nothing has to be transposed.
//
// Weights are p scale[token, G], p = 2^(score - anchor), with one anchor a column (see `State`): one power
// a score where decode.cu takes five. All of it is a column's own. So the bits of a row depend on its list
// and on which tokens the other rows add, not on their numbers. A token that a row does not list has
// weight 0 there, and 0 x NaN must not arise where only its neighbour lists a NaN: see `forget_nan`.
#include "union.cuh"

constexpr int stages = 3, columns = 32, blocks_of_8 = columns / 8, tile = 32;
constexpr float target = 8.f;  // log2 of the largest weight after the anchor rose
constexpr float smallest_log = -100.f, largest_sum = 0x1p110f;

struct UnionCall {
  Call call;
  const int* starts;  // [requests + 1] first rows of the requests; null: each has `request_rows`
  int request_rows;   // of a request at most
  int row_shift;      // a block has 2^this rows: 1, 2 or 4, with 32, 16 or 8 heads of each
  int row_parts, parts;  // blocks for the rows of a request, and for its rows and heads
  u32 last_hash;      // of the first split, 2^32 / splits rounded up less 1; so many in every split
};

struct Scores {
  float4 part[2][2][32];  // [16 columns][first or last 8 of them][lane]
  float4 pad[4];          // keeps the two halves of a tile on different banks
};

struct Loop {
  unsigned char ring[stages][tile * row_bytes];
  Scores scores[groups][2];
  uint4 weights[groups][blocks_of_8][32];
};

struct Shared {
  union {
    Table table;
    Loop loop;
    float out[columns][latent + 4];  // 4 more keep banks apart
  };
  Union list;
  u64 arrived[stages];  // barriers: the rows of a tile are there
  u64 risen;            // byte w: an anchor that warp w keeps rose
  float rescale[columns];
  float largest[groups][columns], q_factor[columns];
};

static_assert(sizeof(Shared) == 99216, "what union.py asks for; SM120 gives 101,376");

// Which rows and heads a block has.
struct Place {
  int row_0, rows, head_0, row_shift;

  __device__ __forceinline__ int row_of(int block) const { return block & ((1 << row_shift) - 1); }
  __device__ __forceinline__ int head_of(int column) const {
    return head_0 + (column >> 3 >> row_shift) * 8 + (column & 7);
  }
  __device__ __forceinline__ bool has(int column, const Call& call) const {
    return row_of(column >> 3) < rows && head_of(column) < call.heads;
  }
};

__device__ __forceinline__ Place place_of(const UnionCall& given, int request, int part) {
  const int rows = 1 << given.row_shift;
  const int head_part = part == 0 ? 0 : part / given.row_parts;
  const int begin = (part - head_part * given.row_parts) * rows;
  const int first = given.starts ? given.starts[request] : request * given.request_rows;
  int end = given.starts ? given.starts[request + 1] : first + given.request_rows;
  end = min(min(end, first + begin + rows), given.call.rows);
  return {first + begin, max(0, end - first - begin), head_part * (columns >> given.row_shift),
          given.row_shift};
}

// A warp's part of q as operand A: all columns, one group and a quarter of the rotary key.
struct Query {
  u32 latent[2][8][4];  // [16 columns][step of 16 numbers][register]
  u32 rotary[2][4];
};

// Load it as it is, and say what the largest number of each column is in this part. The rotary key counts
// 2^-60 of its size: see `convert`.
__device__ __forceinline__ void load_query(Query& query, Shared& shared, const Call& call,
                                           const Place& place, int G, int h, int lane) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < blocks_of_8; ++n) {
    const int column = n * 8 + g;
    const bool has = place.has(column, call);
    const auto* q = static_cast<const unsigned short*>(call.q);
    if (has)
      q += (place.row_0 + place.row_of(n)) * call.q_row + place.head_of(column) * call.q_head;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto* from = reinterpret_cast<const uint4*>(q + G * group + i / 2 * 64 + t * 16) + i % 2;
      const uint4 part = *from;
#pragma unroll
      for (int w = 0; w < 4; ++w)
        query.latent[n / 2][2 * i + w / 2][n % 2 + w % 2 * 2] = has ? word(part, w) : 0;
    }
    const uint2 part = *reinterpret_cast<const uint2*>(q + latent + G * 16 + t * 4);
    query.rotary[n / 2][n % 2] = has ? part.x : 0;
    query.rotary[n / 2][n % 2 + 2] = has ? part.y : 0;
  }
  auto largest_of = [](u32 two) { return max(two & 0xffff, two >> 16); };
#pragma unroll
  for (int n = 0; n < blocks_of_8; ++n) {
    u32 two = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int r = n % 2; r < 4; r += 2)
        two = max_u16x2(two, query.latent[n / 2][i][r] & 0x7fff7fff);
    const u32 rotary = largest_of(max_u16x2(query.rotary[n / 2][n % 2] & 0x7fff7fff,
                                            query.rotary[n / 2][n % 2 + 2] & 0x7fff7fff));
    float largest = fmaxf(bf16_to_f32(largest_of(two)), bf16_to_f32(rotary) * 0x1p-60f);
#pragma unroll
    for (int step = 1; step < 4; step *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    if (t == 0 && h == 0) shared.largest[G][n * 8 + g] = largest;
  }
}

// Multiply by the power of two that brings the largest latent number of a head to 16 .. 32, less where
// the rotary key, which is scaled with it, would come near the end of what a float holds; then to fp16.
__device__ __forceinline__ void convert(Query& query, Shared& shared, const Call& call, int G, int lane) {
#pragma unroll
  for (int n = 0; n < blocks_of_8; ++n) {
    const int column = n * 8 + lane / 4;
    float largest = 0.f;
#pragma unroll
    for (int k = 0; k < groups; ++k) largest = fmaxf(largest, shared.largest[k][column]);
    int exponent = int(__float_as_uint(largest) >> 23) - 127 - 4;
    exponent = largest == 0.f ? 0 : max(-120, min(120, exponent));
    if (lane % 4 == 0 && G == 0)
      shared.q_factor[column] = __uint_as_float(u32(127 + exponent) << 23) * call.scale * log2_e;
    const u32 up = u32(127 - exponent) << 7, two_up = up | up << 16;
#pragma unroll
    for (int r = n % 2; r < 4; r += 2) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        u32& x = query.latent[n / 2][i][r];
        x = multiply_bf16x2(x, two_up);
        x = f32_to_f16x2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000));
      }
      query.rotary[n / 2][r] = multiply_bf16x2(query.rotary[n / 2][r], two_up);
    }
  }
}

// Entry e of a tile lies in row 16 (e / 16) + 4 (e % 4) + e / 4 % 4 of its place in the ring. So entries
// 4 t .. 4 t + 3 of a half are what lane t works on, and in this order no bank is met twice.
__device__ __forceinline__ int row_of_entry(int e) { return e / 16 * 16 + e % 4 * 4 + e / 4 % 4; }

// The part of group G in the scores of half h of a tile: S = Q K^T, operand B from tokens.
__device__ __forceinline__ void score(Scores& scores, const Query& query, const unsigned char* half,
                                      int G, int lane) {
  const int g = lane / 4, t = lane % 4;
  // Columns 2t and 2t + 1 of eight tokens are rows t and t + 4; so row token_of(g) is column g.
  const unsigned char* keys = half + token_of(g) * row_bytes;
  float sums[2][2][4] = {};  // [16 columns][8 tokens][number]
#pragma unroll
  for (int chunk = 0; chunk < 2; ++chunk) {
    uint4 x[2];
#pragma unroll
    for (int n = 0; n < 2; ++n)
      x[n] = load_16(keys + n * 8 * row_bytes + G * group + chunk * 64 + t * 16);
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const Pairs b = e4m3x4_to_f16(word(x[n], j));
#pragma unroll
        for (int m = 0; m < 2; ++m)
          mma_f16(sums[m][n], query.latent[m][chunk * 4 + j], b.low, b.high);
      }
  }
  const unsigned char* token = half + t * row_bytes + scales_at + G * 4;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float scale_0 = *reinterpret_cast<const float*>(token + n * 8 * row_bytes);
    const float scale_1 = *reinterpret_cast<const float*>(token + (n * 8 + 4) * row_bytes);
    const uint2 x = *reinterpret_cast<const uint2*>(keys + n * 8 * row_bytes + rope_at + G * 32 + t * 8);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      float(&c)[4] = sums[m][n];
      c[0] *= scale_0;
      c[1] *= scale_1;
      c[2] *= scale_0;
      c[3] *= scale_1;
      mma_bf16(c, query.rotary[m], x.x, x.y);
    }
  }
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int last = 0; last < 2; ++last)
      scores.part[m][last][lane] = {sums[m][0][2 * last], sums[m][0][2 * last + 1],
                                    sums[m][1][2 * last], sums[m][1][2 * last + 1]};
}

// What the 8 threads that weigh a column know of it. A weight is p scale[token, G], p = 2^(score -
// anchor); the anchor is a running maximum of score + log2(largest scale of the token), less `target`.
// It rises only when a weight would be 2^15 or more.
struct State {
  float q_factor, anchor = lowest, sum = 0.f;
};

// Take what is not finite out of a token's latent numbers and scales; its score has said that there may be
// such a thing. A row that lists the token is NaN by that score already, and has to be; but in P V it
// would reach the other rows too, for 0 x NaN is NaN. All warps do the same here.
__device__ void forget_nan(unsigned char* row, int lane) {
  uint4 x = reinterpret_cast<uint4*>(row)[lane];
  u32 found = 0;
  auto clean = [&](u32 bytes) {
#pragma unroll
    for (int shift = 0; shift < 32; shift += 8)
      if ((bytes >> shift & 0x7f) == 0x7f) {
        bytes &= ~(0xffu << shift);
        found = 1;
      }
    return bytes;
  };
  x = {clean(x.x), clean(x.y), clean(x.z), clean(x.w)};
  if (found) reinterpret_cast<uint4*>(row)[lane] = x;
  float* scales = reinterpret_cast<float*>(row + scales_at);
  if (lane < groups && !(fabsf(scales[lane]) < infinity)) scales[lane] = 0.f;
}

// Softmax of a tile. A warp has half of the columns of block j, all of one row; a thread has four entries
// of a column, 4 t .. 4 t + 3 of half h.
__device__ __forceinline__ void weigh(Shared& shared, State& state, unsigned char* tokens,
                                      const unsigned char* masks, int row, int warp, int lane) {
  const int j = warp / 2, h = lane / 4 % 2, t = lane % 4, at = (warp % 2 * 4 + lane / 8) * 4 + t;
  float scores[4];
#pragma unroll
  for (int G = 0; G < groups; ++G) {
    const float4 x = shared.loop.scores[G][h].part[j / 2][j % 2][at];
    scores[0] = G ? scores[0] + x.x : x.x;
    scores[1] = G ? scores[1] + x.y : x.y;
    scores[2] = G ? scores[2] + x.z : x.z;
    scores[3] = G ? scores[3] + x.w : x.w;
  }
  // NaN in a token is NaN in all of its scores.
  const float all = (scores[0] + scores[1]) + (scores[2] + scores[3]);
  if (__any_sync(~0u, !(fabsf(all) < infinity))) {
#pragma unroll 1
    for (int token = 0; token < tile; ++token) forget_nan(tokens + token * row_bytes, lane);
    __syncwarp();
  }
  const u32 mask = *reinterpret_cast<const u32*>(masks + h * 16 + t * 4) >> row;
  float4 scale[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    scale[i] = *reinterpret_cast<const float4*>(tokens + (h * 16 + i * 4 + t) * row_bytes + scales_at);

  float p[4], sum;
  u32 weights[groups][2];
  bool raised = false;
#pragma unroll 1
  while (true) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      p[i] = exp2_fast(scores[i] * state.q_factor - state.anchor);
      if (!(mask >> (8 * i) & 1)) p[i] = 0.f;
    }
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 &a = scale[2 * i], &b = scale[2 * i + 1];
      weights[0][i] = f32_to_f16x2(p[2 * i] * a.x, p[2 * i + 1] * b.x);
      weights[1][i] = f32_to_f16x2(p[2 * i] * a.y, p[2 * i + 1] * b.y);
      weights[2][i] = f32_to_f16x2(p[2 * i] * a.z, p[2 * i + 1] * b.z);
      weights[3][i] = f32_to_f16x2(p[2 * i] * a.w, p[2 * i + 1] * b.w);
#pragma unroll
      for (int G = 0; G < groups; ++G) most = max_u16x2(most, weights[G][i]);
    }
    sum = state.sum + ((p[0] + p[1]) + (p[2] + p[3]));
    // A half of 2^15 or more has a sign after this.
    const bool beyond = (most + 0x08000800) & 0x80008000 || sum > largest_sum;
    if (raised || !__any_sync(~0u, beyond)) break;
    raised = true;
    float high = state.anchor;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float largest = fmaxf(fmaxf(scale[i].x, scale[i].y), fmaxf(scale[i].z, scale[i].w));
      const float log = fmaxf(log2_fast(largest), smallest_log) - target;
      if (mask >> (8 * i) & 1) high = fmaxf(high, scores[i] * state.q_factor + log);
    }
#pragma unroll
    for (int step = 1; step < 8; step *= 2) high = fmaxf(high, __shfl_xor_sync(~0u, high, step));
    const float factor = exp2_fast(state.anchor - high);
    state.anchor = high;
    state.sum *= factor;
    if (lane % 8 == 0) shared.rescale[warp * 4 + lane / 8] = factor;
  }
  state.sum = sum;
  if (lane == 0) reinterpret_cast<unsigned char*>(&shared.risen)[warp] = raised;
#pragma unroll
  for (int G = 0; G < groups; ++G)
    reinterpret_cast<uint2*>(&shared.loop.weights[G][j][at])[h] = {weights[G][0], weights[G][1]};
}

// Which 8 of the group's 128 numbers a lane has in P V. In this order the 16 lanes that shared memory
// serves at once, four tokens x four pieces, fall on different banks.
__device__ __forceinline__ int piece_of(int g, int half) {
  return (g & 1) + (g >> 1 & 1) * 8 + (g >> 2) * 4 + half * 2;
}

using Sums = float[4][blocks_of_8][4];

// O^T += V^T P^T.
__device__ __forceinline__ void add_values(Sums& out, const uint4 (&weights)[blocks_of_8][32],
                                           const unsigned char* tokens, int G, int half, int lane) {
  uint4 b[blocks_of_8];
#pragma unroll
  for (int n = 0; n < blocks_of_8; ++n) b[n] = weights[n][lane];
  const unsigned char* from = tokens + lane % 4 * row_bytes + G * group + piece_of(lane / 4, half) * 8;
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    uint2 x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      x[i] = *reinterpret_cast<const uint2*>(from + (step * 16 + i * 4) * row_bytes);
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      u32 first[4], second[4];
      values_operand(first, second, w ? x[0].y : x[0].x, w ? x[1].y : x[1].x, w ? x[2].y : x[2].x,
                     w ? x[3].y : x[3].x);
#pragma unroll
      for (int n = 0; n < blocks_of_8; ++n) {
        mma_f16(out[2 * w][n], first, word(b[n], 2 * step), word(b[n], 2 * step + 1));
        mma_f16(out[2 * w + 1][n], second, word(b[n], 2 * step), word(b[n], 2 * step + 1));
      }
    }
  }
}

// Multiply the sums of the columns whose anchors rose.
__device__ __forceinline__ void rescale(Sums& out, const float (&factors)[columns], u64 risen, int t) {
#pragma unroll
  for (int n = 0; n < blocks_of_8; ++n) {
    const bool own = risen >> (16 * n + t / 2 * 8) & 1;
    const float2 two = *reinterpret_cast<const float2*>(&factors[n * 8 + 2 * t]);
    const float2 factor = {own ? two.x : 1.f, own ? two.y : 1.f};
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      out[m][n][0] *= factor.x;
      out[m][n][1] *= factor.y;
      out[m][n][2] *= factor.x;
      out[m][n][3] *= factor.y;
    }
  }
}

extern "C" __global__ void __launch_bounds__(union_threads, 1)
    decode_union(const __grid_constant__ UnionCall given) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Call& call = given.call;
  let_next_kernel_start();
  const int warp = uniform_warp_id(), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int part = given.parts == 1 ? 0 : int(blockIdx.y) % given.parts;
  const int split = given.parts == 1 ? int(blockIdx.y) : int(blockIdx.y) / given.parts;
  const Place place = place_of(given, blockIdx.x, part);
  if (place.rows == 0) return;

  // 2, 4 or 8 warps look through the list of a row.
  List list;
  list.row = place.row_of(warp);
  const int row = place.row_0 + list.row;
  list.entries = list.row < place.rows ? call.indices + row * call.list_row : nullptr;
  list.width = call.topk;
  list.count = list.entries && call.counts ? min(call.topk, call.counts[row * call.count_row]) : call.topk;
  list.first = (warp >> place.row_shift) * piece;
  list.step = (union_warps >> place.row_shift) * piece;
  list.aligned = reinterpret_cast<u64>(list.entries) % 16 == 0 && list.width % 4 == 0;
  auto fetch_first = [&] {
    if (list.entries && list.first < list.width)
      fetch(shared.table.queue[warp], shared.list.arrived[warp], list, list.first, lane);
  };
  if (elect_lane()) {
    init_barrier(shared_address(&shared.list.arrived[warp]), 1);
    if (warp < stages) init_barrier(shared_address(&shared.arrived[warp]), union_warps);
  }
  fence_before_bulk_copies();
  __syncwarp();
  fetch_first();

  const int G = warp / 2, h = warp % 2;  // where it weighs, the warp's block of columns has number G
  Query query;
  load_query(query, shared, call, place, G, h, lane);
  clear(shared.table);
  if (threadIdx.x == 0) shared.list.different = shared.list.remaining = 0;
  __syncthreads();
  convert(query, shared, call, G, lane);
  State state;
  Sums out = {};

  const u32 slots = u32(call.slots < 0x7fffffff ? call.slots : 0x7fffffff);
  Range left = {split * (given.last_hash + 1), given.last_hash};
  if (split == call.splits - 1) left.last = ~left.first;
  u32 width = left.last, level = 0, turn = 0, pieces = 0;
  auto make_room = [&] {  // for the next union, once all have done with this one
    __syncthreads();
    fence_before_bulk_copies();
    __syncthreads();
    fetch_first();
    clear(shared.table);
    if (threadIdx.x == 0) shared.list.different = 0;
    __syncthreads();
  };
#pragma unroll 1
  while (true) {
    const Range now = {left.first, min(width, left.last)};
    const Made made =
        make_union(shared.list, shared.table, list, slots, now, level, pieces, warp, lane);
    if (made.tokens < 0) {
      width = now.last / 2;
      make_room();
      continue;
    }
    state.q_factor = shared.q_factor[warp * 4 + lane / 8];

    const int tiles = (made.tokens + tile - 1) / tile;
    auto stage_of = [&](int i) { return (turn + i) % stages; };
    // A warp copies entries 4 warp .. 4 warp + 3 of a tile.
    auto start_tile = [&](int i) {
      const int first = i * tile + 4 * warp, stage = stage_of(i);
      const u32 barrier = shared_address(&shared.arrived[stage]);
      unsigned char* rows = shared.loop.ring[stage] + row_of_entry(4 * warp) * row_bytes;
      const u32 target = shared_address(rows);
      const u64 source = reinterpret_cast<u64>(call.cache) +
                         row_offset(call, shared.list.slots[first + lane % 4]);
      const void* from[4];
#pragma unroll
      for (int r = 0; r < 4; ++r)
        from[r] = reinterpret_cast<const void*>(__shfl_sync(~0u, source, r));
      const int present = made.tokens - first;
      if (present >= 4) {
        if (elect_lane()) {
          expect_bytes(barrier, 4 * row_bytes);
#pragma unroll
          for (int r = 0; r < 4; ++r) copy_bulk(target + r * 4 * row_bytes, from[r], row_bytes, barrier);
        }
        return;
      }
      // A row that is not there must be finite: 0 x NaN is NaN.
      for (int r = max(present, 0); r < 4; ++r)
        for (int piece = lane; piece < row_bytes / 16; piece += 32)
          reinterpret_cast<uint4*>(rows + r * 4 * row_bytes)[piece] = uint4{};
      fence_before_bulk_copies();
      __syncwarp();
      if (elect_lane()) {
        expect_bytes(barrier, max(present, 0) * row_bytes);
#pragma unroll
        for (int r = 0; r < 3; ++r)
          if (r < present) copy_bulk(target + r * 4 * row_bytes, from[r], row_bytes, barrier);
      }
    };
    if (tiles > 0) start_tile(0);
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
      unsigned char *tokens = shared.loop.ring[stage_of(i)], *before = shared.loop.ring[stage_of(i + 2)];
      Scores& scores = shared.loop.scores[G][h];
      const unsigned char* half = tokens + h * 16 * row_bytes;
      if (i + 1 < tiles) start_tile(i + 1);
      wait_for_phase(shared_address(&shared.arrived[stage_of(i)]), (turn + i) / stages % 2);
      if (i > 0) {
        add_values(out, shared.loop.weights[G], before, G, h, lane);
        score(scores, query, half, G, lane);
      } else {
        score(scores, query, half, G, lane);
      }
      __syncthreads();
      weigh(shared, state, tokens, shared.list.masks + i * tile, place.row_of(G), warp, lane);
      __syncthreads();
      if (const u64 risen = shared.risen) rescale(out, shared.rescale, risen, t);
    }
    if (tiles > 0)
      add_values(out, shared.loop.weights[G], shared.loop.ring[stage_of(tiles - 1)], G, h, lane);
    turn += tiles;
    if (made.more) {
      ++level;
    } else {
      level = 0;
      if (now.last == left.last) break;
      left = {now.first + now.last + 1, left.last - now.last - 1};
    }
    make_room();
  }
  __syncthreads();  // the output lies over rows that a late warp may still multiply

  // What remains of a column is a factor.
#pragma unroll
  for (int step = 1; step < 8; step *= 2) state.sum += __shfl_xor_sync(~0u, state.sum, step);
  auto row_of = [&](int column) { return place.row_0 + place.row_of(column >> 3); };
  if (lane % 8 == 0) {
    const int column = warp * 4 + lane / 8, head = place.head_of(column);
    const bool empty = state.sum == 0.f;
    const float lse = empty ? -infinity : logf(state.sum) + state.anchor * ln_2;
    float factor = 0.f;
    if (place.has(column, call)) {
      call.lse[split * call.lse_split + row_of(column) * call.lse_row + head * call.lse_head] = lse;
      if (!empty)
        factor = sink_factor(call.sink, head * call.sink_step, call.sink_number, lse) / state.sum;
    }
    shared.rescale[column] = factor;
  }
  // O^T turns through shared memory, so that whole lines leave, by a loop: its code is fetched once.
#pragma unroll
  for (int n = 0; n < blocks_of_8; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
      for (int w = 0; w < 2; ++w)
        *reinterpret_cast<float4*>(&shared.out[n * 8 + 2 * t + e][G * group + piece_of(g, h) * 8 + 4 * w]) =
            {out[2 * w][n][e], out[2 * w][n][2 + e], out[2 * w + 1][n][e], out[2 * w + 1][n][2 + e]};
  __syncthreads();
  // A block of 8 columns is a row's; half of the threads have its even heads, half its odd ones.
  const int d = threadIdx.x % 128 * 4, odd = threadIdx.x / 128;
#pragma unroll 1
  for (int n = 0; n < blocks_of_8; ++n) {
    if (place.row_of(n) >= place.rows) continue;
    const int head = place.head_of(8 * n) + odd;
    long long to = split * call.out_split + (place.row_0 + place.row_of(n)) * call.out_row +
                   head * call.out_head + d;
#pragma unroll
    for (int i = 0; i < 8; i += 2, to += 2 * call.out_head) {
      if (head + i >= call.heads) continue;
      const int column = 8 * n + odd + i;
      const float x = shared.rescale[column];
      const float4 y = *reinterpret_cast<const float4*>(&shared.out[column][d]);
      store_4(call.out, to, call.out_number, {y.x * x, y.y * x, y.z * x, y.w * x});
    }
  }
}
