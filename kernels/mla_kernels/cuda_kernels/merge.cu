// Merge partial results over disjoint keys: of splits after decode.cu, or of ranks.
//
// One block a row and head. Part p has a normalised output and the natural log-sum-exp of its
// scores; its weight is exp(lse_p - max lse). Parts are added in their order, so the bits depend on
// nothing else; an empty part (lse -inf) is skipped, for its output may be uninitialised memory and
// 0 x NaN is NaN. One part among empty ones comes back bit for bit: its weight is 1 / 1.
//
// The kernel may start while decode.cu still runs (programmatic dependent launch); it waits for the
// parts before it reads them, and what is saved is the time of a launch.
#include "call.cuh"

constexpr int most = 16;  // parts at a time; of decode steps only those by the union have more

struct Merge {
  const void* outs;   // [parts, rows, heads, width]
  const float* lses;  // [parts, rows, heads]
  const void* sink;   // [heads], or null
  void* out;          // [rows, heads, width]
  float* lse;         // [rows, heads]
  long long part_out, part_row, part_head;      // strides of outs in numbers
  long long part_lse, part_lse_row, part_lse_head;
  long long out_row, out_head, lse_row, lse_head;
  int parts, heads, width;
  int part_number, out_number, sink_number, sink_step;  // Number, and the stride of sink
};

__device__ __forceinline__ void store_number(void* data, long long at, int number, float x) {
  if (number == fp32)
    static_cast<float*>(data)[at] = x;
  else
    static_cast<unsigned short*>(data)[at] =
        static_cast<unsigned short>(number == bf16 ? f32_to_bf16x2(x, 0.f) : f32_to_f16x2(x, 0.f));
}

extern "C" __global__ void __launch_bounds__(128) merge(const __grid_constant__ Merge call) {
  wait_for_kernel_before();
  const int row = blockIdx.x / call.heads, head = blockIdx.x % call.heads;
  const float* lses = call.lses + row * call.part_lse_row + head * call.part_lse_head;
  // Lane p takes part p; of more than 32 parts also p + 32 and so on.
  const int lane = threadIdx.x % 32;
  float top = -infinity, sum = 0.f;
  for (int p = lane; p < call.parts; p += 32) top = fmaxf(top, lses[p * call.part_lse]);
  for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  const float anchor = top == -infinity ? 0.f : top;
  for (int p = lane; p < call.parts; p += 32) sum += expf(lses[p * call.part_lse] - anchor);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  const bool empty = sum == 0.f;
  const float lse = empty ? -infinity : logf(sum) + anchor;
  const float factor =
      empty ? 0.f : sink_factor(call.sink, head * call.sink_step, call.sink_number, lse);
  if (threadIdx.x == 0) call.lse[row * call.lse_row + head * call.lse_head] = lse;
  auto share_of = [&](int p) {
    return empty || p >= call.parts ? 0.f : expf(lses[p * call.part_lse] - anchor) / sum;
  };

  // -0 + x is x bit for bit, also where x is -0.
  const float start = empty ? 0.f : -0.f;
  const long long from = row * call.part_row + head * call.part_head;
  const long long to = row * call.out_row + head * call.out_head;
  if (call.part_number == fp32 && call.width == 4 * blockDim.x) {
    // Four numbers a thread: the width of a latent, as decode.cu writes it.
    const int d = 4 * threadIdx.x;
    const float* parts = static_cast<const float*>(call.outs) + from + d;
    float4 total = {start, start, start, start};
#pragma unroll 1
    for (int base = 0; base < call.parts; base += most) {
      float4 x[most];  // all loads are on their way before the first weight is known
#pragma unroll
      for (int p = 0; p < most; ++p)
        if (base + p < call.parts)
          x[p] = *reinterpret_cast<const float4*>(parts + (base + p) * call.part_out);
      const float mine = share_of(base + lane);
#pragma unroll
      for (int p = 0; p < most; ++p) {
        const float share = __shfl_sync(~0u, mine, p);
        if (base + p < call.parts && share != 0.f)
          total = {total.x + x[p].x * share, total.y + x[p].y * share, total.z + x[p].z * share,
                   total.w + x[p].w * share};
      }
    }
    store_4(call.out, to + d, call.out_number,
            {total.x * factor, total.y * factor, total.z * factor, total.w * factor});
    return;
  }
#pragma unroll 1
  for (int d = threadIdx.x; d < call.width; d += blockDim.x) {
    float total = start;
#pragma unroll 1
    for (int p = 0; p < call.parts; ++p) {
      const float share = share_of(p);
      if (share != 0.f)
        total += load_number(call.outs, from + d + p * call.part_out, call.part_number) * share;
    }
    store_number(call.out, to + d, call.out_number, total * factor);
  }
}
