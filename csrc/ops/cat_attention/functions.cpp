// girih::ops::cat_attention.
#include "../registration/functions.h"

namespace girih::ops {

Tensor cat_attention(const Tensor& q, const Tensor& k, const Tensor& v, const CatAttentionOptions& options) {
  using Signature = Tensor(TensorArg, TensorArg, TensorArg, OptionalTensorArg, int64_t, OptionalFloatArg);
  static const auto op = find_operator<Signature>("girih::cat_attention");
  return op.call(q, k, v, to_optional(options.cu_chunks), options.chunk, options.scale);
}

}  // namespace girih::ops
