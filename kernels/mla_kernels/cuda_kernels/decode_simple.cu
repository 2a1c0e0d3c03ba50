// Sparse MLA attention, the short version: one warp computes one head of one row.
//
// Read this one first. It is rung 9 of the ladder in CUDA: for each listed slot a score, an online
// softmax, and the weighted sum of the latents. All sums are fp32 and no tensor core is used, so it
// serves every format (rows of 656 bytes, bf16, fp16, fp32) and is exact enough for fp32 queries.
//
// Data flow of a warp (32 lanes):
//   q      lane l holds latent numbers 16 l .. 16 l + 15 and rotary numbers 2 l, 2 l + 1
//   a row  the same numbers, read with 16-byte loads; lanes 8 g .. 8 g + 7 share group g's scale
//   score  18 products a lane, then 5 shuffles that add over the warp
//   out    16 running sums a lane: the value is the latent that the lane holds already
//
// What it costs: a row of the cache is read once for each head, 8 or 64 times what is needed, and
// each key waits for the one before. decode_mma.cu changes both.
#include "call.cuh"

struct Piece {
  float latent[16], rope[2];
};

template <int number>
__device__ Piece load_piece(const unsigned char* row, int lane) {
  Piece piece;
  for (int i = 0; i < 16; ++i) piece.latent[i] = load_number(row, lane * 16 + i, number);
  for (int i = 0; i < 2; ++i) piece.rope[i] = load_number(row, latent + lane * 2 + i, number);
  return piece;
}

constexpr int fp8_row = 3;

template <>
__device__ Piece load_piece<fp8_row>(const unsigned char* row, int lane) {
  Piece piece;
  uint4 bytes = *reinterpret_cast<const uint4*>(row + lane * 16);
  float scale = reinterpret_cast<const float*>(row + scales_at)[lane / 8];
  const u32 words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
  for (int i = 0; i < 4; ++i) {
    const Pairs four = e4m3x4_to_f16(words[i]);
    piece.latent[4 * i] = f16_to_f32(four.low & 0xffff) * scale;
    piece.latent[4 * i + 1] = f16_to_f32(four.low >> 16) * scale;
    piece.latent[4 * i + 2] = f16_to_f32(four.high & 0xffff) * scale;
    piece.latent[4 * i + 3] = f16_to_f32(four.high >> 16) * scale;
  }
  for (int i = 0; i < 2; ++i) piece.rope[i] = load_number(row + rope_at, lane * 2 + i, bf16);
  return piece;
}

template <int number>
__device__ void attend(const Call& call) {
  const int lane = threadIdx.x % 32, head = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
  const int row = blockIdx.x / call.splits, split = blockIdx.x % call.splits;
  if (head >= call.heads) return;

  const long long at = row * call.q_row + head * call.q_head;
  Piece q;
  for (int i = 0; i < 16; ++i)
    q.latent[i] = load_number(call.q, at + (lane * 16 + i) * call.q_dim, call.q_number);
  for (int i = 0; i < 2; ++i)
    q.rope[i] = load_number(call.q, at + (latent + lane * 2 + i) * call.q_dim, call.q_number);

  float top = lowest, sum = 0.f, out[16] = {};
  const Span span = span_of(call, row, split);
  for (int i = span.begin; i < span.end; ++i) {
    const long long offset = row_offset(call, call.indices[row * call.list_row + i]);
    if (offset < 0) continue;  // nothing is read, so nothing that lies there can matter
    const Piece key = load_piece<number>(call.cache + offset, lane);

    float score = 0.f;
    for (int d = 0; d < 16; ++d) score += q.latent[d] * key.latent[d];
    for (int d = 0; d < 2; ++d) score += q.rope[d] * key.rope[d];
    for (int step = 16; step > 0; step /= 2) score += __shfl_xor_sync(~0u, score, step);
    score *= call.scale * log2_e;

    const float higher = fmaxf(top, score), shrink = exp2_fast(top - higher);
    const float weight = exp2_fast(score - higher);
    top = higher;
    sum = sum * shrink + weight;
    for (int d = 0; d < 16; ++d) out[d] = out[d] * shrink + weight * key.latent[d];
  }

  const bool empty = sum == 0.f;
  const float lse = empty ? -infinity : logf(sum) + top * ln_2;
  const float factor =
      empty ? 0.f : sink_factor(call.sink, head * call.sink_step, call.sink_number, lse) / sum;
  const long long to = split * call.out_split + row * call.out_row + head * call.out_head;
  for (int d = 0; d < 16; d += 4) {
    float4 four{out[d] * factor, out[d + 1] * factor, out[d + 2] * factor, out[d + 3] * factor};
    store_4(call.out, to + lane * 16 + d, call.out_number, four);
  }
  if (lane == 0) call.lse[split * call.lse_split + row * call.lse_row + head * call.lse_head] = lse;
}

extern "C" __global__ void simple_fp8(const __grid_constant__ Call call) { attend<fp8_row>(call); }
extern "C" __global__ void simple_bf16(const __grid_constant__ Call call) { attend<bf16>(call); }
extern "C" __global__ void simple_fp16(const __grid_constant__ Call call) { attend<fp16>(call); }
extern "C" __global__ void simple_fp32(const __grid_constant__ Call call) { attend<fp32>(call); }
