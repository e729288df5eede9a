// The declarations of all operators: tensors with shapes, options with defaults, values and ranges, in the
// order data, state, packing, options. Schemas and checks are derived from them: see
// ops/registration/operator.h.
#include <torch/library.h>

#include "ops/registration/operator.h"

namespace girih {

const std::vector<Operator>& operators() {
  constexpr auto floating = TensorKind::floating, position = TensorKind::position, data = TensorKind::data;
  constexpr double unbounded = std::numeric_limits<double>::max(), max_chunk = 64;
  const std::vector<std::string> phi_names = {"identity", "silu",    "l2norm", "layer_norm",
                                              "l2_silu",  "ln_silu", "softmax"};
  static const std::vector<Operator> all = {
      Operator(
          {.name = "gsa",
           .data = {{"Tensor q", "[B, T, HQ, D]"},
                    {"Tensor k", "[B, T, H, D]"},
                    {"Tensor v", "[B, T, H, V]"},
                    {"Tensor? s", "[B, T, H, M]", floating},
                    {"Tensor? g", "[B, T, H, M]", floating}},
           .state = {{"Tensor k", "[N, H, D, M]"}, {"Tensor v", "[N, H, M, V]"}, {"Tensor? z", "[N, H, M]"}},
           .packing = "cu_seqlens",
           .options = {{"float? scale=None"},
                       {"str feature='softmax'", {"softmax", "none", "silu", "relu", "relu2"}}},
           .output = {"o", "[B, T, HQ, V]"},
           .saved = {{"states", "[chunks, H, rows, columns]"}}}),
      Operator({.name = "gla",
                .data = {{"Tensor q", "[B, T, HQ, D]"},
                         {"Tensor k", "[B, T, HK, D]"},
                         {"Tensor v", "[B, T, H, V]"},
                         {"Tensor? g", "[B, T, H] or [B, T, H, D]", floating}},
                .state = {{"Tensor s", "[N, H, D, V]"}},
                .packing = "cu_seqlens",
                .options = {{"float? scale=None"}},
                .output = {"o", "[B, T, HO, V]"},
                .saved = {{"states", "[chunks, H, rows, columns]"}}}),
      Operator({.name = "delta_product",
                .data = {{"Tensor q", "[B, T, HQ, D]"},
                         {"Tensor k", "[B, T * n, HK, D]"},
                         {"Tensor v", "[B, T * n, H, V]"},
                         {"Tensor beta", "[B, T * n, H] or [B, T * n, H, D]", floating},
                         {"Tensor? g", "[B, T, H]", floating}},
                .state = {{"Tensor s", "[N, H, D, V]"}, {"Tensor? position", "[N]", position}},
                .packing = "cu_seqlens",
                .options = {{"int n", {}, 1},
                            {"float? scale=None"},
                            {"bool l2norm_qk=False"},
                            {"int? chunk=None", {}, 1, max_chunk},
                            {"str? between_chunks=None", {"gelu", "tanh"}}},
                .output = {"o", "[B, T, HO, V]"},
                .saved = {{"states", "[chunks, H, V, D]"},
                          {"prepared", "[chunks, H, bytes] or [B, T * n, H, V]"},
                          {"transitions", "[segments, H, D, D]"}}}),
      Operator({.name = "trellis",
                .data = {{"Tensor q", "[B, T, HQ, D]"},
                         {"Tensor k", "[B, T, H, D]"},
                         {"Tensor v", "[B, T, H, V]"},
                         {"Tensor a", "[B, T, H, M]"},
                         {"Tensor gamma", "[B, T, H]", floating},
                         {"Tensor? g", "[B, T, H]", floating}},
                .state = {{"Tensor first_k", "[N, H, M, D]"},
                          {"Tensor k", "[N, H, M, D]"},
                          {"Tensor first_v", "[N, H, M, V]"},
                          {"Tensor v", "[N, H, M, V]"},
                          {"Tensor position", "[N]", position}},
                .packing = "cu_seqlens",
                .options = {{"int chunk", {}, 1, max_chunk},
                            {"str phi='ln_silu'", phi_names},
                            {"str f='ln_silu'", phi_names}},
                .output = {"o", "[B, T, HQ, V]"},
                .saved = {{"memories_k", "[chunks, HQ, tile, tile]"},
                          {"memories_v", "[chunks, HQ, tile, tile]"},
                          {"z", "[2, B, T, HQ, M]"},
                          {"u", "[2, B, T, HQ, M]"},
                          // Statistics of the rows of z, by which backward computes phi again. The fp32
                          // kernels save none, and s = -gamma u as u.
                          {"fit", "[2, B, T, HQ, 4]"}}}),
      Operator({.name = "ttt",
                .data = {{"Tensor q", "[B, T, HQ, D]"},
                         {"Tensor k", "[B, T, H, D]"},
                         {"Tensor a", "[B, T, H, M]"},
                         {"Tensor gamma", "[B, T, H]", floating},
                         {"Tensor? g", "[B, T, H]", floating},
                         {"Tensor? phi_weight", "[H, M]", floating}},
                .state = {{"Tensor first_k", "[N, H, M, D]"},
                          {"Tensor k", "[N, H, M, D]"},
                          {"Tensor position", "[N]", position}},
                .packing = "cu_seqlens",
                .options = {{"int chunk", {}, 1, max_chunk},
                            {"str phi='layer_norm'", phi_names},
                            {"str f='identity'", phi_names}},
                .output = {"o", "[B, T, HQ, M]"},
                .saved = {{"memories_k", "[chunks, HQ, tile, tile]"},
                          {"z", "[1, B, T, HQ, M]"},
                          {"u", "[1, B, T, HQ, M]"},
                          {"fit", "[1, B, T, HQ, 4 or 8]"}}}),  // 8 with phi_weight
      Operator({.name = "lattice",
                .data = {{"Tensor q", "[B, T, HQ, M]"},
                         {"Tensor k", "[B, T, H, M]"},
                         {"Tensor v", "[B, T, H, D]"},
                         {"Tensor gamma", "[B, T, H]", floating},
                         {"Tensor? g", "[B, T, H]", floating}},
                .state = {{"Tensor first", "[N, H, D, M]"},
                          {"Tensor step", "[N, H, D, M]"},
                          {"Tensor? decay", "[N, H]"},
                          {"Tensor position", "[N]", position}},
                .packing = "cu_seqlens",
                .options = {{"int chunk", {}, 1, max_chunk},
                            {"str objective='decode'", {"decode", "encode", "similarity"}},
                            {"bool normalize=True"},
                            {"float shrinkage=0.", {}, 0, unbounded}},
                .output = {"o", "[B, T, HQ, D]"},
                .saved = {{"memories", "[chunks, H, M, D]"},
                          // two numbers per column at the end of every chunk
                          {"ends", "[chunks, H, 2, M]"},
                          {"last", "[N, H, D, M]"},
                          {"last_step", "[N, H, D, M]"}}}),
      Operator({.name = "short_conv",
                .data = {{"Tensor x", "[B, T, channels]"},
                         {"Tensor weight", "[channels, W]", floating},
                         {"Tensor? bias", "[channels]", floating}},
                .state = {{"Tensor x", "[N, W - 1, channels]", data}},
                .packing = "cu_seqlens",
                .options = {{"str? activation=None", {"silu"}}},
                .limits = {{"W", 1, 4}},
                .output = {"y", "[B, T, channels]"}}),
      Operator({.name = "gated_rms_norm",
                .data = {{"Tensor x", "[..., dim]"},
                         {"Tensor weight", "[dim]", floating},
                         {"Tensor? gate", "[..., dim]"}},
                .options = {{"str activation='silu'", {"silu", "gelu", "sigmoid"}},
                            {"float eps=1e-06", {}, 0, unbounded}},
                .output = {"y", "[..., dim]"}}),
      Operator({.name = "cat_attention",
                .data = {{"Tensor q", "[B, T, HQ, D]"},
                         {"Tensor k", "[B, T, H, D]"},
                         {"Tensor v", "[B, T, H, V]"}},
                .packing = "cu_chunks",
                .options = {{"int chunk", {}, 2, 256}, {"float? scale=None"}},
                .output = {"o", "[B, T, HQ, V]"},
                // The output is saved under its own name: backward computes do . o.
                .saved = {{"lse", "[B, T, HQ]"}, {"o", "[B, T, HQ, V]"}}}),
  };
  return all;
}

TORCH_LIBRARY(girih, m) {
  m.def("describe() -> str", &operators_json);
  for (const auto& op : operators()) {
    m.def(op.schema().c_str());
    m.def(op.forward_schema().c_str());
    m.def(op.backward_schema().c_str());
    m.def(op.explain_schema().c_str());
    if (op.state_count() > 0) m.def(op.step_schema().c_str());
  }
}

}  // namespace girih
