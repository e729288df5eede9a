// Gated linear attention in chunk form.
//   S_t = Diag(e^{g_t}) S_{t-1} + k_t v_t^T        [D, V]
//   o_t = scale * S_t^T q_t
#include "../arguments/shared_heads.h"
#include "../gated/gated_scan.h"
#include "aten.h"

namespace girih::gla {

Results forward(const Call& call, bool save) {
  const auto problem = Problem::check(call);
  const auto B = call.q.size(0), T = call.q.size(1), H = call.v.size(2), D = call.q.size(3),
             V = call.v.size(3);
  const auto type = accumulate_type(call.q);
  const Chunks chunks(call.q, B, T, choose_chunk_length(T), call.cu_seqlens);
  const auto S0 = is_defined(call.state_s)
                      ? *call.state_s
                      : at::zeros({chunks.sequences(), H, D, V}, call.q.options().dtype(type));
  const auto q_ = chunks.split(repeat_heads(call.q, H), type) * call.query_scale();
  const auto k_ = chunks.split(repeat_heads(call.k, H), type), v_ = chunks.split(call.v, type);
  const auto g_ = is_defined(call.g) ? chunks.split(*call.g, type) : Tensor();
  const auto read = call.has_channel_gates() ? scan_key_decay(chunks, q_, k_, v_, ChannelDecay(g_), S0)
                                             : scan_head_decay(chunks, q_, k_, v_, g_, S0);
  return {chunks.join(read.o, call.q.scalar_type()), read.state,
          new_saved(problem.saved(call, save), call.q.options())};
}

GIRIH_IMPL_ATEN(m) { register_forward<&WithoutTF32<&forward>::call>(m); }

}  // namespace girih::gla
