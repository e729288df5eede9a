// girih::ops::gated_rms_norm.
#include "../registration/functions.h"

namespace girih::ops {

Tensor gated_rms_norm(const Tensor& x, const Tensor& weight, const Tensor& gate,
                      const GatedRMSNormOptions& options) {
  using Signature = Tensor(TensorArg, TensorArg, OptionalTensorArg, StringArg, double);
  static const auto op = find_typed_operator<Signature>("girih::gated_rms_norm");
  return op.call(x, weight, to_optional(gate), options.activation, options.eps);
}

}  // namespace girih::ops
