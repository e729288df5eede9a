// Parameters and launch functions of the kernels.
#pragma once

#include <algorithm>

#include "delta_product/delta_product.h"
#include "delta_product/vector.h"
#include "tile/grid.h"

namespace girih::kernels::delta_product {

// How one launch of the scan or of reverse covers the sequences: whole or cut into segments.
struct Walk {
  // Tokens of a segment, a multiple of the tokens of a chunk; 0: sequences are not cut. With segments the
  // initial states are those of the segments.
  int64_t segment;
  // The launch scans every segment on its own and stores nothing but end states. The scan has D more columns,
  // which start from the identity matrix with zero values and end as the transition of the segment. The first
  // segment starts from the initial state of the sequence and has no transition; the others start from zero.
  // The final states are [segments, H, D, V + D], in reverse [segments, H, D, V]. The last segment of a
  // sequence is skipped.
  bool alone;
  bool reverse;   // chunks from the last to the first
  Divider heads;  // divides by H
  // Sizes of a sequence if cu_seqlens is absent, so that a block finds its tokens without 64-bit divisions.
  // Not read if cu_seqlens is present.
  Divider segments;        // divides by the segments of a sequence; 1 if sequences are not cut
  int64_t chunks;          // of a sequence
  int64_t segment_chunks;  // of a segment, or of the sequence

  Walk(const DeltaShape& shape, int64_t segment, bool reverse)
      : segment(segment),
        alone(false),
        reverse(reverse),
        heads(std::max(shape.heads, 1)),
        segments(segment == 0 ? 1 : divide_up(shape.tokens.tokens, segment)),
        chunks(divide_up(shape.tokens.tokens, delta_chunk(shape.n))),
        segment_chunks(segment == 0 ? chunks : segment / delta_chunk(shape.n)) {}
};

struct ScanPass {
  DeltaScan scan;
  Walk walk;
  int chains = 0;   // state warpgroups of a block of `scan`
  int stages = 0;   // ring of keys, values and prepared data
  int slots = 0;    // ring of S and U of a chunk
  int places = 0;   // ring of queries and scores (`scan_output`)
  int readers = 0;  // output warpgroups; chunks are assigned round-robin
};

struct ReversePass {
  DeltaReverse scan;
  Walk walk;
  int stages = 0, slots = 0;
};

// Columns of V of a state warpgroup: the M of its wgmma products.
constexpr int kScanColumns = 64;

template <typename T>
cudaError_t launch_prepare(const DeltaPrepare& problem, cudaStream_t stream);
// One instance for each tile width of D; each element type is compiled in a file of its own.
template <typename T, int D>
cudaError_t launch_scan(const ScanPass& pass, cudaStream_t stream);
template <typename T, int D>
cudaError_t launch_reverse(const ReversePass& pass, cudaStream_t stream);
template <typename T, int D>
cudaError_t launch_gradients(const DeltaGradients& problem, cudaStream_t stream);
template <typename T, int D>
cudaError_t launch_vector_gradients(const DeltaVectorGradients& problem, cudaStream_t stream);

}  // namespace girih::kernels::delta_product
