// girih::ops::cat_attention.
#include "../registration/functions.h"

namespace girih::ops {

Tensor cat_attention(const Tensor& q, const Tensor& k, const Tensor& v, const CatAttentionOptions& options) {
  using Signature = Tensor(Required, Required, Required, Maybe, int64_t, Number);
  static const auto op = find<Signature>("girih::cat_attention");
  return op.call(q, k, v, none_if_absent(options.cu_chunks), options.chunk, options.scale);
}

}  // namespace girih::ops
