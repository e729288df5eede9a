// The kernels that a call of lattice launches (lattice.cu), and their arguments. Each launch function is
// compiled in its own file for each element type.
#pragma once

#include "lattice/lattice.h"

namespace girih::kernels {

struct LatticeScan {
  LatticeShape shape;
  InputTensor<4> k, v;      // [B, T, H, M], [B, T, H, D]
  InputTensor<3> gamma, g;  // [B, T, H], g optional
  LatticeStart start;
  LatticeEnd end;
  int64_t* last_position;  // [N], optional
  void* memories;          // dtype [chunk_count, H, M, D]: S^T before every chunk
  float* ends;             // [chunk_count, H, 2, M]: alpha and rho of every chunk (scan.cuh)
};

struct LatticeRead {
  LatticeShape shape;
  InputTensor<4> q, k, v;  // [B, T, HQ, M], and k and v of LatticeScan
  InputTensor<3> gamma, g;
  LatticeStart start;
  const void* memories;
  OutputTensor<4> o;  // [B, T, HQ, D]
};

struct LatticeReadBackward {
  LatticeShape shape;
  InputTensor<4> q, k, v;
  InputTensor<3> gamma, g;
  LatticeStart start;
  const void* memories;
  InputTensor<4> dout;     // [B, T, HQ, D]
  OutputTensor<4> dq;      // [B, T, HQ, M]
  OutputTensor<4> dk, dv;  // [B, T, H, ...], terms of the reads
  OutputTensor<3> dgamma;  // [B, T, H] fp32, terms of the reads
  // [B, T, H] fp32, present if g is: the gradient of the decay of rows whose n is at its floor
  OutputTensor<3> ddecay_at_floor;
  void* gradients;  // dtype [chunk_count, H, M, D]: gradient of S^T, terms of the reads
  // [N, H, D, M] fp32, present if there are positions: gradient of Delta, terms of the reads
  OutputTensor<4> dstep;
  OutputTensor<2> ddecay;  // [N, H] fp32, present if there are positions and g: terms of the reads
};

struct LatticeReverse {
  LatticeShape shape;
  InputTensor<4> k, v;
  InputTensor<3> gamma, g;
  LatticeStart start;
  const void* memories;
  const float* ends;                 // of LatticeScan
  InputTensor<4> last, last_step;    // state after the scan, [N, H, D, M] fp32; last_step optional
  InputTensor<4> dlast, dlast_step;  // [N, H, D, M] fp32; absent: zero
  InputTensor<2> dlast_decay;        // [N, H] fp32; absent: zero
  // of LatticeReadBackward; replaced by the gradient of X^T at the end of every chunk, tangent at S
  void* gradients;
  OutputTensor<4> dmemory;  // [N, H, D, M] fp32, tangent at S
  OutputTensor<4> dstep;    // of LatticeReadBackward, present if there are positions
  OutputTensor<2> ddecay;   // of LatticeReadBackward, present if there are positions and g
  // For LatticeDkv, present if g is: for each vector the cancelling sum and whether dkv.cuh adds it,
  // [chunk_count, H, 2, M]; and the gradient of the decay at the end of an incomplete chunk, [N, H] fp32.
  float* cancelling_sums;
  OutputTensor<2> dend_decay;
};

struct LatticeDkv {
  LatticeShape shape;
  InputTensor<4> k, v;
  InputTensor<3> gamma, g;
  const void *memories, *gradients;  // of LatticeReverse
  InputTensor<3> ddecay_at_floor;    // of LatticeReadBackward
  const float* cancelling_sums;      // of LatticeReverse, present if g is
  InputTensor<2> dend_decay;         // of LatticeReverse
  OutputTensor<4> dk, dv;  // of LatticeReadBackward; the kernel completes dk, dv and dgamma in place
  OutputTensor<3> dgamma;
  OutputTensor<3> dg;  // [B, T, H] fp32, optional
};

namespace lattice {

template <typename T>
cudaError_t launch_scan(const LatticeScan& problem, cudaStream_t stream);
template <typename T>
cudaError_t launch_read(const LatticeRead& problem, cudaStream_t stream);
// Both in one kernel, for short chunks. `memories` and `ends` are stored if they are not null.
template <typename T>
cudaError_t launch_short_scan(const LatticeScan& scan, const LatticeRead& read, cudaStream_t stream);

template <typename T>
cudaError_t launch_read_backward(const LatticeReadBackward& problem, cudaStream_t stream);
template <typename T>
cudaError_t launch_reverse(const LatticeReverse& problem, cudaStream_t stream);
template <typename T>
cudaError_t launch_dkv(const LatticeDkv& problem, cudaStream_t stream);
// Both in one kernel, for short chunks. `gradients` keeps the terms of the reads; `cancelling_sums` and
// `dend_decay` are not used.
template <typename T>
cudaError_t launch_short_reverse(const LatticeReverse& reverse, const LatticeDkv& dkv, cudaStream_t stream);

// Whether the short kernels serve the chunks, the memory and the current device.
cudaError_t uses_short_scan(const LatticeShape& shape, bool& is_short);
cudaError_t uses_short_reverse(const LatticeShape& shape, bool& is_short);

}  // namespace lattice
}  // namespace girih::kernels
