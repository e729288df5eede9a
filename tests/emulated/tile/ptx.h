// Replaces kernels/tile/ptx.h: the PTX instructions as functions of the emulator.
#pragma once

#include "tma.h"
#include "wgmma.h"

#define GIRIH_DYNAMIC_SHARED(type, name, alignment) \
  type* const name = reinterpret_cast<type*>(emulated::current->block->shared)

namespace girih::kernels::ptx {

// Converts the 32-bit address of shared memory, which is below 4 GiB, to a pointer.
template <class T = void>
T* pointer_at(uint32_t address) {
  return reinterpret_cast<T*>(uint64_t{address});
}
inline uint64_t* barrier_at(uint32_t address) { return pointer_at<uint64_t>(address); }

// ---- registers --------------------------------------------------------------------------------------------

template <class... T>
void make_opaque(T&...) {}
inline void fence_compiler() {}
template <int N>
void pin_registers(float (&d)[N][4]) {
  emulated::pin_registers(d, sizeof d);
}
inline void use_register(uint32_t) {}

// ---- arithmetic -------------------------------------------------------------------------------------------

template <class T>
uint32_t pair_bits(T low, T high) {
  const T both[2] = {low, high};
  uint32_t pair;
  std::memcpy(&pair, both, sizeof pair);
  return pair;
}
inline uint32_t cvt_rn_bf16x2(float high, float low) {
  return pair_bits(__float2bfloat16_rn(low), __float2bfloat16_rn(high));
}
inline uint32_t cvt_rn_f16x2(float high, float low) {
  return pair_bits(__float2half_rn(low), __float2half_rn(high));
}
inline float ex2_approx_ftz(float x) {
  const float y = std::exp2(x);
  return std::fpclassify(y) == FP_SUBNORMAL ? 0.f : y;
}
inline float rcp_approx_ftz(float x) { return 1.f / x; }
inline float rsqrt_approx_ftz(float x) { return 1.f / std::sqrt(x); }
inline float tanh_approx(float x) { return std::tanh(x); }

// ---- matrices of a warp -----------------------------------------------------------------------------------

inline void ldmatrix_x4(uint32_t (&to)[4], uint32_t address) { emulated::ldmatrix(to, address, false); }
inline void ldmatrix_x4_trans(uint32_t (&to)[4], uint32_t address) { emulated::ldmatrix(to, address, true); }
inline void stmatrix_x4(uint32_t address, const uint32_t (&x)[4]) { emulated::stmatrix(address, x, false); }
inline void stmatrix_x4_trans(uint32_t address, const uint32_t (&x)[4]) {
  emulated::stmatrix(address, x, true);
}
inline uint32_t movmatrix_trans(uint32_t x) { return emulated::movmatrix_trans(x); }

inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulated::mma_m16n8k16<__nv_bfloat16>(d, a, b0, b1);
}
inline void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulated::mma_m16n8k16<__half>(d, a, b0, b1);
}
inline void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulated::mma_m16n8k8_tf32(d, a, b0, b1);
}
inline void mma_m8n8k4_f64(double (&d)[2], double a, double b) { emulated::mma_m8n8k4_f64(d, a, b); }

// ---- global memory and asynchronous copies ----------------------------------------------------------------

inline uint4 ld_global_nc_no_allocate(const void* from) { return *static_cast<const uint4*>(from); }
inline void st_global_v4(void* to, const uint32_t (&x)[4]) {
  *static_cast<uint4*>(to) = {x[0], x[1], x[2], x[3]};
}
inline void prefetch_l2(const void*) {}

inline void cp_async_16(uint32_t to, const void* from, int bytes) {
  emulated::start_copy(to, from, 16, bytes);
}
inline void cp_async_8(uint32_t to, const void* from, int bytes) { emulated::start_copy(to, from, 8, bytes); }
inline void cp_async_4(uint32_t to, const void* from, int bytes) { emulated::start_copy(to, from, 4, bytes); }
inline void cp_async_commit_group() { emulated::commit_copy_group(); }
template <int Pending>
void cp_async_wait_group() {
  emulated::wait_copy_groups(Pending);
}

// ---- barriers ---------------------------------------------------------------------------------------------

inline void bar_sync(int id, int threads) { emulated::arrive_and_wait(id, threads); }
inline void mbarrier_init(uint32_t barrier, int arrivals) {
  emulated::mbarrier(barrier_at(barrier)) = {uint16_t(arrivals), uint16_t(arrivals), 0, 0};
}
inline void mbarrier_arrive(uint32_t barrier) {
  emulated::arrive(barrier_at(barrier));
  emulated::yield();
}
inline void mbarrier_arrive_elected(uint32_t barrier) {
  if (emulated::lane() == 0) emulated::arrive(barrier_at(barrier));
}
inline void cp_async_mbarrier_arrive_noinc(uint32_t barrier) {
  emulated::commit_copy_group();
  emulated::wait_copy_groups(0);
  emulated::arrive(barrier_at(barrier));
}
inline unsigned mbarrier_try_wait_parity(uint32_t barrier, unsigned parity) {
  emulated::wait_phase(barrier_at(barrier), parity);
  return 1;
}
inline void fence_proxy_async() { emulated::fence_async_proxy(); }

// ---- clusters ---------------------------------------------------------------------------------------------

inline uint32_t cluster_ctarank() { return emulated::current->block->number % emulated::cluster_size; }
inline void barrier_cluster_sync() {
  emulated::arrive_and_wait(emulated::cluster_barrier, emulated::cluster_size * emulated::threads);
}
inline void fence_mbarrier_init_cluster() {}
inline uint32_t mapa(uint32_t address, int rank) {
  return static_cast<uint32_t>(
      reinterpret_cast<uint64_t>(emulated::remote_address(pointer_at(address), rank)));
}
inline void mbarrier_arrive_remote_elected(uint32_t barrier) { mbarrier_arrive_elected(barrier); }
inline void mbarrier_arrive_expect_tx_remote(uint32_t barrier, int bytes) {
  emulated::update_barrier(barrier_at(barrier), bytes, 1);
}

// ---- bulk copies ------------------------------------------------------------------------------------------

inline void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes) {
  emulated::update_barrier(barrier_at(barrier), bytes, 1);
}
inline void cp_async_bulk_tensor_4d(uint32_t to, const void* tensor_map, int col, int row, int head,
                                    int batch, uint32_t barrier) {
  emulated::load_box(to, tensor_map, {batch, head, row, col}, barrier_at(barrier));
}
inline void cp_async_bulk_prefetch_tensor_4d(const void*, int, int, int, int) {}
inline void cp_async_bulk_load(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  emulated::load_bytes(pointer_at(to), from, bytes, barrier_at(barrier));
}
inline void cp_async_bulk_remote(uint32_t to, uint32_t from, int bytes, uint32_t barrier) {
  emulated::send_bytes(pointer_at(to), pointer_at(from), bytes, barrier_at(barrier));
}
template <int Bytes>
void cp_async_bulk_store(void* to, uint32_t from) {
  emulated::store_bytes(to, pointer_at(from), Bytes);
}

// ---- wgmma ------------------------------------------------------------------------------------------------

constexpr bool kIsWgmmaCollective = false;  // every warp computes its product separately

template <int Registers>
void setmaxnreg_inc() {}
template <int Registers>
void setmaxnreg_dec() {}
inline void wgmma_fence() { emulated::fence_registers(); }
inline void wgmma_commit_group() { emulated::wgmma_commit(); }
template <int Pending>
void wgmma_wait_group() {
  emulated::wgmma_wait(Pending);
}
template <typename T, bool IsMnMajor, int N, bool Add, int Sign, class A>
void wgmma_mma_async(float (*d)[4], const A& a, uint64_t b) {
  emulated::start_product<T, N, Add, Sign>(d, a, emulated::Matrix{b, IsMnMajor});
}

}  // namespace girih::kernels::ptx
