// Quantise rows [latent 512 | rotary key 64] to 656 bytes and write each into its slot.
//
// One warp a token. Lane l holds latent numbers 16 l .. 16 l + 15, so lanes 8 g .. 8 g + 7 hold group
// g: its largest magnitude takes three shuffles. The lane writes 16 bytes; lane 8 g the scale. A slot
// that is not in the cache, -1 among them, is not written, and bounds are checked in 64 bits: 2^40 +
// 17 is not slot 17. A row of 512 (no rotary key) gets 128 zero bytes.
#include "call.cuh"

enum Rule : int { fp32_scale = 0, fp32_one = 1, fp32_floor = 2, pow2 = 3, pow2_floor = 4 };
constexpr float e4m3_max = 448.f, smallest_normal = 1.17549435e-38f;

struct Write {
  unsigned char* cache;   // [pages, page_size, 656]
  const void* rows;       // [tokens, width]
  const long long* slots;  // [tokens], or the same as int32
  long long page_stride, row_stride;     // strides of the cache in bytes
  long long from_row, from_dim, slot_stride;  // strides in numbers
  long long capacity;
  int tokens, width, page_size, number, rule, slots_are_64_bit;
};

// Infinity and NaN stay what they are: rounded up, the bits of a NaN would be those of -0.
__device__ float power_of_two_at_least(float x) {
  const u32 bits = __float_as_uint(x);
  return __uint_as_float((bits & 0x7fffff) && x == x ? (bits & 0x7f800000) + 0x800000 : bits);
}

// max that keeps a NaN: a group with NaN in it gets a NaN scale, and nothing is hidden.
__device__ float max_or_nan(float a, float b) { return a > b || a != a ? a : b; }

__device__ float scale_of(float largest, int rule) {
  switch (rule) {
    case fp32_scale: return max_or_nan(largest / e4m3_max, smallest_normal);
    case fp32_one: return largest == 0.f ? 1.f : max_or_nan(largest / e4m3_max, smallest_normal);
    case fp32_floor: return max_or_nan(largest, 1e-4f) / e4m3_max;
    case pow2: return power_of_two_at_least(max_or_nan(largest / e4m3_max, 1e-4f));
    default: return power_of_two_at_least(max_or_nan(largest, 1e-4f) / e4m3_max);
  }
}

extern "C" __global__ void __launch_bounds__(128) cache_write(const __grid_constant__ Write call) {
  const int lane = threadIdx.x % 32;
  const int token = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (token >= call.tokens) return;
  const long long at = token * call.slot_stride;
  const long long slot =
      call.slots_are_64_bit ? call.slots[at] : reinterpret_cast<const int*>(call.slots)[at];
  if (slot < 0 || slot >= call.capacity) return;
  unsigned char* row = call.cache + slot / call.page_size * call.page_stride +
                       slot % call.page_size * call.row_stride;

  const long long from = token * call.from_row;
  float x[16], largest = 0.f;
  for (int i = 0; i < 16; ++i) {
    x[i] = load_number(call.rows, from + (lane * 16 + i) * call.from_dim, call.number);
    largest = max_or_nan(fabsf(x[i]), largest);
  }
  for (int step = 1; step < 8; step *= 2)
    largest = max_or_nan(__shfl_xor_sync(~0u, largest, step), largest);
  const float scale = scale_of(largest, call.rule);

  u32 words[4] = {};
  for (int i = 0; i < 16; ++i) words[i / 4] |= f32_to_e4m3(x[i] / scale) << 8 * (i % 4);
  reinterpret_cast<uint4*>(row)[lane] = {words[0], words[1], words[2], words[3]};
  if (lane % 8 == 0) reinterpret_cast<float*>(row + scales_at)[lane / 8] = scale;

  float key[2] = {};
  for (int i = 0; i < 2; ++i)
    if (latent + lane * 2 + i < call.width)
      key[i] = load_number(call.rows, from + (latent + lane * 2 + i) * call.from_dim, call.number);
  reinterpret_cast<u32*>(row + rope_at)[lane] = f32_to_bf16x2(key[0], key[1]);
}
