// Registers of warp roles. A block starts with the same number of registers for every thread; setmaxnreg_inc
// and setmaxnreg_dec (tile/warpgroup.h) move registers between its warpgroups on sm_90a.
#pragma once

namespace girih::kernels {

// Warpgroups of one role, and the registers of each of their threads.
struct RoleRegisters {
  int warpgroups, registers;
};

// The registers of a thread at launch times the number of warpgroups, for a block of at least 384 threads
// that has a multiprocessor to itself. A thread has a multiple of 8 registers.
__host__ __device__ constexpr int launch_registers(int threads) {
  return threads / 128 * (65536 / threads / 8 * 8);
}

// Whether the roles of a block need no more registers than the block has at launch. Otherwise setmaxnreg_inc
// waits forever.
template <int Roles>
__host__ __device__ constexpr bool fit_registers(int threads, const RoleRegisters (&roles)[Roles]) {
  int sum = 0;
  for (int i = 0; i < Roles; ++i) sum += roles[i].warpgroups * roles[i].registers;
  return sum <= launch_registers(threads);
}

}  // namespace girih::kernels
