// Chooses the instance of a call.
#include <algorithm>

#include "tile/instance.h"
#include "tile/launch.h"
#include "trellis/launch.h"

namespace girih::kernels {
namespace {

// Calls launch(element, tile) with the smallest tile of slots and columns that holds the widths.
template <class Launch>
cudaError_t dispatch_instance(const TrellisShape& shape, const Launch& launch) {
  const int widest = std::max({shape.M, shape.D, shape.V});
  return dispatch_16bit(shape.dtype, [&](auto element) {
    return dispatch_width<64, kTrellisMaxWidth>(widest, [&](auto tile) { return launch(element, tile); });
  });
}

}  // namespace

#define GIRIH_TRELLIS(Problem, function, name)                                         \
  cudaError_t function(const Problem& problem, cudaStream_t stream) {                  \
    return dispatch_instance(problem.shape, [&](auto element, auto tile) {             \
      return launch_##name<decltype(element), decltype(tile)::value>(problem, stream); \
    });                                                                                \
  }
namespace {
GIRIH_TRELLIS(TrellisScan, scan_unweighted, trellis_scan)
GIRIH_TRELLIS(TrellisScan, scan_weighted, weighted_scan)
GIRIH_TRELLIS(TrellisReverse, reverse_unweighted, trellis_reverse)
GIRIH_TRELLIS(TrellisReverse, reverse_weighted, weighted_reverse)
}  // namespace
GIRIH_TRELLIS(TrellisOutput, trellis_output, trellis_output)
GIRIH_TRELLIS(TrellisDq, trellis_dq, trellis_dq)
#undef GIRIH_TRELLIS

cudaError_t trellis_scan(const TrellisScan& problem, cudaStream_t stream) {
  return problem.weight == nullptr ? scan_unweighted(problem, stream) : scan_weighted(problem, stream);
}
cudaError_t trellis_reverse(const TrellisReverse& problem, cudaStream_t stream) {
  return problem.weight == nullptr ? reverse_unweighted(problem, stream) : reverse_weighted(problem, stream);
}

cudaError_t trellis_scan_has_output(const TrellisShape& shape, bool& has_output) {
  if (shape.memories == 1) {
    has_output = true;
    return cudaSuccess;
  }
  return dispatch_instance(shape, [&](auto element, auto tile) {
    return scan_has_output<decltype(element), decltype(tile)::value>(has_output);
  });
}

cudaError_t trellis_fits(bool& fits) {
  int limit = 0;
  const cudaError_t error = shared_limit(limit);
  fits = trellis_shared_bytes() <= limit;
  return error;
}

}  // namespace girih::kernels
