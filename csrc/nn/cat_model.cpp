#include <girih/language_model.h>

#include "../ops/operator.h"
#include "chunks.h"
#include "mixers.h"

namespace girih::nn {

CompressorImpl::CompressorImpl(const Config& config) {
  const auto width = *config.compressor_hidden_size,
             chunks = (config.max_position_embeddings + config.chunk - 1) / config.chunk;
  embed_tokens = register_module("embed_tokens", torch::nn::Embedding(config.vocab_size, width));
  position = register_module("position", torch::nn::Embedding(chunks, width));
  layers = register_module("layers", torch::nn::ModuleList());
  const AttentionOptions options{
      .head_dim = config.head_dim, .rope_theta = config.rope_theta, .causal = false};
  for (int64_t i = 0; i < *config.compressor_layers; ++i) {
    const Attention attention(width, width / *config.head_dim, options);
    layers->push_back(Block(attention.ptr(), width, *config.intermediate_size * width / config.hidden_size,
                            config.norm_eps));
  }
  norm = register_module("norm", RMSNorm(width, config.norm_eps));
  proj = register_module("proj", linear(config.chunk * width, config.hidden_size));
}

Tensor CompressorImpl::forward(const Tensor& chunks, const Tensor& index) {
  const auto B = chunks.size(0), K = chunks.size(1);
  const auto place = position(index.clamp_max(position->weight.size(0) - 1)).expand({B, K, -1});
  auto x = at::cat({place.unsqueeze(2), embed_tokens(chunks)}, 2).flatten(0, 1);
  for (size_t i = 0; i < layers->size(); ++i) x = layers->at<BlockImpl>(i).forward(x).first;
  return proj(norm(x).slice(1, 1).flatten(1)).unflatten(0, {B, K});
}

CatModelImpl::CatModelImpl(const Config& config)
    : chunk_(config.chunk),
      max_position_embeddings_(config.max_position_embeddings),
      initializer_range_(*config.initializer_range) {
  embed_tokens = register_module("embed_tokens", torch::nn::Embedding(config.vocab_size, config.hidden_size));
  header = register_parameter("header", at::empty({config.hidden_size}));
  no_weight_decay({header});
  compressor = register_module("compressor", Compressor(config));
  layers = register_module("layers", torch::nn::ModuleList());
  const ChunkAttentionOptions options{.chunk = config.chunk,
                                      .num_kv_heads = config.num_kv_heads,
                                      .head_dim = config.head_dim,
                                      .rope_theta = config.rope_theta,
                                      .running_positions = config.running_positions};
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    const ChunkAttention attention(config.hidden_size, config.num_heads, options);
    layers->push_back(Block(attention.ptr(), config.hidden_size, *config.intermediate_size, config.norm_eps));
  }
  norm = register_module("norm", RMSNorm(config.hidden_size, config.norm_eps));
  reset_parameters();
}

void CatModelImpl::reset_parameters() { torch::nn::init::normal_(header, 0.0, initializer_range_); }

Output CatModelImpl::run(const Tensor& now, const Call& call) {
  check_packing(now, call.cu_seqlens);
  TORCH_CHECK_VALUE(!call.cu_seqlens.defined() || (!call.use_cache && call.state.empty()),
                    "cu_seqlens: CAT keeps no cache of packed sequences; call it with use_cache = false");
  const Extended all(now, call.attention_mask, call.state);
  const auto T = all.x.size(1), C = chunk_;
  // Masked tokens count here: how many are valid is not known without a wait, nor are packed lengths.
  TORCH_CHECK_VALUE(call.cu_seqlens.defined() || T <= max_position_embeddings_, "input_ids has ", T,
                    " tokens; expected at most max_position_embeddings, ", max_position_embeddings_);
  Tensor y;
  if (!all.valid.defined() && !call.cu_seqlens.defined()) {
    const auto K = T / C + 1;
    const auto chunks = at::constant_pad_nd(all.x, {0, K * C - T}).unflatten(1, {K, C});
    y = decode(chunks, at::arange(K, now.options()), {}).flatten(1, 2).slice(1, 1, T + 1);
  } else {
    const ChunkTable table(all.x, C, all.valid, call.cu_seqlens, /*room=*/1);
    y = table.gather(decode(table.spread(all.x), table.index, table.cu_chunks * C), /*shift=*/1);
  }
  return {y.slice(1, T - now.size(1)), all.state()};
}

// chunks [B, K, C] at the places `index` [K] -> the rows [B, K, C, hidden_size]. The last chunk is nobody's
// past, so it is not compressed.
Tensor CatModelImpl::decode(const Tensor& chunks, const Tensor& index, const Tensor& cu_rows) {
  const auto past = compressor(chunks.slice(1, 0, -1), index.slice(0, 0, -1));
  const auto headers = at::where((index == 0).unsqueeze(-1), header.to(past.scalar_type()),
                                 at::constant_pad_nd(past, {0, 0, 1, 0}));
  const auto tokens = embed_tokens(chunks.slice(2, 0, -1));
  const auto rows = at::cat({headers.unsqueeze(2).to(tokens.scalar_type()), tokens}, 2);
  auto x = rows.flatten(1, 2);
  for (size_t i = 0; i < layers->size(); ++i)
    x = layers->at<BlockImpl>(i).forward(x, Tensor(), State(), false, cu_rows).first;
  return norm(x).view_as(rows);
}

void check_cat_model(const Config& c) {
  const auto& chunk = describe("cat_attention").option("chunk");
  TORCH_CHECK_VALUE(c.chunk >= int64_t(chunk.least) && c.chunk <= int64_t(chunk.most), "chunk is ", c.chunk,
                    "; expected ", int64_t(chunk.least), " to ", int64_t(chunk.most), " for cat");
  expect_pairs(c);
  TORCH_CHECK_VALUE(*c.compressor_hidden_size % *c.head_dim == 0, "compressor_hidden_size is ",
                    *c.compressor_hidden_size, "; expected a multiple of head_dim ", *c.head_dim);
  // The compressor's is as much smaller as its width.
  const auto least = (c.hidden_size + *c.compressor_hidden_size - 1) / *c.compressor_hidden_size;
  TORCH_CHECK_VALUE(*c.intermediate_size >= least, "intermediate_size is ", *c.intermediate_size,
                    "; expected at least ", least, " for a compressor of ", *c.compressor_hidden_size,
                    " channels");
}

}  // namespace girih::nn
