#pragma once

#include "../chunks.h"

namespace girih::gsa {

// ABC's slot weights and gates from its logits: with d_t = s_t - z_{t-1},
//   z_t = logaddexp(z_{t-1}, s_t)      g_t = z_{t-1} - z_t = logsigmoid(-d_t)      s_t <- e^{s_t - z_t} =
//   sigmoid(d_t)
// An empty z (a fresh start, or masked tokens only) has g = 0, a masked token (logit -inf) g = s = 0.
struct Abc {
  Tensor s, g, z;
};

// logits [B, count, H, C, M] cut into chunks, z0 [N, H, M].
Abc normalise(const Chunks& chunks, const Tensor& logits, const Tensor& z0);

}  // namespace girih::gsa
