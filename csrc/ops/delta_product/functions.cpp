// girih::ops::delta_product and girih::ops::delta_product_step.
#include "../registration/functions.h"

#include "problem.h"

namespace girih::ops {
namespace {

// The option n, or if it is absent the rows of k per token of q; 1 without tokens.
int64_t steps_per_token(const Tensor& q, const Tensor& k, OptionalIntArg n) {
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
  using Result = std::tuple<Tensor, Tensor, OptionalTensor>;
  static const auto op = find_typed_operator<Signature<delta_product::Call, Result>>("girih::delta_product");
  auto [o, s, position] = op.call(q, k, v, beta, to_optional(g), to_optional(options.state.s),
                                  to_optional(options.state.position), to_optional(options.cu_seqlens),
                                  steps_per_token(q, k, options.n), options.scale, options.l2norm_qk,
                                  options.chunk, to_string_view(options.between_chunks));
  return {o, {s, position.value_or(Tensor())}};
}

Tensor delta_product_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                          const Tensor& g, const DeltaProductOptions& options) {
  static const auto op = find_typed_operator<StepSignature<delta_product::Call>>("girih::delta_product_step");
  check_step_state("delta_product", options.state.s, options.cu_seqlens);
  return op.call(q, k, v, beta, to_optional(g), options.state.s, to_optional(options.state.position),
                 steps_per_token(q, k, options.n), options.scale, options.l2norm_qk, options.chunk,
                 to_string_view(options.between_chunks));
}

}  // namespace girih::ops
