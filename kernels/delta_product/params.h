// Parameters and launch functions of the kernels.
#pragma once

#include <algorithm>

#include "delta_product/channel_beta.h"
#include "delta_product/kernels.h"
#include "tile/grid.h"

namespace girih::kernels::delta_product {

// How one launch of the scan or of reverse covers the sequences: whole or cut into segments.
struct ScanGrid {
  // Tokens of a segment, a multiple of the tokens of a chunk; 0: sequences are not cut.
  int64_t segment_tokens;
  // The launch scans every segment on its own and stores nothing but end states. The scan has D more columns,
  // which start from the identity matrix with zero values and end as the transition of the segment. The first
  // segment of a sequence starts from its initial state and has no transition; the others start from zero.
  // The last segment is skipped. First and last are in the order of the launch: in reverse, the segment with
  // the last tokens is the first. The final states are [segments, H, D, V + D], [segments, H, D, V] in
  // reverse.
  bool is_local;
  bool reverse;          // chunks from the last to the first
  Divider head_divider;  // divides by H
  // The fields below describe one sequence, so that a block finds its tokens without 64-bit divisions. They
  // are read only if cu_seqlens is absent.
  Divider segment_divider;  // divides by the number of segments of a sequence; by 1 if sequences are not cut
  int64_t chunks;           // chunks of a sequence
  int64_t segment_chunks;   // chunks of a segment, or of the sequence if sequences are not cut

  ScanGrid(const DeltaShape& shape, int64_t segment_tokens, bool reverse)
      : segment_tokens(segment_tokens),
        is_local(false),
        reverse(reverse),
        head_divider(std::max(shape.heads, 1)),
        segment_divider(segment_tokens == 0 ? 1 : divide_up(shape.tokens.tokens, segment_tokens)),
        chunks(divide_up(shape.tokens.tokens, delta_chunk_tokens(shape.n))),
        segment_chunks(segment_tokens == 0 ? chunks : segment_tokens / delta_chunk_tokens(shape.n)) {}
};

struct ScanParams {
  DeltaScan problem;
  ScanGrid grid;
  int state_groups = 0;   // state warpgroups of a block of `scan`
  int stages = 0;         // ring of keys, values and prepared data
  int state_stages = 0;   // ring of S and U of a chunk
  int query_stages = 0;   // ring of queries and scores (`scan_fused`)
  int output_groups = 0;  // output warpgroups; chunks are assigned round-robin
};

struct ReverseParams {
  DeltaReverse problem;
  ScanGrid grid;
  int stages = 0;        // ring of keys and prepared data, and as many of the ring of query heads
  int state_stages = 0;  // ring of dS and dz of a chunk
};

// Columns of V of a state warpgroup: the M of its wgmma products.
constexpr int kScanColumns = 64;

template <typename T>
cudaError_t launch_prepare(const DeltaPrepare& problem, cudaStream_t stream);
// One instance for each tile width of D; each element type is compiled in a file of its own.
template <typename T, int D>
cudaError_t launch_scan(const ScanParams& params, cudaStream_t stream);
template <typename T, int D>
cudaError_t launch_reverse(const ReverseParams& params, cudaStream_t stream);
template <typename T, int D>
cudaError_t launch_gradients(const DeltaGradients& problem, cudaStream_t stream);
template <typename T, int D>
cudaError_t launch_channel_beta_gradients(const DeltaChannelBetaGradients& problem, cudaStream_t stream);

}  // namespace girih::kernels::delta_product
