// Every operator's signature. Data first, then state, then packing, then options.
#include <torch/library.h>

#include "ops/operator.h"

namespace girih {

const std::vector<Operator>& operators() {
  static const std::vector<Operator> all = {
      {.name = "gsa",
       .data = {"Tensor q", "Tensor k", "Tensor v", "Tensor? s", "Tensor? g"},
       .state = {"Tensor k", "Tensor v", "Tensor? z"},
       .packing = "cu_seqlens",
       .options = {"float? scale=None", "str feature='softmax'"},
       .saved = {"Tensor states"},
       .low = {"q", "k", "v"}},
      {.name = "gla",
       .data = {"Tensor q", "Tensor k", "Tensor v", "Tensor? g"},
       .state = {"Tensor s"},
       .packing = "cu_seqlens",
       .options = {"float? scale=None"},
       .saved = {"Tensor states"},
       .low = {"q", "k", "v"}},
      {.name = "delta_product",
       .data = {"Tensor q", "Tensor k", "Tensor v", "Tensor beta", "Tensor? g"},
       .state = {"Tensor s", "Tensor? position"},
       .packing = "cu_seqlens",
       .options = {"int n", "float? scale=None", "bool l2norm_qk=False", "int? chunk=None",
                   "str? between_chunks=None"},
       .saved = {"Tensor states", "Tensor prepared"},
       .low = {"q", "k", "v"}},
      {.name = "trellis",
       .data = {"Tensor q", "Tensor k", "Tensor v", "Tensor a", "Tensor gamma", "Tensor? g"},
       .state = {"Tensor first_k", "Tensor k", "Tensor first_v", "Tensor v", "Tensor position"},
       .packing = "cu_seqlens",
       .options = {"int chunk", "str phi='ln_silu'", "str f='ln_silu'"},
       .low = {"q", "k", "v", "a"}},
      {.name = "lattice",
       .data = {"Tensor q", "Tensor k", "Tensor v", "Tensor gamma", "Tensor? g"},
       .state = {"Tensor first", "Tensor step", "Tensor? decay", "Tensor position"},
       .packing = "cu_seqlens",
       .options = {"int chunk", "str objective='decode'", "bool normalize=True", "float shrinkage=0."},
       .low = {"q", "k", "v"}},
      {.name = "short_conv",
       .data = {"Tensor x", "Tensor weight", "Tensor? bias"},
       .state = {"Tensor x"},
       .packing = "cu_seqlens",
       .options = {"str? activation=None"},
       .output = "y",
       .low = {"x", "state_x"}},
      {.name = "gated_rms_norm",
       .data = {"Tensor x", "Tensor weight", "Tensor? gate"},
       .options = {"str activation='silu'", "float eps=1e-06"},
       .output = "y",
       .low = {"x", "gate"}},
      {.name = "cat_attention",
       .data = {"Tensor q", "Tensor k", "Tensor v"},
       .packing = "cu_chunks",
       .options = {"int chunk", "float? scale=None"},
       .saved = {"Tensor lse"},
       .low = {"q", "k", "v"}},
  };
  return all;
}

TORCH_LIBRARY(girih, m) {
  for (const auto& op : operators()) {
    m.def(op.schema().c_str());
    m.def(op.forward_schema().c_str());
    m.def(op.backward_schema().c_str());
    if (!op.state.empty()) m.def(op.step_schema().c_str());
  }
}

}  // namespace girih
