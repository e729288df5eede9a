// CAT as a model: the compressor and the decoder.
#include <girih/language_model.h>

#include <algorithm>
#include <numeric>

#include "../ops/registration/operator.h"
#include "chunks.h"
#include "header_cache.h"
#include "mixers.h"

namespace girih::nn {

CompressorImpl::CompressorImpl(const Config& config) : lengths_(chunk_lengths(config)) {
  const auto width = *config.compressor_hidden_size,
             chunks = (config.max_position_embeddings + lengths_[0] - 1) / lengths_[0],
             columns = std::accumulate(lengths_.begin(), lengths_.end(), int64_t(0));
  embed_tokens = register_module("embed_tokens", embedding(config.vocab_size, width));
  position = register_module("position", embedding(chunks, width));
  layers = register_module("layers", torch::nn::ModuleList());
  const AttentionOptions options{
      .head_dim = config.head_dim, .rope_theta = config.rope_theta, .causal = false};
  for (int64_t i = 0; i < *config.compressor_layers; ++i) {
    const Attention attention(width, width / *config.head_dim, options);
    layers->push_back(Block(attention.ptr(), width, *config.intermediate_size * width / config.hidden_size,
                            config.norm_eps));
  }
  norm = register_module("norm", RMSNorm(width, config.norm_eps));
  proj = register_module("proj", linear(columns * width, config.hidden_size));
}

Tensor CompressorImpl::forward(const Tensor& chunks, const Tensor& index) {
  const auto B = chunks.size(0), K = chunks.size(1), C = chunks.size(2);
  // An index of -1 belongs to a sequence in its first chunk; the result is discarded.
  const auto at = (index * (C / lengths_[0])).clamp(0, position->weight.size(0) - 1);
  const auto place = position(at).expand({B, K, -1});
  auto x = at::cat({place.unsqueeze(2), embed_tokens(chunks)}, 2).flatten(0, 1);
  for (size_t i = 0; i < layers->size(); ++i) x = layers->at<BlockImpl>(i).forward(x).first;
  x = norm(x).slice(1, 1).flatten(1);
  const auto length = std::ranges::find(lengths_, C);
  const auto before = std::accumulate(lengths_.begin(), length, int64_t(0)) * x.size(1) / C;
  return at::linear(x, proj->weight.slice(1, before, before + x.size(1))).unflatten(0, {B, K});
}

CatModelImpl::CatModelImpl(const Config& config)
    : lengths_(chunk_lengths(config)),
      chunk_(config.chunk),
      max_position_embeddings_(config.max_position_embeddings),
      initializer_range_(*config.initializer_range) {
  embed_tokens = register_module("embed_tokens", embedding(config.vocab_size, config.hidden_size));
  header =
      register_parameter("header", config.chunks ? at::empty({int64_t(lengths_.size()), config.hidden_size})
                                                 : at::empty({config.hidden_size}));
  no_weight_decay({header});
  compressor = register_module("compressor", Compressor(config));
  layers = register_module("layers", torch::nn::ModuleList());
  const auto options = options_from_config<ChunkAttentionOptions>(config);
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    const ChunkAttention attention(config.hidden_size, config.num_heads, options);
    layers->push_back(Block(attention.ptr(), config.hidden_size, *config.intermediate_size, config.norm_eps));
  }
  norm = register_module("norm", RMSNorm(config.hidden_size, config.norm_eps));
  reset_parameters();
}

void CatModelImpl::reset_parameters() { torch::nn::init::normal_(header, 0.0, initializer_range_); }

void CatModelImpl::set_chunk(int64_t chunk) {
  TORCH_CHECK_VALUE(std::ranges::count(lengths_, chunk) > 0, "chunk is ", chunk, "; expected one of ",
                    c10::Join(", ", lengths_),
                    ", which the model was made for (chunks in its configuration)");
  chunk_ = chunk;
}

void CatModelImpl::expect_state(const State& state, const Tensor& ids, const Tensor& /*cu_seqlens*/) const {
  check_state(state, 4, layers->size());
  if (state.empty()) return;
  const auto N = ids.size(0);
  const auto& chunk = state.tensors[0];
  TORCH_CHECK_VALUE(
      chunk.defined() && chunk.dim() == 2 && at::isIntegralType(chunk.scalar_type(), /*includeBool=*/false),
      "state: ids should be int64 or int32, [N, chunk]; pass the state that this model returned");
  check_batch(chunk, N);
  TORCH_CHECK_VALUE(std::ranges::count(lengths_, chunk.size(1)) > 0, "state: ids has chunks of ",
                    chunk.size(1), " tokens; expected one of ", c10::Join(", ", lengths_));
  check_state_tensor("header", state.tensors[1], {N, header.size(-1)});
  check_state_tensor("tokens", state.tensors[2], {N}, at::kLong);
  check_state_tensor("host_tokens", state.tensors[3], {N}, at::kLong);
  for (size_t i = 0; i < layers->size(); ++i) {
    TORCH_CHECK_VALUE(!state.parts[i].empty(), "state: the keys of layer ", i,
                      " are missing; pass the state that this model returned");
    dynamic_cast<const ChunkAttentionImpl&>(*layers->at<BlockImpl>(i).mixer)
        .expect_cache(state.parts[i], N, chunk.size(1));
  }
}

// State {ids, header, tokens, host_tokens} and {k, v} of each layer: tokens and header of the current chunk,
// lengths of the sequences on the device and on the host, keys and values of the chunk's rows and of all
// headers.
Output CatModelImpl::run(const Tensor& ids, const Call& call) {
  check_packing(ids, call.cu_seqlens);
  check_mask(ids, call.attention_mask);
  TORCH_CHECK_VALUE(!call.cu_seqlens.defined() || (!call.use_cache && call.state.empty()),
                    "cu_seqlens: CAT has no cache for packed sequences; call it with use_cache = false");
  const bool past = !call.state.empty();
  expect_state(call.state, ids);
  const auto& before = call.state.tensors;
  const auto C = past ? before[0].size(1) : chunk_, T = ids.size(1);
  std::vector<State> cache(layers->size());
  if (call.cu_seqlens.defined()) {
    const ChunkTable table(ids, C, call.cu_seqlens, /*room=*/1);
    const auto chunks = table.scatter(ids);
    const auto first = (table.index == 0).unsqueeze(-1);
    const auto x = rows_of(headers(chunks, first_header(C), table.index, first), chunks);
    const auto y = decode(x.flatten(1, 2), {.chunk = C}, cache, table.cu_chunks);
    return {table.gather(y.view_as(x), /*shift=*/1), {}};
  }
  const auto seq_lengths = past ? SequenceLengths{before[2], before[3]} : SequenceLengths();
  // Counts masked tokens too: the number of valid tokens is on the device.
  const auto max_tokens = T + (past ? seq_lengths.most() : 0);
  TORCH_CHECK_VALUE(max_tokens <= max_position_embeddings_, "input_ids has ", max_tokens,
                    " tokens; expected at most max_position_embeddings, ", max_position_embeddings_);
  if (past && !call.attention_mask.defined() && T == 1) {
    return step(ids,
                call.is_step(ids) ? call.state : call.state.map([](const Tensor& t) { return t.clone(); }));
  }
  // The incomplete chunk is read again from its start.
  const bool needs_cache = past || call.use_cache;
  const Continuation table(ids, C, call.attention_mask, seq_lengths, needs_cache);
  const auto chunks = table.scatter(ids, past ? before[0] : Tensor());
  const auto index = table.first_chunk.unsqueeze(-1) + at::arange(table.chunks, ids.options());
  const auto chunk_headers = headers(chunks, past ? before[1].unsqueeze(1) : first_header(C), index,
                                     (index == index.slice(1, 0, 1)).unsqueeze(-1));
  ChunkRows rows{.chunk = C};
  if (needs_cache) {
    rows.first = table.first_chunk * C;
    rows.end = table.seq_lengths.tokens + 1;
    rows.headers = table.chunks + (past ? seq_lengths.most() / C : 0);
  }
  if (past) cache = call.state.parts;
  const auto x = rows_of(chunk_headers, chunks);
  const auto y = table.gather(decode(x.flatten(1, 2), rows, cache).view_as(x), /*shift=*/1);
  if (!call.use_cache) return {y, {}};
  return {y,
          {{table.last(chunks), table.last(chunk_headers), table.seq_lengths.tokens,
            table.seq_lengths.host_tokens},
           cache}};
}

// One token [N, 1] of each sequence. The row that is read is the token, or, if the token completes a chunk,
// the header of the next chunk. Writes the state's tensors in place.
Output CatModelImpl::step(const Tensor& ids, const State& state) {
  auto chunk = state.tensors[0], cached_header = state.tensors[1];
  const SequenceLengths before{state.tensors[2], state.tensors[3]};
  const auto C = chunk.size(1);
  const auto& n = before.tokens;
  auto cache = state.parts;
  const auto room = (before.most() + 1) / C + 1;
  for (auto& part : cache) part = part.map([&](const Tensor& t) { return with_room(t, C, room); });
  chunk.index_put_({at::arange(ids.size(0), n.options()), n.remainder(C)}, ids.select(1, 0));
  n.add_(1);
  const SequenceLengths after{n, before.host_tokens + 1};
  auto x = embed_tokens(ids);
  if (const auto compressions = after.find_compressions(C)) {
    const auto& sequences = compressions->sequences;
    const auto index = (at::floor_divide(n.index_select(0, sequences), C) - 1).unsqueeze(-1);
    const auto next = compressor(chunk.index_select(0, sequences).unsqueeze(1), index);
    cached_header.index_put_({sequences},
                             compressions->select(next.select(1, 0), cached_header.index({sequences})));
    x = x.index_put({sequences}, compressions->select(next, x.index({sequences})));
  }
  const auto rows = dynamic_cast<const ChunkAttentionImpl&>(*layers->at<BlockImpl>(0).mixer)
                        .prepare_row(C, n, cache[0].tensors[0]);
  const auto y = decode(x, rows, cache);
  return {y, {{chunk, cached_header, n, after.host_tokens}, cache}};
}

bool CatModelImpl::stepped(State& state, std::vector<int64_t>& kind) const {
  check_state(state, 4, layers->size());
  const auto C = state.tensors[0].size(1);
  const SequenceLengths after{state.tensors[2], state.tensors[3] + 1};
  if (after.most() > max_position_embeddings_ || state.parts[0].tensors[0].size(1) < C + after.most() / C)
    return false;
  kind.insert(kind.end(), {after.count_compressions(C), int64_t(after.is_uniform())});
  state.tensors[3] = after.host_tokens;
  return true;
}

Tensor CatModelImpl::first_header(int64_t chunk) const {
  return header.dim() == 1 ? header : header[std::ranges::find(lengths_, chunk) - lengths_.begin()];
}

// chunks [B, K, C] with indices `index` [K] or [B, K] -> header of each chunk, [B, K, hidden_size]: `first`
// where `where` is true, else the compression of the preceding chunk. The last chunk is not compressed.
Tensor CatModelImpl::headers(const Tensor& chunks, const Tensor& first, const Tensor& index,
                             const Tensor& where) {
  const auto past = compressor(chunks.slice(1, 0, -1), index.slice(-1, 0, -1));
  return at::where(where, first.to(past.scalar_type()), at::constant_pad_nd(past, {0, 0, 1, 0}));
}

// headers [B, K, hidden_size] and chunks [B, K, C] -> rows of the decoder, [B, K, C, hidden_size]: the header
// and the first C - 1 tokens of each chunk.
Tensor CatModelImpl::rows_of(const Tensor& headers, const Tensor& chunks) {
  const auto tokens = embed_tokens(chunks.slice(2, 0, -1));
  return at::cat({headers.unsqueeze(2).to(tokens.scalar_type()), tokens}, 2);
}

// Applies the blocks and the norm to x [B, rows, hidden_size]; updates `kept`, the key-value cache of each
// layer.
Tensor CatModelImpl::decode(Tensor x, const ChunkRows& rows, std::vector<State>& cache,
                            const Tensor& cu_chunks) {
  for (size_t i = 0; i < layers->size(); ++i) {
    auto& block = layers->at<BlockImpl>(i);
    auto& attention = dynamic_cast<ChunkAttentionImpl&>(*block.mixer);
    x = block.around(x, [&](const Tensor& y, const RowInput& prologue, const Tensor& residual) {
      return attention.attend(y, rows, cache[i], cu_chunks, prologue, residual);
    });
  }
  return norm(x);
}

void check_cat_model(const Config& c) {
  const auto& chunk = get_operator("cat_attention").option("chunk");
  TORCH_CHECK_VALUE(c.chunk >= int64_t(chunk.least) && c.chunk <= int64_t(chunk.most), "chunk is ", c.chunk,
                    "; expected ", int64_t(chunk.least), " to ", int64_t(chunk.most), " for cat");
  if (c.chunks) {
    const auto& all = *c.chunks;
    bool fit = all[0] >= int64_t(chunk.least);
    for (size_t i = 1; i < all.size(); ++i) fit = fit && all[i] > all[i - 1] && all[i] % all[0] == 0;
    TORCH_CHECK_VALUE(fit && std::ranges::count(all, c.chunk) > 0, "chunks is [", c10::Join(", ", all),
                      "]; expected ascending multiples of the first, from ", int64_t(chunk.least),
                      " on, with chunk, ", c.chunk, ", among them");
  }
  check_even_head_dim(c);
  TORCH_CHECK_VALUE(*c.compressor_hidden_size % *c.head_dim == 0, "compressor_hidden_size is ",
                    *c.compressor_hidden_size, "; expected a multiple of head_dim ", *c.head_dim);
  // The compressor's intermediate_size is scaled by its width.
  const auto least = (c.hidden_size + *c.compressor_hidden_size - 1) / *c.compressor_hidden_size;
  TORCH_CHECK_VALUE(*c.intermediate_size >= least, "intermediate_size is ", *c.intermediate_size,
                    "; expected at least ", least, " for a compressor of ", *c.compressor_hidden_size,
                    " channels");
}

}  // namespace girih::nn
