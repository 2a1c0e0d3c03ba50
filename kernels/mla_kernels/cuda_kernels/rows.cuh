// From bytes of cached rows in shared memory to operands of the tensor cores, without ldmatrix.
//
// Both tricks rest on one freedom: a matrix product does not care in which order the contraction
// index runs, nor which row of the operand stands for which token, as long as both sides agree.
#pragma once

#include "call.cuh"

constexpr int tile_tokens = 16, tile_bytes = tile_tokens * row_bytes;

// Row r of the operand, r < 8, is token 4 (r % 2) + r / 2 of the tile; row r + 8 that token + 8.
// A row of 656 bytes is 41 pieces of 16, and 41 is 1 modulo the 8 pieces that shared memory serves
// at once. In this order the 8 lanes of a quarter warp, (two rows) x (four pieces), or (four rows)
// x (two pieces), fall on 8 different ones: no bank conflict and no padding.
__device__ __forceinline__ int token_of(int r) { return (r & 1) * 4 + (r >> 1); }

__device__ __forceinline__ uint4 load_16(const unsigned char* shared) {
  return *reinterpret_cast<const uint4*>(shared);
}

__device__ __forceinline__ u32 word(const uint4& x, int i) {
  return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// A of S^T = K Q^T for one step of 16 contraction indices: one word of 4 e4m3 numbers from token
// row g and one from row g + 8. The lane's 4 numbers stand for k = 2t, 2t + 1, 2t + 8, 2t + 9.
__device__ __forceinline__ void keys_operand(u32 (&a)[4], u32 low_row, u32 high_row) {
  const Pairs low = e4m3x4_to_f16(low_row), high = e4m3x4_to_f16(high_row);
  a[0] = low.low;
  a[1] = high.low;
  a[2] = low.high;
  a[3] = high.high;
}

// A of O^T = V^T P^T for two tiles of 16 latent numbers: one word of each of the four tokens that
// stand for k = 2t, 2t + 1, 2t + 8, 2t + 9. Bytes of two tokens are interleaved, then converted two
// at a time. Byte 0 becomes row g of the first tile, byte 1 its row g + 8, bytes 2 and 3 the second.
__device__ __forceinline__ void values_operand(u32 (&first)[4], u32 (&second)[4], u32 token_0,
                                               u32 token_1, u32 token_8, u32 token_9) {
  const Pairs a = e4m3x4_to_f16(pick_bytes(token_0, token_1, 0x5140));
  const Pairs b = e4m3x4_to_f16(pick_bytes(token_0, token_1, 0x7362));
  const Pairs c = e4m3x4_to_f16(pick_bytes(token_8, token_9, 0x5140));
  const Pairs d = e4m3x4_to_f16(pick_bytes(token_8, token_9, 0x7362));
  first[0] = a.low;
  first[1] = a.high;
  first[2] = c.low;
  first[3] = c.high;
  second[0] = b.low;
  second[1] = b.high;
  second[2] = d.low;
  second[3] = d.high;
}

// Start the copy of 16 rows into `tile`, to be counted in by `barrier`. Lane i < 16 holds the offset of
// row i; bit i of `present` says whether there is one. What is not there is not copied, and the tile
// keeps what it held: see `clear_absent`.
//
// The instruction takes addresses that all lanes know to be the same, and one lane gives it: with
// elect.sync and an unrolled loop 16 copies are 16 instructions in a row, with `lane == 0` or a copy a
// lane the compiler makes a loop with a branch around each.
__device__ __forceinline__ void copy_rows(unsigned char* tile, u32 barrier, const unsigned char* cache,
                                          long long offset, u32 present) {
  if (elect_lane()) expect_bytes(barrier, __popc(present) * row_bytes);
  const u32 shared = shared_address(tile);
  const u64 source = reinterpret_cast<u64>(cache) + offset;
  auto copy = [&](int r) {
    const auto* from = reinterpret_cast<const void*>(__shfl_sync(~0u, source, r));
    if (elect_lane()) copy_bulk(shared + r * row_bytes, from, row_bytes, barrier);
  };
  if (present == 0xffff) {
#pragma unroll
    for (int r = 0; r < tile_tokens; ++r) copy(r);
  } else {
#pragma unroll 1
    for (u32 left = present; left; left &= left - 1) copy(__ffs(left) - 1);
  }
}

// Fill the rows of a tile that will not be copied with zeros, before its first use. An absent row has
// weight 0, and 0 x V must be 0: shared memory may begin with NaN in it. Later the place holds an
// older row of the same list, and if there is a NaN in that, the result is NaN by right.
__device__ __forceinline__ void clear_absent(unsigned char* tile, u32 present, int lane) {
#pragma unroll 1
  for (u32 left = ~present & 0xffff; left; left &= left - 1) {
    auto* row = reinterpret_cast<uint4*>(tile + (__ffs(left) - 1) * row_bytes);
    for (int piece = lane; piece < row_bytes / 16; piece += 32) row[piece] = uint4{};
  }
  fence_before_bulk_copies();
  __syncwarp();
}
