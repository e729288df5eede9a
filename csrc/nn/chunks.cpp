#include "chunks.h"

namespace girih::nn {

ChunkTable::ChunkTable(const Tensor& x, int64_t chunk, const Tensor& valid_tokens, const Tensor& cu_seqlens,
                       int64_t room)
    : chunk(chunk), B(x.size(0)), T(x.size(1)) {
  const auto integers = x.options().dtype(at::kLong);
  Tensor length, rank, sequence, valid;
  int64_t chunks;
  if (cu_seqlens.defined()) {
    length = cu_seqlens.diff().to(at::kLong);
    const auto token = at::arange(T, integers);
    sequence =
        at::searchsorted(cu_seqlens.slice(0, 1), token, false, /*right=*/true).clamp_max(length.size(0) - 1);
    rank = token - cu_seqlens.index_select(0, sequence);
    valid = token < cu_seqlens.select(0, -1);
    chunks = (T + length.size(0) * (chunk - 1 + room)) / chunk;
  } else {
    valid = valid_tokens;
    length = valid.sum(1);
    rank = valid.cumsum(1) - 1;
    sequence = at::arange(B, integers).unsqueeze(-1).expand({B, T});
    chunks = B * ((T + room + chunk - 1) / chunk);
  }
  const auto end = at::floor_divide(length + (room + chunk - 1), chunk).cumsum(0);
  cu_chunks = at::cat({end.new_zeros(1), end.slice(0, 0, -1), end.new_full(1, chunks)});
  const auto start = cu_chunks.index_select(0, sequence.flatten()).view_as(sequence);
  row = at::where(valid, start * chunk + rank, chunks * chunk).flatten();
  const auto at = at::arange(chunks, integers);
  index = at - cu_chunks.index_select(0, at::searchsorted(end.slice(0, 0, -1), at, false, /*right=*/true));
}

Tensor ChunkTable::spread(const Tensor& x) const {
  const auto chunks = index.size(0);
  auto sizes = x.sizes().slice(1).vec();
  sizes[0] = chunks * chunk + 1;
  const auto table = x.new_zeros(sizes).index_copy(0, row, x.flatten(0, 1));
  return table.slice(0, 0, -1).unflatten(0, {1, chunks, chunk});
}

Tensor ChunkTable::gather(const Tensor& y, int64_t shift) const {
  const auto rows = y.flatten(0, 2);
  return rows.index_select(0, (row + shift).clamp_max(rows.size(0) - 1)).unflatten(0, {B, T});
}

}  // namespace girih::nn
