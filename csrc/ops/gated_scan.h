// Linear attention with decays in chunk form: the single pass under gla and both passes of gsa.
#pragma once

#include "chunks.h"

namespace girih {

struct Scanned {
  Tensor o;      // [B, count, HQ, C, value width]
  Tensor state;  // [N, H, key width, value width]
};

// q [B, count, HQ, C, D], k [B, count, H, C, D], v [B, count, H, C, V] cut into chunks, S0 [N, H, D, V].
//   S_t = Diag(e^{g_t}) S_{t-1} + k_t v_t^T,    o_t = S_t^T q_t
// g: undefined (no decay), [B, count, H, C] (one for all channels) or [B, count, H, C, D] (one a key
// channel).
Scanned scan_key_decay(const Chunks& chunks, const Tensor& q, const Tensor& k, const Tensor& v,
                       const Tensor& g, const Tensor& S0);

//   S_t = S_{t-1} Diag(e^{g_t}) + k_t v_t^T,    o_t = S_t^T q_t
// g [B, count, H, C, V]: one a value channel.
Scanned scan_value_decay(const Chunks& chunks, const Tensor& q, const Tensor& k, const Tensor& v,
                         const Tensor& g, const Tensor& S0);

// The chunk length of an exact form: 64, or the power of two that holds T.
int64_t exact_chunk(int64_t T);

}  // namespace girih
