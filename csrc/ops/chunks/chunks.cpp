// The index tables of chunks, and the scan over them.
#include "chunks.h"

namespace girih {
namespace {

// Reshapes a flag [B] or [N] for broadcasting with its state.
Tensor reshape_flag(const Tensor& flag, const Tensor& state) {
  std::vector<int64_t> sizes(state.dim(), 1);
  sizes[0] = flag.size(0);
  return flag.view(sizes);
}

}  // namespace

Chunks::Chunks(const Tensor& x, int64_t B, int64_t T, int64_t C, const OptionalTensor& cu_seqlens,
               const OptionalTensor& position, Cut cut)
    : B_(B), T_(T), chunk_length_(C), is_packed_(is_packed(cu_seqlens)) {
  const bool has_bounds = is_defined(cu_seqlens) && !is_packed_;
  has_index_ = is_packed_ || is_defined(position) || (has_bounds && cut == Cut::at_start);
  const auto options = x.options().dtype(at::kLong).requires_grad(false);
  const auto rows = at::arange(C, options);

  // lo, hi [B, n]: begin and end of the sequences of each row. Bounds are clamped: a wrong cu_seqlens gives
  // wrong numbers but no access out of bounds.
  Tensor lo, hi;
  if (has_bounds) {
    const auto within = cu_seqlens->to(at::kLong).clamp(0, T);
    N_ = B;
    lo = within.slice(1, 0, 1);
    hi = at::maximum(within.slice(1, 1), lo);
  } else if (is_packed_) {
    const auto cu = cu_seqlens->to(at::kLong).clamp(0, T);
    N_ = cu.size(0) - 1;
    lo = cu.slice(0, 0, N_).unsqueeze(0);
    hi = at::maximum(cu.slice(0, 1).unsqueeze(0), lo);
  } else {
    N_ = B;
    lo = at::zeros({B, 1}, options);
    hi = at::full({B, 1}, T, options);
  }
  if (!has_index_) {
    count_ = (T + C - 1) / C;
    const auto token = at::arange(count_, options).unsqueeze(1) * C + rows;
    valid_ = (token >= lo.unsqueeze(2)) & (token < hi.unsqueeze(2));
    if (has_bounds) in_sequence_ = valid_.flatten(1).narrow(1, 0, T);
    return;
  }
  const int64_t n = is_packed_ ? N_ : 1;  // sequences of a row
  sequence_length_ = (hi - lo).view({N_});
  position_ = is_defined(position) ? position->clamp(0, C - 1) : at::zeros({N_}, options);
  const auto p = position_.view({B, n});
  count_ = T == 0 || n == 0 ? 0 : (T + 2 * n * (C - 1)) / C;

  const auto chunks = at::where(hi > lo, (p + hi - lo + C - 1).floor_divide(C), 0);
  const auto end = chunks.cumsum(1);
  chunk_end_ = end.reshape({N_});
  has_tokens_ = (hi > lo).view({N_});
  if (count_ == 0) {
    sequence_ = at::zeros({B, 0}, options);
    is_first_ = at::zeros({B, 0}, options.dtype(at::kBool));
    valid_ = at::zeros({B, 0, C}, options.dtype(at::kBool));
    in_sequence_ = at::zeros({B, T}, options.dtype(at::kBool));
    split_index_ = at::zeros({0}, options);
    join_index_ = at::zeros({B * T}, options);
    return;
  }
  const auto c = at::arange(count_, options).expand({B, count_}).contiguous();
  sequence_ = at::searchsorted(end, c, /*out_int32=*/false, /*right=*/true).clamp_max(n - 1);
  const auto begin = (end - chunks).gather(1, sequence_);
  is_first_ = c == begin;
  const auto lo_c = lo.gather(1, sequence_), hi_c = hi.gather(1, sequence_);
  const auto token = (lo_c + (c - begin) * C - p.gather(1, sequence_)).unsqueeze(2) + rows;
  valid_ =
      (token >= lo_c.unsqueeze(2)) & (token < hi_c.unsqueeze(2)) & (c < end.slice(1, n - 1)).unsqueeze(2);
  const auto row = at::arange(B, options) * T;
  split_index_ = (token.clamp(0, T - 1) + row.view({B, 1, 1})).view({-1});

  // Inverse map: token t of sequence s is row p + t - lo, counted from the start of the first chunk of the
  // sequence.
  const auto t = at::arange(T, options).expand({B, T}).contiguous();
  const auto owner = at::searchsorted(hi, t, false, true).clamp_max(n - 1);
  const auto from = t - lo.gather(1, owner);
  in_sequence_ = (from >= 0) & (t < hi.gather(1, owner));
  const auto place = (end - chunks).gather(1, owner) * C + p.gather(1, owner) + from;
  join_index_ =
      (place.clamp(0, count_ * C - 1) + (at::arange(B, options) * (count_ * C)).unsqueeze(1)).view({-1});
}

Tensor Chunks::split(const Tensor& x, at::ScalarType dtype, int64_t rows) const {
  const auto H = x.size(2);
  const auto rest = x.sizes().slice(3);
  std::vector<int64_t> cut{B_, count_, chunk_length_ * rows, H};
  cut.insert(cut.end(), rest.begin(), rest.end());
  Tensor y;
  if (has_index_) {
    std::vector<int64_t> tokens{B_ * T_, rows, H};
    tokens.insert(tokens.end(), rest.begin(), rest.end());
    y = x.to(dtype).reshape(tokens).index_select(0, split_index_);
    std::vector<int64_t> mask(y.dim(), 1);
    mask[0] = y.size(0);
    y = at::where(valid_.reshape(mask), y, at::zeros({}, y.options())).view(cut);
  } else {
    y = x.to(dtype);
    const auto padding = (count_ * chunk_length_ - T_) * rows;
    if (padding > 0) {
      std::vector<int64_t> pad(2 * (x.dim() - 1), 0);
      pad.back() = padding;
      y = at::constant_pad_nd(y, pad, 0);
    }
    y = y.reshape(cut);
    if (in_sequence_.defined()) {
      auto mask = valid_.unsqueeze(3).expand({-1, -1, -1, rows}).flatten(2);
      while (mask.dim() < y.dim()) mask = mask.unsqueeze(-1);
      y = at::where(mask, y, at::zeros({}, y.options()));
    }
  }
  return y.transpose(2, 3).contiguous();
}

Tensor Chunks::join(const Tensor& x, at::ScalarType dtype) const {
  const auto y = x.transpose(2, 3);  // [B, count, C, H, ...]
  std::vector<int64_t> tokens{B_ * count_ * chunk_length_, y.size(3)}, out{B_, T_, y.size(3)};
  for (const auto size : y.sizes().slice(4)) {
    tokens.push_back(size);
    out.push_back(size);
  }
  Tensor joined;
  if (has_index_) {
    if (count_ == 0) return at::zeros(out, y.options().dtype(dtype));
    joined = y.reshape(tokens).index_select(0, join_index_).view(out);
  } else {
    auto padded = out;
    padded[1] = count_ * chunk_length_;
    joined = y.reshape(padded).narrow(1, 0, T_);
    if (!in_sequence_.defined()) return joined.to(dtype).contiguous();
  }
  std::vector<int64_t> mask(out.size(), 1);
  mask[0] = B_, mask[1] = T_;
  return at::where(in_sequence_.reshape(mask), joined, at::zeros({}, joined.options()))
      .to(dtype)
      .contiguous();
}

Tensor Chunks::has_chunk_end() const { return valid_.select(2, chunk_length_ - 1).contiguous(); }

Tensor Chunks::next_position() const {
  if (has_index_) return (position_ + sequence_length_).remainder(chunk_length_);
  return at::full({N_}, T_ % chunk_length_, valid_.options().dtype(at::kLong));
}

Chunks::Scan Chunks::scan(const States& initial,
                          const std::function<States(int64_t, const States&)>& step) const {
  Scan result{std::vector<States>(initial.size()), initial};
  if (count_ == 0) {
    for (auto& state : result.finals) state = state.clone();
    return result;
  }
  // Gathers the initial state of the sequence of every chunk once. A select inside the loop would cost a
  // gradient of all N states in the backward of each chunk.
  std::vector<States> initial_states, after(initial.size());
  States first, state = initial;
  if (is_packed_) {
    first = is_first_.unbind(1);
    for (auto& part : state) {
      initial_states.push_back(part.index_select(0, sequence_.view({-1})).split(1));
      part = initial_states.back()[0];
    }
  }
  for (int64_t c = 0; c < count_; ++c) {
    for (size_t i = 0; i < state.size(); ++i) {
      if (is_packed_) state[i] = at::where(reshape_flag(first[c], state[i]), initial_states[i][c], state[i]);
      result.before[i].push_back(state[i]);
    }
    state = step(c, state);
    for (size_t i = 0; is_packed_ && i < state.size(); ++i) after[i].push_back(state[i]);
  }
  result.finals = state;
  for (size_t i = 0; is_packed_ && i < state.size(); ++i) {
    const auto last = at::cat(after[i], 0).index_select(0, (chunk_end_ - 1).clamp(0, count_ - 1));
    result.finals[i] = at::where(reshape_flag(has_tokens_, last), last, initial[i]);
  }
  return result;
}

Tensor Chunks::starts(const Scan& scan, size_t i) const {
  if (count_ > 0) return at::stack(scan.before[i], 1);
  auto sizes = scan.finals[i].sizes().vec();
  sizes[0] = B_;
  sizes.insert(sizes.begin() + 1, 0);
  return scan.finals[i].new_zeros(sizes);
}

}  // namespace girih
