// Which kernel a call takes.
#include "lattice/lattice.h"
#include "lattice/launch.h"

namespace girih::kernels {
namespace {

template <class Problem>
cudaError_t by_type(const Problem& p, cudaError_t (*bf16)(const Problem&, cudaStream_t),
                    cudaError_t (*f16)(const Problem&, cudaStream_t), cudaStream_t stream) {
  if (p.shape.dtype == DType::bf16) return bf16(p, stream);
  if (p.shape.dtype == DType::f16) return f16(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t lattice_scan(const LatticeScan& p, cudaStream_t stream) {
  return by_type(p, lattice::scan_of<__nv_bfloat16>, lattice::scan_of<__half>, stream);
}
cudaError_t lattice_read(const LatticeRead& p, cudaStream_t stream) {
  return by_type(p, lattice::read_of<__nv_bfloat16>, lattice::read_of<__half>, stream);
}
cudaError_t lattice_reads(const LatticeReads& p, cudaStream_t stream) {
  return by_type(p, lattice::reads_of<__nv_bfloat16>, lattice::reads_of<__half>, stream);
}
cudaError_t lattice_reverse(const LatticeReverse& p, const LatticeColumns& columns, cudaStream_t stream) {
  if (p.shape.dtype == DType::bf16) return lattice::reverse_of<__nv_bfloat16>(p, columns, stream);
  if (p.shape.dtype == DType::f16) return lattice::reverse_of<__half>(p, columns, stream);
  return cudaErrorInvalidValue;
}

}  // namespace girih::kernels
