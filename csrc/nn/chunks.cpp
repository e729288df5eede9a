#include "chunks.h"

#include <algorithm>
#include <bit>

namespace girih::nn {

ChunkTable::ChunkTable(const Tensor& x, int64_t chunk, const Tensor& cu_seqlens, int64_t room)
    : chunk(chunk) {
  const auto T = x.size(1);
  const auto integers = x.options().dtype(at::kLong);
  const auto length = cu_seqlens.diff().to(at::kLong), token = at::arange(T, integers);
  const auto sequence =
      at::searchsorted(cu_seqlens.slice(0, 1), token, false, /*right=*/true).clamp_max(length.size(0) - 1);
  const auto rank = token - cu_seqlens.index_select(0, sequence), valid = token < cu_seqlens.select(0, -1);
  const auto chunks = (T + length.size(0) * (chunk - 1 + room)) / chunk;
  const auto end = at::floor_divide(length + (room + chunk - 1), chunk).cumsum(0);
  cu_chunks = at::cat({end.new_zeros(1), end.slice(0, 0, -1), end.new_full(1, chunks)});
  row = at::where(valid, cu_chunks.index_select(0, sequence) * chunk + rank, chunks * chunk);
  const auto at = at::arange(chunks, integers);
  index = at - cu_chunks.index_select(0, at::searchsorted(end.slice(0, 0, -1), at, false, /*right=*/true));
}

Tensor ChunkTable::scatter(const Tensor& x) const {
  const auto chunks = index.size(0);
  auto sizes = x.sizes().slice(1).vec();
  sizes[0] = chunks * chunk + 1;
  const auto table = x.new_zeros(sizes).index_copy(0, row, x.flatten(0, 1));
  return table.slice(0, 0, -1).unflatten(0, {1, chunks, chunk});
}

Tensor ChunkTable::gather(const Tensor& y, int64_t shift) const {
  const auto rows = y.flatten(0, 2);
  return rows.index_select(0, (row + shift).clamp_max(rows.size(0) - 1)).unsqueeze(0);
}

Tensor Compressions::select(const Tensor& fresh, const Tensor& old) const {
  const auto rows = fresh.to(old.scalar_type());
  return is_complete.defined() ? at::where(broadcast_index(is_complete.unsqueeze(-1), old), rows, old) : rows;
}

int64_t SequenceLengths::count_compressions(int64_t chunk) const {
  const auto N = host_tokens.numel(), count = (host_tokens.remainder(chunk) == 0).sum().item<int64_t>();
  if (count == 0 || is_uniform()) return count;
  return std::min(N, int64_t(std::bit_ceil(uint64_t(count))));
}

std::optional<Compressions> SequenceLengths::find_compressions(int64_t chunk) const {
  const auto count = count_compressions(chunk);
  if (count == 0) return {};
  if (is_uniform()) return Compressions{at::arange(count, tokens.options()), {}};
  const auto [row, sequences] = tokens.remainder(chunk).topk(count, 0, /*largest=*/false);
  return Compressions{sequences, row == 0};
}

Continuation::Continuation(const Tensor& x, int64_t chunk, const Tensor& attention_mask,
                           const SequenceLengths& past, bool use_cache)
    : chunk_(chunk), T_(x.size(1)) {
  const auto N = x.size(0);
  const auto integers = x.options().dtype(at::kLong);
  const bool has_past = past.tokens.defined();
  const auto start = has_past ? past.tokens : at::zeros({N}, integers);
  const auto host_tokens = has_past ? past.host_tokens : at::zeros({N}, at::kLong);
  auto count = at::full({N}, T_, integers), host_count = at::full({N}, T_, at::kLong);
  if (attention_mask.defined()) {
    const auto [order, inverse_order, valid] = sort_valid_first(attention_mask.to(at::kBool));
    order_ = order;
    row_ = inverse_order.minimum(valid.unsqueeze(-1) - 1);
    count = valid;
    if (use_cache) host_count = count.to(at::kCPU);
  }
  if (has_past) {
    position_ = start.remainder(chunk);
    row_ = (row_.defined() ? row_ : at::arange(T_, integers)) + position_.unsqueeze(-1);
  }
  first_chunk = at::floor_divide(start, chunk);
  const auto host_end = host_tokens.remainder(chunk) + host_count;
  chunks = (N > 0 ? host_end.max().item<int64_t>() : T_) / chunk + 1;
  if (!use_cache) return;
  seq_lengths = {start + count, host_tokens + host_count};
  current_chunk_ = at::floor_divide(seq_lengths.tokens, chunk) - first_chunk;
}

Tensor Continuation::scatter(const Tensor& x, const Tensor& before) const {
  const auto tokens = order_.defined() ? x.take_along_dim(broadcast_index(order_, x), 1) : x;
  const auto rows = chunks * chunk_;
  if (!position_.defined()) {
    std::vector<int64_t> padding(2 * (x.dim() - 2), 0);
    padding.insert(padding.end(), {0, rows - T_});
    return at::constant_pad_nd(tokens, padding).unflatten(1, {chunks, chunk_});
  }
  const auto row = at::arange(rows, first_chunk.options()), phase = position_.unsqueeze(-1);
  const auto source = at::where(row < phase, row, chunk_ + row - phase).clamp_max(chunk_ + T_ - 1);
  const auto both = at::cat({before.to(x.scalar_type()), tokens}, 1);
  return both.take_along_dim(broadcast_index(source, x), 1).unflatten(1, {chunks, chunk_});
}

Tensor Continuation::gather(const Tensor& y, int64_t shift) const {
  const auto rows = y.flatten(1, 2);
  if (!row_.defined()) return rows.slice(1, shift, T_ + shift);
  return rows.take_along_dim(broadcast_index((row_ + shift).clamp_min(0), rows), 1);
}

Tensor Continuation::last(const Tensor& table) const {
  return table.index({at::arange(table.size(0), first_chunk.options()), current_chunk_});
}

}  // namespace girih::nn
