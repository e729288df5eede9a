// Launches, and the sizes that their host needs to know.
#pragma once

#include "delta_product/delta_product.h"

namespace girih::kernels::delta_product {

// One launch over a scan: of whole sequences, or of segments.
struct Walk {
  // Tokens, a multiple of the chunk's; 0: whole sequences. The initial states are then the segments', not the
  // sequences'.
  int64_t segment;
  // Every segment by itself, without anything beside: columns 0..V-1, and D more, from the unit matrix and
  // without values, which become the segment's transition. The first segment starts from the sequence's
  // initial state and has no transition, the others start from zero. The final states [pieces, H, D, V + D]
  // are the segments'; segments that nothing follows are left out.
  bool alone;
  bool reverse;  // from the last token to the first
};

struct ScanPass {
  DeltaScan scan;
  Walk walk;
  int chains;   // parts of a block
  int stages;   // of keys and values
  int slots;    // of a chunk's state and updates
  int places;   // of queries and scores
  int readers;  // warpgroups that take chunks in turn
};

struct ReversePass {
  DeltaReverse scan;
  Walk walk;
  int stages, slots;
};

// Columns of V that a block has: the rows of a warpgroup's products.
constexpr int kScanColumns = 64;

template <typename T>
cudaError_t launch_prepare(const DeltaPrepare& problem, cudaStream_t stream);
// By tile of D; each element type is compiled in a file of its own.
template <typename T, int D>
cudaError_t launch_scan(const ScanPass& pass, cudaStream_t stream);
template <typename T, int D>
cudaError_t launch_reverse(const ReversePass& pass, cudaStream_t stream);
template <typename T, int D>
cudaError_t launch_gradients(const DeltaGradients& problem, cudaStream_t stream);

}  // namespace girih::kernels::delta_product
