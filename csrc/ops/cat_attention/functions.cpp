// girih::ops::cat_attention.
#include "../registration/functions.h"

#include "problem.h"

namespace girih::ops {

Tensor cat_attention(const Tensor& q, const Tensor& k, const Tensor& v, const CatAttentionOptions& options) {
  static const auto op = find_typed_operator<Signature<cat_attention::Call, Tensor>>("girih::cat_attention");
  return op.call(q, k, v, to_optional(options.cu_chunks), options.chunk, options.scale);
}

}  // namespace girih::ops
