#include "chunk_defining.h"

namespace girih {
namespace {

// For chunks of kMinBlockChunk tokens or more, the states of all chunks need no more memory than the tokens,
// and a block is one chunk. Shorter chunks are grouped into blocks of up to kBlockTokens tokens; backward
// runs a block again, so one state per block is saved.
constexpr int64_t kMinBlockChunk = 16;
constexpr int64_t kBlockTokens = 64;

int64_t count_chunks_in_block(int64_t T, int64_t C, bool has_position) {
  if (C >= kMinBlockChunk) return 1;
  const auto max_chunks = (T + (has_position ? 2 : 1) * (C - 1)) / C;
  return std::clamp<int64_t>(max_chunks, 1, kBlockTokens / C);
}

}  // namespace

Tensor select_rows(const Tensor& flag, const Tensor& state, const Tensor& otherwise) {
  std::vector<int64_t> sizes(state.dim(), 1);
  sizes[0] = flag.size(0);
  return at::where(flag.view(sizes), state, otherwise);
}

ChunkDefiningScan::ChunkDefiningScan(const Tensor& x, int64_t B, int64_t T, int64_t C,
                                     const OptionalTensor& cu_seqlens, const OptionalTensor& position)
    : C_(C),
      // With chunks of one token every token begins a chunk, so the position has no effect.
      n_(count_chunks_in_block(T, C, C > 1 && is_defined(position))),
      // Chunks would clamp the position to the length of a block; the position must be clamped to the length
      // of a chunk.
      chunks_(x, B, T, C * n_, cu_seqlens,
              C > 1 && is_defined(position) ? OptionalTensor(position->clamp(0, C - 1)) : std::nullopt,
              Chunks::Cut::at_start) {
  has_whole_chunks_ = !is_defined(cu_seqlens) && !(C > 1 && is_defined(position)) && T % (C * n_) == 0;
}

ChunkDefiningScan::Run ChunkDefiningScan::run(const Tensors& inputs, const Chunks::States& initial,
                                              const MakeChunkBlock& make, at::ScalarType dtype) const {
  const auto type = initial[0].scalar_type();
  if (chunks_.count() == 0) return {Tensor(), chunks_.scan(initial, nullptr).finals};

  // [B, blocks, C n] -> the last row of each chunk, [B, blocks, n]
  const auto has_chunk_end =
      has_whole_chunks_ ? Tensor() : chunks_.valid().unflatten(2, {n_, C_}).select(3, C_ - 1).contiguous();
  if (C_ >= kMinBlockChunk) {
    // A block is one chunk. A read depends on other chunks only through their states, so all chunks are read
    // at once after the scan.
    Tensors chunked_inputs;
    for (const auto& x : inputs) chunked_inputs.push_back(x.defined() ? chunks_.split(x, type) : x);
    const auto block = make(chunked_inputs, has_whole_chunks_ ? has_chunk_end : has_chunk_end.squeeze(2));
    const auto scan = chunks_.scan(
        initial, [&](int64_t c, const Chunks::States& states) { return block->step(c, states); });
    Tensors starts;
    for (size_t i = 0; i < initial.size(); ++i) starts.push_back(chunks_.starts(scan, i));
    return {chunks_.join(block->read(starts), dtype), scan.finals};
  }

  // Per block: [B, n, H, C, ...].
  std::vector<Tensors> chunked_inputs;
  for (const auto& x : inputs) {
    chunked_inputs.push_back(x.defined()
                                 ? chunks_.split(x, type).unflatten(3, {n_, C_}).transpose(2, 3).unbind(1)
                                 : Tensors(chunks_.count()));
  }
  const auto has_chunk_end_per_block = has_whole_chunks_ ? Tensors(chunks_.count()) : has_chunk_end.unbind(1);
  const auto state_count = initial.size();
  const auto n = n_;
  Tensors o;
  const auto scan =
      chunks_.scan(initial, [&](int64_t b, const Chunks::States& block_states) -> Chunks::States {
        const auto run_block = [make, state_count, n,
                                flags = has_chunk_end_per_block[b]](const Tensors& arguments) -> Tensors {
          const auto block = make({arguments.begin() + state_count, arguments.end()}, flags);
          std::vector<Tensors> starts(state_count);
          Chunks::States state(arguments.begin(), arguments.begin() + state_count);
          for (int64_t c = 0; c < n; ++c) {
            for (size_t i = 0; i < state_count; ++i) starts[i].push_back(state[i]);
            state = block->step(c, state);
          }
          Tensors stacked;
          for (const auto& each : starts) stacked.push_back(at::stack(each, 1));
          Tensors results{block->read(stacked).transpose(1, 2).flatten(2, 3)};  // [B, HQ, n C, ...]
          results.insert(results.end(), state.begin(), state.end());
          return results;
        };
        Tensors arguments(block_states);
        for (const auto& x : chunked_inputs) arguments.push_back(x[b]);
        const auto results = checkpoint(run_block, arguments);
        o.push_back(results[0]);
        return {results.begin() + 1, results.end()};
      });
  return {chunks_.join(at::stack(o, 1), dtype), scan.finals};
}

}  // namespace girih
