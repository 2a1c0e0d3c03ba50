// Every PTX instruction that these kernels use, each behind a small function; no other file has asm.
//
// All of them exist on SM80 and later, but for cp.async.bulk, elect and griddepcontrol (SM90) and the
// conversion of e4m3 (SM89). SM120 has them all. wgmma, tcgen05, setmaxnreg and clusters are not here.
#pragma once

using u32 = unsigned int;
using u64 = unsigned long long;

// -- lanes of a warp ---------------------------------------------------------------------------

// The warp's number as a value that the compiler knows to be the same in all 32 lanes.
__device__ __forceinline__ int uniform_warp_id() {
  return __shfl_sync(~0u, int(threadIdx.x) >> 5, 0);
}

// Transpose an 8x8 matrix of 16-bit numbers that the warp holds: lane l has row l / 4, columns
// 2 (l % 4) and the next, before and after.
__device__ __forceinline__ u32 transpose_8x8(u32 a) {
  u32 d;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

// -- numbers -----------------------------------------------------------------------------------

struct Pairs {
  u32 low, high;
};

// Four e4m3 bytes to fp16 numbers, exact: bytes 0 and 1 in `low`, 2 and 3 in `high`. The halves are
// named as 16-bit registers; cut out with a shift and a mask they cost two instructions more.
__device__ __forceinline__ Pairs e4m3x4_to_f16(u32 bytes) {
  Pairs d;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; "
      "cvt.rn.f16x2.e4m3x2 %1, high;}" : "=r"(d.low), "=r"(d.high) : "r"(bytes));
  return d;
}

// One byte: the e4m3 number nearest to x, ties to even; beyond 448 saturates.
__device__ __forceinline__ u32 f32_to_e4m3(float x) {
  u32 d;
  asm("{.reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, %1, %2; cvt.u32.u16 %0, h;}"
      : "=r"(d) : "f"(0.f), "f"(x));
  return d & 0xff;
}

// {low, high} as two fp16 numbers, rounded to nearest even.
__device__ __forceinline__ u32 f32_to_f16x2(float low, float high) {
  u32 d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

__device__ __forceinline__ u32 f32_to_bf16x2(float low, float high) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

__device__ __forceinline__ float f16_to_f32(unsigned short bits) {
  float d;
  asm("cvt.f32.f16 %0, %1;" : "=f"(d) : "h"(bits));
  return d;
}

__device__ __forceinline__ float bf16_to_f32(unsigned short bits) {
  return __uint_as_float(u32(bits) << 16);
}

// 2^x and log2 x in one instruction each, to 2 units in the last place. A subnormal number counts as
// 0: to keep it would take three instructions more.
__device__ __forceinline__ float exp2_fast(float x) {
  float d;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
  return d;
}

__device__ __forceinline__ float log2_fast(float x) {
  float d;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
  return d;
}

// Two bfloat16 numbers times two others.
__device__ __forceinline__ u32 multiply_bf16x2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// The larger of each two unsigned 16-bit numbers.
__device__ __forceinline__ u32 max_u16x2(u32 a, u32 b) {
  u32 d;
  asm("max.u16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// Four bytes picked from the eight of {b, a}: nibble i of `pick` names byte i of the result.
__device__ __forceinline__ u32 pick_bytes(u32 a, u32 b, u32 pick) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(pick));
  return d;
}

// -- matrix product: C[16, 8] += A[16, 16] B[16, 8], fp32 sums -----------------------------------
//
// With g = lane / 4 and t = lane % 4, a lane holds
//   A  a[0] = (row g, k 2t and 2t + 1)   a[1] = (row g + 8, same k)   a[2], a[3] = the same at k + 8
//   B  b[0] = (k 2t and 2t + 1, column g)    b[1] = the same at k + 8
//   C  c[0], c[1] = (row g, columns 2t and 2t + 1)    c[2], c[3] = the same in row g + 8

__device__ __forceinline__ void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
               "{%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
               "{%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// -- bulk copies from global to shared memory: one instruction a row, counted in by a barrier --------

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return u32(__cvta_generic_to_shared(pointer));
}

// One lane of the warp, the same each time; the compiler knows that it is one.
__device__ __forceinline__ bool elect_lane() {
  u32 elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(elected));
  return elected;
}

__device__ __forceinline__ void init_barrier(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Arrive, and expect so many bytes of bulk copies before the barrier's phase is over.
__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void wait_for_phase(u32 barrier, u32 parity) {
  asm volatile("{.reg .pred p; again%=: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; "
               "@!p bra again%=;}"
               ::"r"(barrier), "r"(parity) : "memory");
}

// Sizes and addresses are multiples of 16. It cannot fill with zeros.
__device__ __forceinline__ void copy_bulk(u32 shared, const void* global, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1], %2, [%3];"
               ::"r"(shared), "l"(global), "r"(bytes), "r"(barrier) : "memory");
}

// Order this thread's ordinary accesses to shared memory before bulk copies that follow.
__device__ __forceinline__ void fence_before_bulk_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// -- copies of 16 bytes a lane from global to shared memory ------------------------------------------

// Zeros if it is not `there`; then nothing is read, and the address may be any.
__device__ __forceinline__ void copy_piece(u32 shared, const void* global, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               ::"r"(shared), "l"(global), "r"(there ? 16 : 0) : "memory");
}

// Arrive as soon as all pieces that this thread has started are there.
__device__ __forceinline__ void arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// Ask for the line of 128 bytes around an address; nothing waits for it.
__device__ __forceinline__ void prefetch_to_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// -- programmatic dependent launch ---------------------------------------------------------------

// The next kernel of the stream may start now; it must itself wait before it reads our results.
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Wait until the kernel before has ended and its writes are seen. Nothing to wait for: no cost.
__device__ __forceinline__ void wait_for_kernel_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
