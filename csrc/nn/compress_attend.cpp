#include "chunks.h"

namespace girih::nn {

ChunkAttentionImpl::ChunkAttentionImpl(int64_t hidden_size, int64_t num_heads, ChunkAttentionOptions given)
    : options(std::move(given)), head_dim_(head_dim_of(hidden_size, num_heads, options.head_dim)) {
  const auto kv_heads = options.num_kv_heads.value_or(num_heads);
  heads_ = {num_heads, kv_heads, kv_heads};
  qkv_proj = register_module("qkv_proj", linear(hidden_size, (num_heads + 2 * kv_heads) * head_dim_));
  o_proj = register_module("o_proj", linear(num_heads * head_dim_, hidden_size));
}

Output ChunkAttentionImpl::run(const Tensor& x, const Call& call) {
  TORCH_CHECK_VALUE(!call.attention_mask.defined() && call.state.empty() && !call.use_cache,
                    "attention_mask, state, use_cache: rows of chunks have neither padding nor a state");
  Tensor cu_chunks;
  if (call.cu_seqlens.defined()) cu_chunks = at::floor_divide(call.cu_seqlens, options.chunk);
  const auto row = at::arange(x.size(1), x.options().dtype(at::kLong));
  auto position = row.remainder(options.chunk);
  if (options.running_positions) {
    auto k = at::floor_divide(row, options.chunk);
    if (cu_chunks.defined()) {
      const auto sequence = at::searchsorted(cu_chunks.slice(0, 1, -1), k, false, /*right=*/true);
      k = k - cu_chunks.index_select(0, sequence);
    }
    position = position + k;
  }
  const auto p = qkv_proj(x).unflatten(-1, {-1, head_dim_}).split_with_sizes(heads_, 2);
  const auto q = rotary(p[0], position, options.rope_theta), k = rotary(p[1], position, options.rope_theta);
  const auto o = ops::cat_attention(q, k, p[2], {.chunk = options.chunk, .cu_chunks = cu_chunks});
  return {o_proj(o.flatten(-2)), {}};
}

CompressAttendImpl::CompressAttendImpl(int64_t hidden_size, int64_t num_heads, ChunkAttentionOptions given)
    : options(std::move(given)) {
  header = register_parameter("header", at::empty({hidden_size}));
  no_weight_decay({header});
  compress = register_module("compress", linear(options.chunk * hidden_size, hidden_size));
  auto rows = options;
  rows.chunk += 1;
  attention = register_module("attention", ChunkAttention(hidden_size, num_heads, rows));
  reset_parameters();
}

void CompressAttendImpl::reset_parameters() { torch::nn::init::normal_(header); }

Output CompressAttendImpl::run(const Tensor& now, const Call& call) {
  check_packing(now, call.cu_seqlens);
  TORCH_CHECK_VALUE(!call.cu_seqlens.defined() || (!call.use_cache && call.state.empty()),
                    "cu_seqlens: CAT keeps no cache of packed sequences; call it with use_cache = false");
  const Extended all(now, call.attention_mask, call.state);
  const auto T = all.x.size(1), C = options.chunk;
  Tensor y;
  if (!all.valid.defined() && !call.cu_seqlens.defined()) {
    const auto K = (T + C - 1) / C;
    const auto tokens = at::constant_pad_nd(all.x, {0, 0, 0, K * C - T}).unflatten(1, {K, C});
    const auto first = at::arange(K, now.options().dtype(at::kLong)) == 0;
    y = attend(tokens, first, {}).flatten(1, 2).slice(1, 0, T);
  } else {
    const ChunkTable table(all.x, C, all.valid, call.cu_seqlens);
    y = table.gather(attend(table.spread(all.x), table.index == 0, table.cu_chunks));
  }
  return {y.slice(1, T - now.size(1)), all.state()};
}

// tokens [B, K, C, hidden_size] of sequences whose first chunks are marked in `first` [K].
Tensor CompressAttendImpl::attend(const Tensor& tokens, const Tensor& first, const Tensor& cu_chunks) {
  const auto before = at::constant_pad_nd(compress(tokens.flatten(2)), {0, 0, 1, 0}).slice(1, 0, -1);
  const auto headers = at::where(first.unsqueeze(-1), header.to(before.scalar_type()), before);
  const auto rows = at::cat({headers.unsqueeze(2), tokens}, 2);
  const auto cu_rows = cu_chunks.defined() ? cu_chunks * (options.chunk + 1) : Tensor();
  const auto y = attention(rows.flatten(1, 2), Tensor(), State(), false, cu_rows).first;
  return y.view_as(rows).slice(2, 1);
}

namespace {

const Registered cat({
    "cat",
    [](const Config& c) -> AnyLayer {
      return std::make_shared<CompressAttendImpl>(
          c.hidden_size, c.num_heads,
          ChunkAttentionOptions{.chunk = c.chunk,
                                .num_kv_heads = c.num_kv_heads,
                                .head_dim = c.head_dim,
                                .rope_theta = c.rope_theta,
                                .running_positions = c.running_positions});
    },
    {"num_kv_heads", "head_dim", chunk_of("cat_attention", /*header=*/1), "rope_theta", "running_positions"},
    expect_pairs,
});

}  // namespace

}  // namespace girih::nn
