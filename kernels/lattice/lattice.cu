// Which kernel a call takes.
#include "lattice/lattice.h"
#include "lattice/launch.h"

namespace girih::kernels {

cudaError_t lattice_forward(const LatticeScan& p, const LatticeRead& read, cudaStream_t stream) {
  if (p.shape.dtype == DType::bf16) return lattice::forward_of<__nv_bfloat16>(p, read, stream);
  if (p.shape.dtype == DType::f16) return lattice::forward_of<__half>(p, read, stream);
  return cudaErrorInvalidValue;
}
cudaError_t lattice_reads(const LatticeReads& p, cudaStream_t stream) {
  if (p.shape.dtype == DType::bf16) return lattice::reads_of<__nv_bfloat16>(p, stream);
  if (p.shape.dtype == DType::f16) return lattice::reads_of<__half>(p, stream);
  return cudaErrorInvalidValue;
}
cudaError_t lattice_reverse(const LatticeReverse& p, const LatticeColumns& columns, cudaStream_t stream) {
  if (p.shape.dtype == DType::bf16) return lattice::reverse_of<__nv_bfloat16>(p, columns, stream);
  if (p.shape.dtype == DType::f16) return lattice::reverse_of<__half>(p, columns, stream);
  return cudaErrorInvalidValue;
}

}  // namespace girih::kernels
