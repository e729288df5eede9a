// girih::ops::delta_product and girih::ops::delta_product_step.
#include "../registration/functions.h"

namespace girih::ops {
namespace {

// n from the rows of k if it is absent; 1 without tokens.
int64_t steps_per_token(const Tensor& q, const Tensor& k, Integer n) {
  if (n) return *n;
  const auto tokens = q.dim() > 1 ? q.size(1) : 0, rows = k.dim() > 1 ? k.size(1) : 0;
  if (tokens == 0) return 1;
  GIRIH_CHECK(rows > 0 && rows % tokens == 0, "delta_product: k has ", rows,
              " rows but should have T * n, a multiple of q's T = ", tokens);
  return rows / tokens;
}

}  // namespace

DeltaProductState DeltaProductState::start(int64_t batch, int64_t heads, int64_t D, int64_t V,
                                           bool between_chunks, const at::TensorOptions& options) {
  return {at::zeros({batch, heads, D, V}, options),
          between_chunks ? at::zeros({batch}, options.dtype(at::kLong)) : Tensor()};
}

std::pair<Tensor, DeltaProductState> delta_product(const Tensor& q, const Tensor& k, const Tensor& v,
                                                   const Tensor& beta, const Tensor& g,
                                                   const DeltaProductOptions& options) {
  using Signature =
      std::tuple<Tensor, Tensor, OptionalTensor>(Required, Required, Required, Required, Maybe, Maybe, Maybe,
                                                 Maybe, int64_t, Number, bool, Integer, MaybeWord);
  static const auto op = find<Signature>("girih::delta_product");
  auto [o, s, position] = op.call(q, k, v, beta, none_if_absent(g), none_if_absent(options.state.s),
                                  none_if_absent(options.state.position), none_if_absent(options.cu_seqlens),
                                  steps_per_token(q, k, options.n), options.scale, options.l2norm_qk,
                                  options.chunk, view(options.between_chunks));
  return {o, {s, position.value_or(Tensor())}};
}

Tensor delta_product_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                          const Tensor& g, const DeltaProductOptions& options) {
  using Signature = Tensor(Required, Required, Required, Required, Maybe, Required, Maybe, int64_t, Number,
                           bool, Integer, MaybeWord);
  static const auto op = find<Signature>("girih::delta_product_step");
  refuse_start("delta_product", options.state.s, options.cu_seqlens);
  return op.call(q, k, v, beta, none_if_absent(g), options.state.s, none_if_absent(options.state.position),
                 steps_per_token(q, k, options.n), options.scale, options.l2norm_qk, options.chunk,
                 view(options.between_chunks));
}

}  // namespace girih::ops
