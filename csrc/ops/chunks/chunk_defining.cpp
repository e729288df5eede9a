#include "chunk_defining.h"

namespace girih {
namespace {

// For chunks of kStateEach tokens or more, the states of all chunks need no more memory than the tokens, and
// a block is one chunk. Shorter chunks are grouped into blocks of up to kStretch tokens; backward runs a
// block again, so one state per block is saved.
constexpr int64_t kStateEach = 16;
constexpr int64_t kStretch = 64;

int64_t chunks_in_block(int64_t T, int64_t C, bool resumed) {
  if (C >= kStateEach) return 1;
  const auto touched = (T + (resumed ? 2 : 1) * (C - 1)) / C;
  return std::clamp<int64_t>(touched, 1, kStretch / C);
}

}  // namespace

Tensor where_row(const Tensor& flag, const Tensor& state, const Tensor& otherwise) {
  std::vector<int64_t> sizes(state.dim(), 1);
  sizes[0] = flag.size(0);
  return at::where(flag.view(sizes), state, otherwise);
}

DefiningChunks::DefiningChunks(const Tensor& like, int64_t B, int64_t T, int64_t C,
                               const OptionalTensor& cu_seqlens, const OptionalTensor& position)
    : C_(C),
      // With chunks of one token every token begins a chunk, so the position has no effect.
      n_(chunks_in_block(T, C, C > 1 && given(position))),
      // Chunks would clamp the position to the length of a block; the position must be clamped to the length
      // of a chunk.
      chunks_(like, B, T, C * n_, cu_seqlens,
              C > 1 && given(position) ? OptionalTensor(position->clamp(0, C - 1)) : std::nullopt,
              Chunks::Cut::at_start) {
  whole_ = !given(cu_seqlens) && !(C > 1 && given(position)) && T % (C * n_) == 0;
}

DefiningChunks::Run DefiningChunks::run(const Tensors& inputs, const Chunks::States& initial,
                                        const MakeBlock& make, at::ScalarType dtype) const {
  const auto type = initial[0].scalar_type();
  if (chunks_.count() == 0) return {Tensor(), chunks_.scan(initial, nullptr).finals};

  // [B, blocks, C n] -> the last row of each chunk, [B, blocks, n]
  const auto complete =
      whole_ ? Tensor() : chunks_.valid().unflatten(2, {n_, C_}).select(3, C_ - 1).contiguous();
  if (C_ >= kStateEach) {
    // A block is one chunk. A read depends on other chunks only through their states, so all chunks are read
    // at once after the scan.
    Tensors cut;
    for (const auto& x : inputs) cut.push_back(x.defined() ? chunks_.split(x, type) : x);
    const auto block = make(cut, whole_ ? complete : complete.squeeze(2));
    const auto scan = chunks_.scan(
        initial, [&](int64_t c, const Chunks::States& states) { return block->step(c, states); });
    Tensors starts;
    for (size_t i = 0; i < initial.size(); ++i) starts.push_back(chunks_.starts(scan, i));
    return {chunks_.join(block->read(starts), dtype), scan.finals};
  }

  // Per block: [B, n, H, C, ...].
  std::vector<Tensors> cut;
  for (const auto& x : inputs) {
    cut.push_back(x.defined() ? chunks_.split(x, type).unflatten(3, {n_, C_}).transpose(2, 3).unbind(1)
                              : Tensors(chunks_.count()));
  }
  const auto complete_in = whole_ ? Tensors(chunks_.count()) : complete.unbind(1);
  const auto states = initial.size();
  const auto n = n_;
  Tensors o;
  const auto scan = chunks_.scan(initial, [&](int64_t b, const Chunks::States& before) -> Chunks::States {
    const auto rule = [make, states, n, flags = complete_in[b]](const Tensors& given) -> Tensors {
      const auto block = make({given.begin() + states, given.end()}, flags);
      std::vector<Tensors> starts(states);
      Chunks::States state(given.begin(), given.begin() + states);
      for (int64_t c = 0; c < n; ++c) {
        for (size_t i = 0; i < states; ++i) starts[i].push_back(state[i]);
        state = block->step(c, state);
      }
      Tensors stacked;
      for (const auto& each : starts) stacked.push_back(at::stack(each, 1));
      Tensors results{block->read(stacked).transpose(1, 2).flatten(2, 3)};  // [B, HQ, n C, ...]
      results.insert(results.end(), state.begin(), state.end());
      return results;
    };
    Tensors given(before);
    for (const auto& x : cut) given.push_back(x[b]);
    const auto results = recompute(rule, given);
    o.push_back(results[0]);
    return {results.begin() + 1, results.end()};
  });
  return {chunks_.join(at::stack(o, 1), dtype), scan.finals};
}

}  // namespace girih
