// Linear attention with decays in chunk form, by ATen: the scan of gla, and both scans of gsa (keys, values).
#pragma once

#include "../chunks/chunks.h"

namespace girih {

// Decays per channel within a chunk. A common factor e^{-L} for all rows overflows. The block size h
// therefore doubles from 1 to C / 2, and the reference of a pair of blocks is the boundary between them:
// every exponent is a sum of gates, <= 0. Both scans of gsa share one object.
struct ChannelDecay {
  struct Level {
    int64_t h;
    Tensor upper_decay;  // [..., C / 2h, h, X]   e^{sum of g from the boundary through each upper row}
    Tensor lower_decay;  // [..., C / 2h, h, X]   e^{sum of g after each lower row up to the boundary}
  };
  std::vector<Level> levels;
  Tensor to;           // [..., C, X]   e^{L_t}
  Tensor after;        // [..., C, X]   e^{L_C - L_t}
  Tensor chunk_decay;  // [..., X]      e^{L_C}

  explicit ChannelDecay(const Tensor& g);  // [..., C, X]
};

struct ScanResult {
  Tensor o;      // [B, count, HQ, C, V]
  Tensor state;  // [N, H, D, V]
};

// Shapes of the scans: q [B, count, HQ, C, D], k [B, count, H, C, D], v [B, count, H, C, V], S0 [N, H, D, V].

//   S_t = e^{g_t} S_{t-1} + k_t v_t^T,    o_t = S_t^T q_t
// g [B, count, H, C], or undefined: no decay.
ScanResult scan_head_decay(const Chunks& chunks, const Tensor& q, const Tensor& k, const Tensor& v,
                           const Tensor& g, const Tensor& S0);

//   S_t = Diag(e^{g_t}) S_{t-1} + k_t v_t^T,    o_t = S_t^T q_t        decays of [B, count, H, C, D]
ScanResult scan_key_decay(const Chunks& chunks, const Tensor& q, const Tensor& k, const Tensor& v,
                          const ChannelDecay& decay, const Tensor& S0);

//   S_t = S_{t-1} Diag(e^{g_t}) + k_t v_t^T,    o_t = S_t^T q_t        decays of [B, count, H, C, V]
ScanResult scan_value_decay(const Chunks& chunks, const Tensor& q, const Tensor& k, const Tensor& v,
                            const ChannelDecay& decay, const Tensor& S0);

// The chunk length of an operator whose result does not depend on it: 64, or the smallest power of two that
// is at least T.
int64_t choose_chunk_length(int64_t T);

}  // namespace girih
