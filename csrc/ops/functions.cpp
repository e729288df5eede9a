// girih/ops.h: typed calls of the registered operators. An undefined tensor becomes None and back.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <girih/ops.h>

#include "check.h"

namespace girih::ops {
namespace {

// The registered operator `name` with its C++ signature. Keep the result in a static: the look-up takes a
// lock.
template <class Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

using Required = const Tensor&;
using Maybe = const OptionalTensor&;
using Number = std::optional<double>;
using Integer = std::optional<int64_t>;
using Word = std::string_view;
using MaybeWord = std::optional<Word>;

OptionalTensor none_if_absent(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

MaybeWord view(const std::optional<std::string>& word) { return word ? MaybeWord(*word) : std::nullopt; }

// A step writes a state's tensors, so it needs some, and one token for each of its sequences.
void refuse_start(const char* name, const Tensor& state, const Tensor& cu_seqlens) {
  GIRIH_CHECK(state.defined(), name,
              "_step: state is absent but its tensors are written in place; "
              "for a first token make it with start()");
  GIRIH_CHECK(!cu_seqlens.defined(), name,
              "_step: cu_seqlens is given but one token a sequence is not packed");
}

// One first memory [H, ...] for each of N sequences; one that has N in front as it is.
OptionalTensor for_each_sequence(const Tensor& memory, const Tensor& x, const Tensor& cu_seqlens) {
  if (!memory.defined() || memory.dim() != 3) return none_if_absent(memory);
  const auto N = cu_seqlens.defined() && cu_seqlens.dim() == 1 ? cu_seqlens.size(0) - 1 : x.size(0);
  return memory.expand({N, -1, -1, -1});
}

// The same in tensors of its own.
Tensor own(const Tensor& memory, int64_t batch) {
  return memory.detach().expand({batch, -1, -1, -1}).clone(at::MemoryFormat::Contiguous);
}

// n of delta_product, from the rows of k when it is not given; without tokens it is 1.
int64_t steps_per_token(const Tensor& q, const Tensor& k, Integer n) {
  if (n) return *n;
  const auto tokens = q.dim() > 1 ? q.size(1) : 0, rows = k.dim() > 1 ? k.size(1) : 0;
  if (tokens == 0) return 1;
  GIRIH_CHECK(rows > 0 && rows % tokens == 0, "delta_product: k has ", rows,
              " rows but should have T * n, a multiple of q's T = ", tokens);
  return rows / tokens;
}

}  // namespace

GSAState GSAState::start(int64_t batch, int64_t heads, int64_t D, int64_t V, int64_t M, bool abc,
                         const at::TensorOptions& options) {
  return {at::zeros({batch, heads, D, M}, options), at::zeros({batch, heads, M, V}, options),
          abc ? at::full({batch, heads, M}, -INFINITY, options) : Tensor()};
}

std::pair<Tensor, GSAState> gsa(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& s,
                                const Tensor& g, const GSAOptions& options) {
  using Signature = std::tuple<Tensor, Tensor, Tensor, OptionalTensor>(
      Required, Required, Required, Maybe, Maybe, Maybe, Maybe, Maybe, Maybe, Number, Word);
  static const auto op = find<Signature>("girih::gsa");
  const auto& past = options.state;
  auto [o, state_k, state_v, state_z] =
      op.call(q, k, v, none_if_absent(s), none_if_absent(g), none_if_absent(past.k), none_if_absent(past.v),
              none_if_absent(past.z), none_if_absent(options.cu_seqlens), options.scale, options.feature);
  return {o, {state_k, state_v, state_z.value_or(Tensor())}};
}

Tensor gsa_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& s, const Tensor& g,
                const GSAOptions& options) {
  using Signature =
      Tensor(Required, Required, Required, Maybe, Maybe, Required, Required, Maybe, Number, Word);
  static const auto op = find<Signature>("girih::gsa_step");
  const auto& state = options.state;
  refuse_start("gsa", state.k, options.cu_seqlens);
  return op.call(q, k, v, none_if_absent(s), none_if_absent(g), state.k, state.v, none_if_absent(state.z),
                 options.scale, options.feature);
}

GLAState GLAState::start(int64_t batch, int64_t heads, int64_t D, int64_t V,
                         const at::TensorOptions& options) {
  return {at::zeros({batch, heads, D, V}, options)};
}

std::pair<Tensor, GLAState> gla(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                                const GLAOptions& options) {
  using Signature = std::tuple<Tensor, Tensor>(Required, Required, Required, Maybe, Maybe, Maybe, Number);
  static const auto op = find<Signature>("girih::gla");
  auto [o, s] = op.call(q, k, v, none_if_absent(g), none_if_absent(options.state.s),
                        none_if_absent(options.cu_seqlens), options.scale);
  return {o, {s}};
}

Tensor gla_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                const GLAOptions& options) {
  using Signature = Tensor(Required, Required, Required, Maybe, Required, Number);
  static const auto op = find<Signature>("girih::gla_step");
  refuse_start("gla", options.state.s, options.cu_seqlens);
  return op.call(q, k, v, none_if_absent(g), options.state.s, options.scale);
}

DeltaProductState DeltaProductState::start(int64_t batch, int64_t heads, int64_t D, int64_t V,
                                           bool between_chunks, const at::TensorOptions& options) {
  return {at::zeros({batch, heads, D, V}, options),
          between_chunks ? at::zeros({batch}, options.dtype(at::kLong)) : Tensor()};
}

std::pair<Tensor, DeltaProductState> delta_product(const Tensor& q, const Tensor& k, const Tensor& v,
                                                   const Tensor& beta, const Tensor& g,
                                                   const DeltaProductOptions& options) {
  using Signature =
      std::tuple<Tensor, Tensor, OptionalTensor>(Required, Required, Required, Required, Maybe, Maybe, Maybe,
                                                 Maybe, int64_t, Number, bool, Integer, MaybeWord);
  static const auto op = find<Signature>("girih::delta_product");
  auto [o, s, position] = op.call(q, k, v, beta, none_if_absent(g), none_if_absent(options.state.s),
                                  none_if_absent(options.state.position), none_if_absent(options.cu_seqlens),
                                  steps_per_token(q, k, options.n), options.scale, options.l2norm_qk,
                                  options.chunk, view(options.between_chunks));
  return {o, {s, position.value_or(Tensor())}};
}

Tensor delta_product_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
                          const Tensor& g, const DeltaProductOptions& options) {
  using Signature = Tensor(Required, Required, Required, Required, Maybe, Required, Maybe, int64_t, Number,
                           bool, Integer, MaybeWord);
  static const auto op = find<Signature>("girih::delta_product_step");
  refuse_start("delta_product", options.state.s, options.cu_seqlens);
  return op.call(q, k, v, beta, none_if_absent(g), options.state.s, none_if_absent(options.state.position),
                 steps_per_token(q, k, options.n), options.scale, options.l2norm_qk, options.chunk,
                 view(options.between_chunks));
}

TrellisState TrellisState::start(int64_t batch, const Tensor& k, const Tensor& v) {
  return {own(k, batch), own(k, batch), own(v, batch), own(v, batch),
          at::zeros({batch}, k.options().dtype(at::kLong))};
}

std::pair<Tensor, TrellisState> trellis(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a,
                                        const Tensor& gamma, const Tensor& g, const TrellisOptions& options) {
  using Signature = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>(
      Required, Required, Required, Required, Required, Maybe, Maybe, Maybe, Maybe, Maybe, Maybe, Maybe,
      int64_t, Word, Word);
  static const auto op = find<Signature>("girih::trellis");
  const auto& past = options.state;
  auto [o, first_k, memory_k, first_v, memory_v, position] =
      op.call(q, k, v, a, gamma, none_if_absent(g), none_if_absent(past.first_k),
              for_each_sequence(past.k, q, options.cu_seqlens), none_if_absent(past.first_v),
              for_each_sequence(past.v, q, options.cu_seqlens), none_if_absent(past.position),
              none_if_absent(options.cu_seqlens), options.chunk, options.phi, options.f);
  return {o, {first_k, memory_k, first_v, memory_v, position}};
}

Tensor trellis_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a, const Tensor& gamma,
                    const Tensor& g, const TrellisOptions& options) {
  using Signature = Tensor(Required, Required, Required, Required, Required, Maybe, Required, Required,
                           Required, Required, Required, int64_t, Word, Word);
  static const auto op = find<Signature>("girih::trellis_step");
  const auto& state = options.state;
  refuse_start("trellis", state.position, options.cu_seqlens);
  return op.call(q, k, v, a, gamma, none_if_absent(g), state.first_k, state.k, state.first_v, state.v,
                 state.position, options.chunk, options.phi, options.f);
}

LatticeState LatticeState::start(int64_t batch, const Tensor& first, bool gated) {
  const auto memory = own(first, batch);
  return {memory, at::zeros_like(memory),
          gated ? at::zeros({batch, memory.size(1)}, memory.options()) : Tensor(),
          at::zeros({batch}, memory.options().dtype(at::kLong))};
}

std::pair<Tensor, LatticeState> lattice(const Tensor& q, const Tensor& k, const Tensor& v,
                                        const Tensor& gamma, const Tensor& g, const LatticeOptions& options) {
  using Signature = std::tuple<Tensor, Tensor, Tensor, OptionalTensor, Tensor>(
      Required, Required, Required, Required, Maybe, Maybe, Maybe, Maybe, Maybe, Maybe, int64_t, Word, bool,
      double);
  static const auto op = find<Signature>("girih::lattice");
  const auto& past = options.state;
  auto [o, first, step, decay, position] =
      op.call(q, k, v, gamma, none_if_absent(g), for_each_sequence(past.first, q, options.cu_seqlens),
              none_if_absent(past.step), none_if_absent(past.decay), none_if_absent(past.position),
              none_if_absent(options.cu_seqlens), options.chunk, options.objective, options.normalize,
              options.shrinkage);
  return {o, {first, step, decay.value_or(Tensor()), position}};
}

Tensor lattice_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& gamma, const Tensor& g,
                    const LatticeOptions& options) {
  using Signature = Tensor(Required, Required, Required, Required, Maybe, Required, Required, Maybe, Required,
                           int64_t, Word, bool, double);
  static const auto op = find<Signature>("girih::lattice_step");
  const auto& state = options.state;
  refuse_start("lattice", state.position, options.cu_seqlens);
  return op.call(q, k, v, gamma, none_if_absent(g), state.first, state.step, none_if_absent(state.decay),
                 state.position, options.chunk, options.objective, options.normalize, options.shrinkage);
}

ShortConvState ShortConvState::start(int64_t batch, int64_t channels, int64_t W,
                                     const at::TensorOptions& options) {
  return {at::zeros({batch, W - 1, channels}, options)};
}

std::pair<Tensor, ShortConvState> short_conv(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                             const ShortConvOptions& options) {
  using Signature = std::tuple<Tensor, Tensor>(Required, Required, Maybe, Maybe, Maybe, MaybeWord);
  static const auto op = find<Signature>("girih::short_conv");
  auto [y, state_x] = op.call(x, weight, none_if_absent(bias), none_if_absent(options.state.x),
                              none_if_absent(options.cu_seqlens), view(options.activation));
  return {y, {state_x}};
}

Tensor short_conv_step(const Tensor& x, const Tensor& weight, const Tensor& bias,
                       const ShortConvOptions& options) {
  using Signature = Tensor(Required, Required, Maybe, Required, MaybeWord);
  static const auto op = find<Signature>("girih::short_conv_step");
  refuse_start("short_conv", options.state.x, options.cu_seqlens);
  return op.call(x, weight, none_if_absent(bias), options.state.x, view(options.activation));
}

Tensor gated_rms_norm(const Tensor& x, const Tensor& weight, const Tensor& gate,
                      const GatedRMSNormOptions& options) {
  using Signature = Tensor(Required, Required, Maybe, Word, double);
  static const auto op = find<Signature>("girih::gated_rms_norm");
  return op.call(x, weight, none_if_absent(gate), options.activation, options.eps);
}

Tensor cat_attention(const Tensor& q, const Tensor& k, const Tensor& v, const CatAttentionOptions& options) {
  using Signature = Tensor(Required, Required, Required, Maybe, int64_t, Number);
  static const auto op = find<Signature>("girih::cat_attention");
  return op.call(q, k, v, none_if_absent(options.cu_chunks), options.chunk, options.scale);
}

}  // namespace girih::ops
