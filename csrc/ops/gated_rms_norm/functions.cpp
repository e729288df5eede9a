// girih::ops::gated_rms_norm.
#include "../registration/functions.h"

namespace girih::ops {

Tensor gated_rms_norm(const Tensor& x, const Tensor& weight, const Tensor& gate,
                      const GatedRMSNormOptions& options) {
  using Signature = Tensor(Required, Required, Maybe, Word, double);
  static const auto op = find<Signature>("girih::gated_rms_norm");
  return op.call(x, weight, none_if_absent(gate), options.activation, options.eps);
}

}  // namespace girih::ops
