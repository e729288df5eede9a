// CAT as a layer: ChunkAttention and CompressAttend.
#include "chunks.h"
#include "fused.h"
#include "header_cache.h"
#include "mixers.h"

namespace girih::nn {
namespace {

// A cache grows by this many headers. Growth copies the cache, and a step reads all slots.
constexpr int64_t kRoom = 16;

// The cache after the rows of a call: the headers of all chunks, and the rows of the current chunk.
State update_cache(const Tensor& k, const Tensor& v, const ChunkRows& rows, const State& past) {
  const auto C = rows.chunk, N = k.size(0), T = k.size(1);
  const auto sequence = at::arange(N, rows.first.options()).unsqueeze(-1);
  const auto chunk =
      at::floor_divide(rows.first, C).unsqueeze(-1) + at::arange((T + C - 1) / C, sequence.options());
  // Rows of the current chunk after its header. A new chunk has none: indices are clamped.
  const auto own =
      ((at::floor_divide(rows.end, C) * C - rows.first).unsqueeze(-1) + at::arange(1, C, sequence.options()))
          .clamp_max(T - 1);
  State after;
  for (size_t i = 0; i < 2; ++i) {
    const auto& fresh = i == 0 ? k : v;
    auto slots = past.empty() ? fresh.new_zeros({N, C - 1 + (rows.headers + kRoom - 1) / kRoom * kRoom,
                                                 fresh.size(2), fresh.size(3)})
                              : with_room(past.tensors[i], C, rows.headers).clone();
    slots.index_put_({sequence, chunk + (C - 1)}, fresh.slice(1, 0, T, C));
    slots.slice(1, 0, C - 1).copy_(fresh.take_along_dim(broadcast_index(own, fresh), 1));
    after.tensors.push_back(slots);
  }
  return after;
}

}  // namespace

Tensor with_room(const Tensor& cache, int64_t chunk, int64_t headers) {
  const auto more = chunk - 1 + headers - cache.size(1);
  if (more <= 0) return cache;
  return at::constant_pad_nd(cache, {0, 0, 0, 0, 0, (more + kRoom - 1) / kRoom * kRoom});
}

ChunkAttentionImpl::ChunkAttentionImpl(int64_t hidden_size, int64_t num_heads, ChunkAttentionOptions settings)
    : options(completed("attention", hidden_size, num_heads, settings)), head_dim_(*options.head_dim) {
  const auto kv_heads = *options.num_kv_heads;
  heads_ = {num_heads, kv_heads, kv_heads};
  qkv_proj = register_module("qkv_proj", linear(hidden_size, (num_heads + 2 * kv_heads) * head_dim_));
  o_proj = register_module("o_proj", linear(num_heads * head_dim_, hidden_size));
}

void ChunkAttentionImpl::expect_cache(const State& cache, int64_t N, int64_t chunk) const {
  check_state(cache, 2, 0);
  if (cache.empty()) return;
  const auto &k = cache.tensors[0], &v = cache.tensors[1];
  TORCH_CHECK_VALUE(k.defined() && k.dim() == 4 && k.size(1) >= chunk, "state: k has shape ",
                    k.defined() ? k.sizes() : at::IntArrayRef(),
                    "; expected [N, slots, heads, head_dim] with ", chunk, " slots or more");
  check_state_tensor("k", k, {N, k.size(1), heads_[1], head_dim_});
  check_state_tensor("v", v, {N, k.size(1), heads_[2], head_dim_}, k.scalar_type());
}

Output ChunkAttentionImpl::run(const Tensor& x, const Call& call) {
  TORCH_CHECK_VALUE(!call.attention_mask.defined() && call.state.empty() && !call.use_cache,
                    "attention_mask, state, use_cache: rows of chunks have neither padding nor a state");
  Tensor cu_chunks;
  if (call.cu_seqlens.defined()) cu_chunks = at::floor_divide(call.cu_seqlens, options.chunk);
  State none;
  return {attend(x, {.chunk = options.chunk}, none, cu_chunks), {}};
}

Tensor ChunkAttentionImpl::attend(const Tensor& x, const ChunkRows& call_rows, State& cache,
                                  const Tensor& cu_chunks, const RowInput& prologue, const Tensor& residual) {
  const auto qkv = nn::products(x, {make_product(qkv_proj)}, prologue)[0].unflatten(-1, {-1, head_dim_});
  auto rows = call_rows;
  expect_cache(cache, x.size(0), rows.chunk);
  // The dtypes differ when only some calls run under autocast.
  for (auto& part : cache.tensors) part = part.to(qkv.scalar_type());
  if (rows.slot.defined() && rows.see.scalar_type() != qkv.scalar_type())
    rows = prepare_row(rows.chunk, rows.first, cache.tensors[0]);
  Tensor o;
  if (rows.slot.defined()) {
    o = step(qkv, rows, cache);
  } else {
    const bool is_start = cache.empty();
    const auto p = rotate_qk(qkv, rows, cu_chunks);
    if (rows.first.defined()) cache = update_cache(p[1], p[2], rows, cache);
    o = is_start ? ops::cat_attention(p[0], p[1], p[2], {.chunk = rows.chunk, .cu_chunks = cu_chunks})
                 : extend(p, rows, cache);
  }
  return nn::products(o.flatten(-2), {make_product(o_proj)}, {}, residual)[0];
}

std::vector<Tensor> ChunkAttentionImpl::project(const Tensor& x, const ChunkRows& rows) {
  return rotate_qk(qkv_proj(x).unflatten(-1, {-1, head_dim_}), rows, {});
}

// qkv [N, rows, sum of heads, D] -> q and k rotated to their positions, and v.
std::vector<Tensor> ChunkAttentionImpl::rotate_qk(const Tensor& qkv, const ChunkRows& rows,
                                                  const Tensor& cu_chunks) const {
  auto row = at::arange(qkv.size(1), qkv.options().dtype(at::kLong));
  if (rows.first.defined()) row = row + rows.first.unsqueeze(-1);
  Tensor first;
  if (cu_chunks.defined()) {
    const auto k = at::floor_divide(row, rows.chunk);
    first = cu_chunks.index_select(0, at::searchsorted(cu_chunks.slice(0, 1, -1), k, false, /*right=*/true));
  }
  const auto [q, k, v] = split_and_rotate(qkv, heads_, position(row, rows.chunk, first), options.rope_theta);
  return {q, k, v};
}

// Rotary position of a row. first: first chunk of the row's sequence.
Tensor ChunkAttentionImpl::position(const Tensor& row, int64_t chunk, const Tensor& first) const {
  const auto position = row.remainder(chunk);
  if (!options.running_positions) return position;
  const auto k = at::floor_divide(row, chunk);
  return position + (first.defined() ? k - first : k);
}

ChunkRows ChunkAttentionImpl::prepare_row(int64_t chunk, const Tensor& place, const Tensor& k) const {
  const auto own = at::floor_divide(place, chunk), j = place.remainder(chunk);
  const auto at = at::arange(k.size(1), place.options()), header = at - (chunk - 1);
  const auto is_visible = at::where(header < 0, at < j.unsqueeze(-1), header <= own.unsqueeze(-1));
  const auto see = at::zeros(is_visible.sizes(), k.options())
                       .masked_fill(is_visible.logical_not(), -std::numeric_limits<double>::infinity());
  const auto at_place = position(place, chunk).unsqueeze(-1).unsqueeze(-1);
  return {.chunk = chunk,
          .first = place,
          .slot = at::where(j == 0, own + (chunk - 1), j - 1),
          .see = see.unsqueeze(1).unsqueeze(1),
          .turn = rotary_factors(at_place, head_dim_, options.rope_theta, k.scalar_type())};
}

// Attention of one row to K + chunk slots. Its key and value are written first, because the row attends to
// itself.
Tensor ChunkAttentionImpl::step(const Tensor& qkv, const ChunkRows& rows, const State& cache) const {
  const auto [q, k, v] = rotate_row(qkv, heads_, rows.turn);
  const auto sequence = at::arange(qkv.size(0), rows.slot.options());
  auto past_k = cache.tensors[0], past_v = cache.tensors[1];
  past_k.index_put_({sequence, rows.slot}, k.select(1, 0));
  past_v.index_put_({sequence, rows.slot}, v.select(1, 0));
  return attend_row(q, past_k, past_v, rows.see);
}

// Attention of rows that continue cached sequences. A row attends to the rows of its chunk up to itself and
// to the K headers of earlier chunks in the cache: T (K + chunk) scores.
Tensor ChunkAttentionImpl::extend(const std::vector<Tensor>& qkv, const ChunkRows& rows,
                                  const State& cache) const {
  const auto C = rows.chunk, T = qkv[0].size(1), K = (T + C - 1) / C, H = heads_[1], G = heads_[0] / H;
  const auto split_chunks = [&](const Tensor& x) {
    return at::constant_pad_nd(x, {0, 0, 0, 0, 0, K * C - T}).unflatten(1, {K, C});
  };
  const auto q = split_chunks(qkv[0]).unflatten(3, {H, G}) * (1 / std::sqrt(double(head_dim_))),
             k = split_chunks(qkv[1]), v = split_chunks(qkv[2]), header_k = cache.tensors[0].slice(1, C - 1),
             header_v = cache.tensors[1].slice(1, C - 1);
  const double minus_infinity = -std::numeric_limits<double>::infinity();
  const auto row = at::arange(C, rows.first.options());
  const auto at = at::floor_divide(rows.first, C).unsqueeze(-1) + at::arange(K, row.options());
  const auto header = at::arange(header_k.size(1), row.options());
  // The header of a row's own chunk is one of the chunk's rows.
  const auto is_masked = (header >= at.unsqueeze(-1)).unsqueeze(1).unsqueeze(1).unsqueeze(4);
  const auto own = promote_to_fp32(at::einsum("nkchgd,nkehd->nhgkce", {q, k}))
                       .masked_fill(row > row.unsqueeze(-1), minus_infinity),
             past = promote_to_fp32(at::einsum("nkchgd,nshd->nhgkcs", {q, header_k}))
                        .masked_fill(is_masked, minus_infinity);
  const auto p = at::cat({own, past}, -1).softmax(-1).to(v.scalar_type());
  const auto o = at::einsum("nhgkce,nkehd->nkchgd", {p.slice(-1, 0, C), v}) +
                 at::einsum("nhgkcs,nshd->nkchgd", {p.slice(-1, C), header_v});
  return o.flatten(3, 4).flatten(1, 2).slice(1, 0, T);
}

CompressAttendImpl::CompressAttendImpl(int64_t hidden_size, int64_t num_heads, ChunkAttentionOptions settings)
    : options(completed("cat", hidden_size, num_heads, settings)) {
  header = register_parameter("header", at::empty({hidden_size}));
  no_weight_decay({header});
  compress = register_module("compress", linear(options.chunk * hidden_size, hidden_size));
  auto rows = options;
  rows.chunk += 1;
  attention = register_module("attention", ChunkAttention(hidden_size, num_heads, rows));
  reset_parameters();
}

void CompressAttendImpl::reset_parameters() { torch::nn::init::normal_(header); }

void CompressAttendImpl::expect_state(const State& state, const Tensor& x,
                                      const Tensor& /*cu_seqlens*/) const {
  check_state(state, 6, 0);
  if (state.empty()) return;
  const auto N = x.size(0);
  check_state_tensor("x", state.tensors[0], {N, options.chunk, x.size(2)});
  check_state_tensor("header", state.tensors[1], {N, x.size(2)});
  attention->expect_cache({{state.tensors[2], state.tensors[3]}}, N, options.chunk + 1);
  check_state_tensor("tokens", state.tensors[4], {N}, at::kLong);
  check_state_tensor("host_tokens", state.tensors[5], {N}, at::kLong);
}

// State {x, header, k, v, tokens, host_tokens}: inputs and header of the current chunk, keys and values of
// its tokens and of all headers, lengths of the sequences on the device and on the host.
Output CompressAttendImpl::run(const Tensor& x, const Call& call) {
  check_packing(x, call.cu_seqlens);
  check_mask(x, call.attention_mask);
  TORCH_CHECK_VALUE(!call.cu_seqlens.defined() || (!call.use_cache && call.state.empty()),
                    "cu_seqlens: CAT has no cache for packed sequences; call it with use_cache = false");
  const auto C = options.chunk;
  State cache;
  if (call.cu_seqlens.defined()) {
    const ChunkTable table(x, C, call.cu_seqlens);
    const auto tokens = table.scatter(x);
    return {table.gather(attend(headers(tokens, header, table.index == 0), tokens, {.chunk = C + 1}, cache,
                                table.cu_chunks)),
            {}};
  }
  const bool past = !call.state.empty();
  expect_state(call.state, x);
  if (past && !call.attention_mask.defined() && x.size(1) == 1) {
    return step(x, call.is_step(x) ? call.state : call.state.map([](const Tensor& t) { return t.clone(); }));
  }
  const auto& before = call.state.tensors;
  const auto seq_lengths = past ? SequenceLengths{before[4], before[5]} : SequenceLengths();
  const bool needs_cache = past || call.use_cache;
  const Continuation table(x, C, call.attention_mask, seq_lengths, needs_cache);
  const auto tokens = table.scatter(x, past ? before[0] : Tensor());
  const auto heads = headers(tokens, past ? before[1].unsqueeze(1) : header,
                             at::arange(table.chunks, table.first_chunk.options()) == 0);
  ChunkRows rows{.chunk = C + 1};
  if (needs_cache) {
    const auto& n = table.seq_lengths.tokens;
    rows.first = table.first_chunk * (C + 1);
    rows.end = at::floor_divide(n, C) * (C + 1) + n.remainder(C) + 1;
    // All rows of the table have slots, including rows after a sequence's last token.
    rows.headers = table.chunks + (past ? seq_lengths.most() / C : 0);
    if (past) cache = {{before[2], before[3]}};
  }
  auto y = table.gather(attend(heads, tokens, rows, cache, {}));
  // A masked token without a valid token before it has no defined row.
  if (call.attention_mask.defined())
    y = y.masked_fill(call.attention_mask.to(at::kBool).logical_not().unsqueeze(-1), 0);
  if (!call.use_cache) return {y, {}};
  return {y,
          {{table.last(tokens), table.last(heads), cache.tensors[0], cache.tensors[1],
            table.seq_lengths.tokens, table.seq_lengths.host_tokens}}};
}

// tokens [B, K, C, hidden_size] -> header of each chunk, [B, K, hidden_size]: `first` where `where` [K] is
// true, else the compression of the preceding chunk.
Tensor CompressAttendImpl::headers(const Tensor& tokens, const Tensor& first, const Tensor& where) {
  const auto all = at::constant_pad_nd(compress(tokens.slice(1, 0, -1).flatten(2)), {0, 0, 1, 0});
  return at::where(where.unsqueeze(-1), first.to(all.scalar_type()), all);
}

// headers [B, K, hidden_size] and tokens [B, K, C, hidden_size] -> outputs of the tokens,
// [B, K, C, hidden_size].
Tensor CompressAttendImpl::attend(const Tensor& headers, const Tensor& tokens, const ChunkRows& rows,
                                  State& cache, const Tensor& cu_chunks) {
  const auto all = at::cat({headers.unsqueeze(2), tokens}, 2);
  return attention->attend(all.flatten(1, 2), rows, cache, cu_chunks).view_as(all).slice(2, 1);
}

// One token x [N, 1, hidden_size] of each sequence; writes the state's tensors in place.
Output CompressAttendImpl::step(const Tensor& x, const State& state) {
  const auto C = options.chunk;
  auto inputs = state.tensors[0], header = state.tensors[1];
  const SequenceLengths before{state.tensors[4], state.tensors[5]};
  const auto& n = before.tokens;
  const auto room = (before.most() + 1) / C + 1;
  State cache{{with_room(state.tensors[2], C + 1, room), with_room(state.tensors[3], C + 1, room)}};
  const auto sequence = at::arange(x.size(0), n.options());
  inputs.index_put_({sequence, n.remainder(C)}, x.select(1, 0).to(inputs.scalar_type()));
  const auto place = at::floor_divide(n, C) * (C + 1) + n.remainder(C) + 1;
  n.add_(1);
  const SequenceLengths after{n, before.host_tokens + 1};
  if (const auto compressions = after.find_compressions(C)) {
    // The header of the next chunk. The current token does not attend to it.
    const auto& sequences = compressions->sequences;
    const auto next = compress(inputs.index_select(0, sequences).flatten(1));
    const auto k = at::floor_divide(n.index_select(0, sequences), C);
    header.index_put_({sequences}, compressions->select(next, header.index({sequences})));
    const auto qkv = attention->project(next.unsqueeze(1), {.chunk = C + 1, .first = k * (C + 1)});
    for (size_t i = 0; i < 2; ++i) {
      auto& slots = cache.tensors[i];
      slots.index_put_({sequences, k + C},
                       compressions->select(qkv[i + 1].select(1, 0), slots.index({sequences, k + C})));
    }
  }
  const auto y = attention->attend(x, attention->prepare_row(C + 1, place, cache.tensors[0]), cache);
  return {y, {{inputs, header, cache.tensors[0], cache.tensors[1], n, after.host_tokens}}};
}

bool CompressAttendImpl::stepped(State& state, std::vector<int64_t>& kind) const {
  check_state(state, 6, 0);
  const auto C = options.chunk;
  const SequenceLengths after{state.tensors[4], state.tensors[5] + 1};
  if (state.tensors[2].size(1) <= C + after.most() / C) return false;
  kind.insert(kind.end(), {after.count_compressions(C), int64_t(after.is_uniform())});
  state.tensors[5] = after.host_tokens;
  return true;
}

namespace {

const MixerRegistration cat({
    "cat",
    [](const Config& c) -> AnyLayer {
      return std::make_shared<CompressAttendImpl>(c.hidden_size, c.num_heads,
                                                  options_from_config<ChunkAttentionOptions>(c));
    },
    {"num_kv_heads", "head_dim", chunk_field("cat_attention", /*header=*/1), "rope_theta",
     "running_positions"},
    check_even_head_dim,
});

}  // namespace

}  // namespace girih::nn
