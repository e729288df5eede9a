// PTX instructions, one function for each, named after the instruction. The kernels have no other inline
// assembly. An address in shared memory is the 32-bit address of shared_address() (shared.h).
//
// tests/emulated/tile/ptx.h has the same functions for a CPU and comes first on the include path there.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

// Declares `name`, the dynamic shared memory of the block, as an array of `type`.
#define GIRIH_DYNAMIC_SHARED(type, name, alignment) \
  extern __shared__ __align__(alignment)            \
  type name[]

namespace girih::kernels::ptx {

// ---- registers: no instruction, restrictions of the compiler ----------------------------------------------

// Makes the compiler compute values here, and treat the values as unknown afterwards.
__device__ inline void make_opaque(int& x) { asm volatile("" : "+r"(x)); }
__device__ inline void make_opaque(uint32_t& x) { asm volatile("" : "+r"(x)); }
__device__ inline void make_opaque(int& x, int& y) { asm volatile("" : "+r"(x), "+r"(y)); }
__device__ inline void make_opaque(uint32_t& x, uint32_t& y) { asm volatile("" : "+r"(x), "+r"(y)); }
__device__ inline void make_opaque(int64_t& x, int& y) { asm volatile("" : "+l"(x), "+r"(y)); }
__device__ inline void make_opaque(uint32_t& x, uint32_t& y, uint32_t& z, int& v, int& w) {
  asm volatile("" : "+r"(x), "+r"(y), "+r"(z), "+r"(v), "+r"(w));
}
// Keeps the compiler from moving accesses to memory across this point.
__device__ inline void fence_compiler() { asm volatile("" ::: "memory"); }
// Forces the compiler to have the accumulators of wgmma in their registers at this point.
template <int N>
__device__ inline void pin_registers(float (&d)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(d[n][i])::"memory");
  }
}
// Keeps a value in its register until this point.
__device__ inline void use_register(uint32_t x) { asm volatile("" ::"r"(x) : "memory"); }

// ---- arithmetic -------------------------------------------------------------------------------------------

__device__ inline uint32_t cvt_rn_bf16x2(float high, float low) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ inline uint32_t cvt_rn_f16x2(float high, float low) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ inline float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float rsqrt_approx_ftz(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// ---- matrices of a warp -----------------------------------------------------------------------------------

// Loads four 8 x 8 matrices; lanes 8 i to 8 i + 7 pass the addresses of the rows of matrix i.
__device__ inline void ldmatrix_x4(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}
__device__ inline void ldmatrix_x4_trans(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}
#if __CUDA_ARCH__ >= 900
// Stores four 8 x 8 matrices; lanes 8 i to 8 i + 7 pass the addresses of the rows of matrix i.
__device__ inline void stmatrix_x4(uint32_t address, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(x[0]),
               "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}
__device__ inline void stmatrix_x4_trans(uint32_t address, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address),
               "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}
#endif
// Transposes an 8 x 8 matrix of 16-bit elements.
__device__ inline uint32_t movmatrix_trans(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(y) : "r"(x));
  return y;
}

// d += a b, where a is 16 x 16 and b is 16 x 8.
__device__ inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// d += a b, where a is 16 x 8 and b is 8 x 8; the lower 13 bits of the factors are ignored.
__device__ inline void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// d += a b in fp64, where a is 8 x 4 and b is 4 x 8.
__device__ inline void mma_m8n8k4_f64(double (&d)[2], double a, double b) {
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};\n"
      : "+d"(d[0]), "+d"(d[1])
      : "d"(a), "d"(b));
}

// ---- global memory and asynchronous copies ----------------------------------------------------------------

__device__ inline uint4 ld_global_nc_no_allocate(const void* from) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from));
  return x;
}
__device__ inline void st_global_v4(void* to, const uint32_t (&x)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"l"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]),
               "r"(x[3])
               : "memory");
}
// Prefetches the 128 bytes around an address to the L2 cache.
__device__ inline void prefetch_l2(const void* from) {
  asm volatile("prefetch.global.L2 [%0];\n" ::"l"(from));
}

// Starts a copy of 16 bytes from global to shared memory: `bytes` bytes of the source, then zeros.
__device__ inline void cp_async_16(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes));
}
__device__ inline void cp_async_8(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;\n" ::"r"(to), "l"(from), "r"(bytes));
}
__device__ inline void cp_async_4(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(to), "l"(from), "r"(bytes));
}
__device__ inline void cp_async_commit_group() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// Waits until at most the latest `Pending` groups of this thread are incomplete.
template <int Pending>
__device__ inline void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(Pending) : "memory");
}

// ---- barriers ---------------------------------------------------------------------------------------------

__device__ inline void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline void mbarrier_arrive(uint32_t barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}\n" ::"r"(barrier) : "memory");
}
// One lane of the warp arrives. elect.sync replaces a test of threadIdx.x, which is reread from a special
// register if registers are scarce.
__device__ inline void mbarrier_arrive_elected(uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred first;\n.reg .b64 state;\nelect.sync _|first, 0xffffffff;\n"
      "@first mbarrier.arrive.shared.b64 state, [%0];\n}\n" ::"r"(barrier)
      : "memory");
#else
  asm volatile(
      "{\n.reg .pred first;\n.reg .b64 state;\nsetp.eq.u32 first, %1, 0;\n"
      "@first mbarrier.arrive.shared.b64 state, [%0];\n}\n" ::"r"(barrier),
      "r"(threadIdx.x & 31)
      : "memory");
#endif
}
// Arrives when all earlier cp.async copies of this thread are complete, without waiting for them.
__device__ inline void cp_async_mbarrier_arrive_noinc(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(barrier) : "memory");
}
// Whether the phase of this parity is complete. From sm_90 on the thread is suspended for a while first.
__device__ inline unsigned mbarrier_try_wait_parity(uint32_t barrier, unsigned parity) {
  unsigned done;
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
#else
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
#endif
  return done;
}

#if __CUDA_ARCH__ >= 900

// Orders accesses of the thread to shared memory, and accesses that it has synchronised with, before later
// accesses of the async proxy: wgmma and bulk copies.
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// ---- clusters ---------------------------------------------------------------------------------------------

__device__ inline uint32_t cluster_ctarank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return rank;
}
__device__ inline void barrier_cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;\n" ::: "memory");
}
__device__ inline void fence_mbarrier_init_cluster() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
// The address in the shared memory of block `rank` that corresponds to `address` in this block.
__device__ inline uint32_t mapa(uint32_t address, int rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}
// One lane of the warp arrives at a barrier of another block.
__device__ inline void mbarrier_arrive_remote_elected(uint32_t barrier) {
  asm volatile(
      "{\n.reg .pred first;\nelect.sync _|first, 0xffffffff;\n"
      "@first mbarrier.arrive.shared::cluster.b64 _, [%0];\n}\n" ::"r"(barrier)
      : "memory");
}
__device__ inline void mbarrier_arrive_expect_tx_remote(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// ---- bulk copies ------------------------------------------------------------------------------------------

// Arrives once, and makes the current phase wait for `bytes` more bytes.
__device__ inline void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
// Copies a box of a tensor to shared memory; `tensor_map` is its TMA descriptor.
__device__ inline void cp_async_bulk_tensor_4d(uint32_t to, const void* tensor_map, int col, int row,
                                               int head, int batch, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4, %5}], [%6];\n" ::"r"(to),
      "l"(tensor_map), "r"(col), "r"(row), "r"(head), "r"(batch), "r"(barrier)
      : "memory");
}
// Prefetches the box to the L2 cache.
__device__ inline void cp_async_bulk_prefetch_tensor_4d(const void* tensor_map, int col, int row, int head,
                                                        int batch) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];\n" ::"l"(tensor_map),
               "r"(col), "r"(row), "r"(head), "r"(batch)
               : "memory");
}
// Copies contiguous bytes, a multiple of 16, from global to shared memory.
__device__ inline void cp_async_bulk_load(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
// The same from the shared memory of this block to that of another.
__device__ inline void cp_async_bulk_remote(uint32_t to, uint32_t from, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(
          to),
      "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
// Copies contiguous bytes from shared to global memory, after fence_proxy_async(), and waits until the source
// may be overwritten. (One statement, so that the compiler schedules nothing in between.)
template <int Bytes>
__device__ inline void cp_async_bulk_store(void* to, uint32_t from) {
  asm volatile(
      "fence.proxy.async.shared::cta;\ncp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;\n" ::"l"(to),
      "r"(from), "n"(Bytes)
      : "memory");
}

#endif

// ---- wgmma, of sm_90a -------------------------------------------------------------------------------------

// Whether the four warps of a warpgroup execute a product together: when one of them has waited for the
// product, none still reads the factors.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kIsWgmmaCollective = true;
#else
constexpr bool kIsWgmmaCollective = false;
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Sets the number of registers of each thread of the warpgroup.
template <int Registers>
__device__ inline void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(Registers));
}
template <int Registers>
__device__ inline void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(Registers));
}

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ inline void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
template <int Pending>
__device__ inline void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(Pending) : "memory");
}

// d += a b, or without `Add` d = a b, where a is 64 x 16 (registers, or rows of a tile) and b is 16 x N.
#define GIRIH_16 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define GIRIH_32 GIRIH_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define GIRIH_FOUR(how, n) how(d[n][0]), how(d[n][1]), how(d[n][2]), how(d[n][3])
#define GIRIH_HALF(how) GIRIH_FOUR(how, 0), GIRIH_FOUR(how, 1), GIRIH_FOUR(how, 2), GIRIH_FOUR(how, 3)
#define GIRIH_ALL(how) \
  GIRIH_HALF(how), GIRIH_FOUR(how, 4), GIRIH_FOUR(how, 5), GIRIH_FOUR(how, 6), GIRIH_FOUR(how, 7)
#define GIRIH_WGMMA(n, type, add, sums)       \
  "{\n.reg .pred add;\nsetp.ne.b32 add, " add \
  ", 0;\n"                                    \
  "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " " sums "}, "
// by_64, by_32: the operands after the accumulators, for N = 64 (32 accumulators) and N = 32 (16).
#define GIRIH_PRODUCT(type, by_64, by_32, factors)                                           \
  if constexpr (N == 64 && Add) {                                                            \
    asm volatile(GIRIH_WGMMA("64", type, "1", GIRIH_32) by_64 : GIRIH_ALL("+f") : factors);  \
  } else if constexpr (N == 64) {                                                            \
    asm volatile(GIRIH_WGMMA("64", type, "0", GIRIH_32) by_64 : GIRIH_ALL("=f") : factors);  \
  } else if constexpr (Add) {                                                                \
    asm volatile(GIRIH_WGMMA("32", type, "1", GIRIH_16) by_32 : GIRIH_HALF("+f") : factors); \
  } else {                                                                                   \
    asm volatile(GIRIH_WGMMA("32", type, "0", GIRIH_16) by_32 : GIRIH_HALF("=f") : factors); \
  }
#define GIRIH_TILES "l"(a), "l"(b), "n"(IsMnMajor ? 1 : 0), "n"(Sign)
#define GIRIH_FROM_TILE(type)                                                                       \
  GIRIH_PRODUCT(type, "%32, %33, add, 1, %35, 0, %34;\n}\n", "%16, %17, add, 1, %19, 0, %18;\n}\n", \
                GIRIH_TILES)
#define GIRIH_LEFT "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(IsMnMajor ? 1 : 0), "n"(Sign)
#define GIRIH_FROM_REGISTERS(type)                                         \
  GIRIH_PRODUCT(type, "{%32, %33, %34, %35}, %36, add, 1, %38, %37;\n}\n", \
                "{%16, %17, %18, %19}, %20, add, 1, %22, %21;\n}\n", GIRIH_LEFT)

// IsMnMajor: the columns of b are contiguous in shared memory. Sign: 1 for b, -1 for -b. a and b in shared
// memory are given by descriptors.
template <typename T, bool IsMnMajor, int N, bool Add, int Sign>
__device__ inline void wgmma_mma_async(float (*d)[4], uint64_t a, uint64_t b) {
  static_assert(N == 64 || N == 32);
  if constexpr (std::is_same_v<T, __half>) {
    GIRIH_FROM_TILE("f16")
  } else {
    GIRIH_FROM_TILE("bf16")
  }
}
template <typename T, bool IsMnMajor, int N, bool Add, int Sign>
__device__ inline void wgmma_mma_async(float (*d)[4], const uint32_t (&a)[4], uint64_t b) {
  static_assert(N == 64 || N == 32);
  if constexpr (std::is_same_v<T, __half>) {
    GIRIH_FROM_REGISTERS("f16")
  } else {
    GIRIH_FROM_REGISTERS("bf16")
  }
}

#undef GIRIH_16
#undef GIRIH_32
#undef GIRIH_FOUR
#undef GIRIH_HALF
#undef GIRIH_ALL
#undef GIRIH_WGMMA
#undef GIRIH_PRODUCT
#undef GIRIH_FROM_TILE
#undef GIRIH_TILES
#undef GIRIH_FROM_REGISTERS
#undef GIRIH_LEFT

#endif

}  // namespace girih::kernels::ptx
