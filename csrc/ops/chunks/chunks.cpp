// The index tables of chunks, and the scan over them.
#include "chunks.h"

namespace girih {
namespace {

// Reshapes a flag [B] or [N] for broadcasting with its state.
Tensor against(const Tensor& flag, const Tensor& state) {
  std::vector<int64_t> sizes(state.dim(), 1);
  sizes[0] = flag.size(0);
  return flag.view(sizes);
}

}  // namespace

Chunks::Chunks(const Tensor& like, int64_t B, int64_t T, int64_t C, const OptionalTensor& cu_seqlens,
               const OptionalTensor& position, Cut cut)
    : B_(B), T_(T), length_(C), packed_(given(cu_seqlens) && cu_seqlens->dim() == 1) {
  const bool bounds = given(cu_seqlens) && !packed_;
  table_ = packed_ || given(position) || (bounds && cut == Cut::at_start);
  const auto options = like.options().dtype(at::kLong).requires_grad(false);
  const auto rows = at::arange(C, options);

  // lo, hi [B, n]: begin and end of the sequences of each row. Bounds are clamped: a wrong cu_seqlens gives
  // wrong numbers but no access out of bounds.
  Tensor lo, hi;
  if (bounds) {
    const auto within = cu_seqlens->to(at::kLong).clamp(0, T);
    N_ = B;
    lo = within.slice(1, 0, 1);
    hi = at::maximum(within.slice(1, 1), lo);
  } else if (packed_) {
    const auto cu = cu_seqlens->to(at::kLong).clamp(0, T);
    N_ = cu.size(0) - 1;
    lo = cu.slice(0, 0, N_).unsqueeze(0);
    hi = at::maximum(cu.slice(0, 1).unsqueeze(0), lo);
  } else {
    N_ = B;
    lo = at::zeros({B, 1}, options);
    hi = at::full({B, 1}, T, options);
  }
  if (!table_) {
    count_ = (T + C - 1) / C;
    const auto token = at::arange(count_, options).unsqueeze(1) * C + rows;
    valid_ = (token >= lo.unsqueeze(2)) & (token < hi.unsqueeze(2));
    if (bounds) covered_ = valid_.flatten(1).narrow(1, 0, T);
    return;
  }
  const int64_t n = packed_ ? N_ : 1;
  size_ = (hi - lo).view({N_});
  position_ = given(position) ? position->clamp(0, C - 1) : at::zeros({N_}, options);
  const auto p = position_.view({B, n});
  count_ = T == 0 || n == 0 ? 0 : (T + 2 * n * (C - 1)) / C;

  const auto chunks = at::where(hi > lo, (p + hi - lo + C - 1).floor_divide(C), 0);
  const auto end = chunks.cumsum(1);
  end_ = end.reshape({N_});
  held_ = (hi > lo).view({N_});
  if (count_ == 0) {
    sequence_ = at::zeros({B, 0}, options);
    first_ = at::zeros({B, 0}, options.dtype(at::kBool));
    valid_ = at::zeros({B, 0, C}, options.dtype(at::kBool));
    covered_ = at::zeros({B, T}, options.dtype(at::kBool));
    token_ = at::zeros({0}, options);
    place_ = at::zeros({B * T}, options);
    return;
  }
  const auto c = at::arange(count_, options).expand({B, count_}).contiguous();
  sequence_ = at::searchsorted(end, c, /*out_int32=*/false, /*right=*/true).clamp_max(n - 1);
  const auto begin = (end - chunks).gather(1, sequence_);
  first_ = c == begin;
  const auto lo_c = lo.gather(1, sequence_), hi_c = hi.gather(1, sequence_);
  const auto token = (lo_c + (c - begin) * C - p.gather(1, sequence_)).unsqueeze(2) + rows;
  valid_ =
      (token >= lo_c.unsqueeze(2)) & (token < hi_c.unsqueeze(2)) & (c < end.slice(1, n - 1)).unsqueeze(2);
  const auto row = at::arange(B, options) * T;
  token_ = (token.clamp(0, T - 1) + row.view({B, 1, 1})).view({-1});

  // Inverse map: token t of sequence s is row p + t - lo, counted from the start of the first chunk of the
  // sequence.
  const auto t = at::arange(T, options).expand({B, T}).contiguous();
  const auto owner = at::searchsorted(hi, t, false, true).clamp_max(n - 1);
  const auto from = t - lo.gather(1, owner);
  covered_ = (from >= 0) & (t < hi.gather(1, owner));
  const auto place = (end - chunks).gather(1, owner) * C + p.gather(1, owner) + from;
  place_ = (place.clamp(0, count_ * C - 1) + (at::arange(B, options) * (count_ * C)).unsqueeze(1)).view({-1});
}

Tensor Chunks::split(const Tensor& x, at::ScalarType dtype, int64_t rows) const {
  const auto H = x.size(2);
  const auto rest = x.sizes().slice(3);
  std::vector<int64_t> cut{B_, count_, length_ * rows, H};
  cut.insert(cut.end(), rest.begin(), rest.end());
  Tensor y;
  if (table_) {
    std::vector<int64_t> tokens{B_ * T_, rows, H};
    tokens.insert(tokens.end(), rest.begin(), rest.end());
    y = x.to(dtype).reshape(tokens).index_select(0, token_);
    std::vector<int64_t> mask(y.dim(), 1);
    mask[0] = y.size(0);
    y = at::where(valid_.reshape(mask), y, at::zeros({}, y.options())).view(cut);
  } else {
    y = x.to(dtype);
    const auto missing = (count_ * length_ - T_) * rows;
    if (missing > 0) {
      std::vector<int64_t> pad(2 * (x.dim() - 1), 0);
      pad.back() = missing;
      y = at::constant_pad_nd(y, pad, 0);
    }
    y = y.reshape(cut);
    if (covered_.defined()) {
      auto mask = valid_.unsqueeze(3).expand({-1, -1, -1, rows}).flatten(2);
      while (mask.dim() < y.dim()) mask = mask.unsqueeze(-1);
      y = at::where(mask, y, at::zeros({}, y.options()));
    }
  }
  return y.transpose(2, 3).contiguous();
}

Tensor Chunks::join(const Tensor& x, at::ScalarType dtype) const {
  const auto y = x.transpose(2, 3);  // [B, count, C, H, ...]
  std::vector<int64_t> tokens{B_ * count_ * length_, y.size(3)}, out{B_, T_, y.size(3)};
  for (const auto size : y.sizes().slice(4)) {
    tokens.push_back(size);
    out.push_back(size);
  }
  Tensor joined;
  if (table_) {
    if (count_ == 0) return at::zeros(out, y.options().dtype(dtype));
    joined = y.reshape(tokens).index_select(0, place_).view(out);
  } else {
    auto whole = out;
    whole[1] = count_ * length_;
    joined = y.reshape(whole).narrow(1, 0, T_);
    if (!covered_.defined()) return joined.to(dtype).contiguous();
  }
  std::vector<int64_t> mask(out.size(), 1);
  mask[0] = B_, mask[1] = T_;
  return at::where(covered_.reshape(mask), joined, at::zeros({}, joined.options())).to(dtype).contiguous();
}

Tensor Chunks::complete() const { return valid_.select(2, length_ - 1).contiguous(); }

Tensor Chunks::next_position() const {
  if (table_) return (position_ + size_).remainder(length_);
  return at::full({N_}, T_ % length_, valid_.options().dtype(at::kLong));
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
  std::vector<States> entering, after(initial.size());
  States first, state = initial;
  if (packed_) {
    first = first_.unbind(1);
    for (auto& part : state) {
      entering.push_back(part.index_select(0, sequence_.view({-1})).split(1));
      part = entering.back()[0];
    }
  }
  for (int64_t c = 0; c < count_; ++c) {
    for (size_t i = 0; i < state.size(); ++i) {
      if (packed_) state[i] = at::where(against(first[c], state[i]), entering[i][c], state[i]);
      result.before[i].push_back(state[i]);
    }
    state = step(c, state);
    for (size_t i = 0; packed_ && i < state.size(); ++i) after[i].push_back(state[i]);
  }
  result.finals = state;
  for (size_t i = 0; packed_ && i < state.size(); ++i) {
    const auto last = at::cat(after[i], 0).index_select(0, (end_ - 1).clamp(0, count_ - 1));
    result.finals[i] = at::where(against(held_, last), last, initial[i]);
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
