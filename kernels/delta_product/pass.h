// Launches, and the sizes that their host needs to know.
#pragma once

#include <algorithm>

#include "delta_product/delta_product.h"
#include "delta_product/vector.h"
#include "tile/grid.h"

namespace girih::kernels::delta_product {

// One launch over a scan: of whole sequences, or of segments.
struct Walk {
  // Tokens, a multiple of the chunk's; 0: whole sequences. The initial states are then the segments', not the
  // sequences'.
  int64_t segment;
  // Every segment by itself, without anything beside: columns 0..V-1, and in the scan D more, from the unit
  // matrix and without values, which become the segment's transition. The first segment starts from the
  // sequence's initial state and has no transition, the others start from zero. The final states [pieces, H,
  // D, V + D], in reverse [pieces, H, D, V], are the segments'; segments that nothing follows are left out.
  bool alone;
  bool reverse;   // from the last token to the first
  Divider heads;  // H
  // Of every sequence, where there are no cu_seqlens (with them nobody reads these): a block then finds its
  // part without 64-bit divisions.
  Divider segments;        // 1 where uncut
  int64_t chunks;          // of the sequence
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
  int chains = 0;   // of `scan`, parts of a block
  int stages = 0;   // of keys and values
  int slots = 0;    // of a chunk's state and updates
  int places = 0;   // of queries and scores
  int readers = 0;  // warpgroups that take chunks in turn
};

struct ReversePass {
  DeltaReverse scan;
  Walk walk;
  int stages = 0, slots = 0;
};

// Columns of V that a chain has: the rows of a warpgroup's products.
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
template <typename T, int D>
cudaError_t launch_vector_gradients(const DeltaVectorGradients& problem, cudaStream_t stream);

}  // namespace girih::kernels::delta_product
