// Gated linear attention in chunk form.
//   S_t = Diag(e^{g_t}) S_{t-1} + k_t v_t^T        [D, V]
//   o_t = scale * S_t^T q_t
#include "../arguments/shared_heads.h"
#include "../gated/gated_scan.h"
#include "../registration/dispatch.h"
#include "aten.h"
#include "problem.h"

namespace girih::gla {

Results forward(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& g,
                const OptionalTensor& state_s, const OptionalTensor& cu_seqlens, std::optional<double> scale,
                bool save) {
  const auto p = Problem::check(q, k, v, g, state_s, cu_seqlens, scale);
  const auto B = q.size(0), T = q.size(1), H = v.size(2), D = q.size(3), V = v.size(3);
  const auto type = accumulate_type(q);
  const Chunks chunks(q, B, T, exact_chunk(T), cu_seqlens);
  const auto S0 =
      given(state_s) ? *state_s : at::zeros({chunks.sequences(), H, D, V}, q.options().dtype(type));
  const auto q_ = chunks.split(for_each_head(q, H), type) * scale.value_or(1 / std::sqrt(double(D)));
  const auto k_ = chunks.split(for_each_head(k, H), type), v_ = chunks.split(v, type);
  const auto g_ = given(g) ? chunks.split(*g, type) : Tensor();
  const auto read = by_channel(g) ? scan_key_decay(chunks, q_, k_, v_, ChannelDecay(g_), S0)
                                  : scan_head_decay(chunks, q_, k_, v_, g_, S0);
  return {chunks.join(read.o, q.scalar_type()), read.state,
          at::empty(C10_AS_INTARRAYREF_SLOW_ALLOC(p.saved(q, g, cu_seqlens, save)), q.options())};
}

TORCH_LIBRARY_IMPL(girih, CPU, m) { m.impl("gla_forward", &forward); }
#ifndef GIRIH_WITH_CUDA  // with it, cuda.cpp serves CUDA tensors
TORCH_LIBRARY_IMPL(girih, CUDA, m) { m.impl("gla_forward", TORCH_FN(InFullPrecision<&forward>::call)); }
#endif

}  // namespace girih::gla
