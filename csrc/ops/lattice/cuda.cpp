// CUDA implementation of lattice, and of its step. Tensor cores: 16-bit elements and unit columns. fp32
// kernels: the other calls. float64 and wide memories: the ATen form.
#include "../arguments/chunk_grid.h"
#include "fp32.h"
#include "lattice/lattice.h"

namespace girih::lattice {
namespace {

static_assert(kMaxWidth == kernels::kLatticeMaxWidth && kChunkTokens == kernels::kLatticeSegment);

// The tensors of one call as the kernels read them: rows aligned to 16 bytes, states zero-padded to the same
// widths.
struct Arguments {
  Tensor q, k, v, gamma, g, cu_seqlens, position, memory, step, decay;
  kernels::LatticeShape shape;
  int64_t D, M;  // widths without padding

  explicit Arguments(const Call& call)
      : q(align_rows(call.q)),
        k(align_rows(call.k)),
        v(align_rows(call.v)),
        gamma(call.gamma),
        g(call.g.value_or(Tensor())),
        cu_seqlens(contiguous_or_undefined(call.cu_seqlens)),
        position(contiguous_or_undefined(call.state_position)),
        D(call.v.size(3)),
        M(call.k.size(3)) {
    shape.heads = static_cast<int>(k.size(2)), shape.query_heads = static_cast<int>(q.size(2));
    shape.D = static_cast<int>(v.size(3)), shape.M = static_cast<int>(k.size(3));
    shape.dtype = kernel_dtype(q);
    shape.objective = parse_objective(call.objective);
    memory = pad_state(call.state_first, false, shape.D, shape.M);
    if (position.defined()) {
      step = pad_state(call.state_step, false, shape.D, shape.M);
      if (g.defined()) decay = *call.state_decay;
    }
    shape.grid = make_chunk_grid(q, cu_seqlens, position, call.chunk);
  }

  kernels::LatticeInputs inputs() const {
    return {shape,
            input<4>(q),
            input<4>(k),
            input<4>(v),
            input<3>(gamma),
            input<3>(g),
            {input<4>(memory), input<4>(step), input<2>(decay)}};
  }
  int64_t sequences() const { return shape.grid.tokens.sequences; }
  Tensor new_rows(int64_t heads, int64_t width, at::ScalarType type) const {
    return girih::new_rows(q, q.size(1), cu_seqlens, heads, width, type);
  }
  Tensor new_token_scalars() const { return new_rows(shape.heads, 1, at::kFloat).squeeze(3); }
  Tensor new_state() const {
    return at::empty({sequences(), shape.heads, shape.D, shape.M}, q.options().dtype(at::kFloat));
  }
  Tensor new_sequence_scalars() const {
    return at::empty({sequences(), shape.heads}, q.options().dtype(at::kFloat));
  }
  Tensor new_memories() const {
    return at::empty({kernels::chunk_count(shape.grid), shape.heads, shape.M, shape.D}, q.options());
  }
};

// The saved tensors are sized by the problem alone, so a device with too little shared memory takes the ATen
// form.
Path choose_path(const Problem& problem, const Call& call) {
  const auto path = problem.path(call);
  const auto fits = [&] {
    bool fits = false;
    if (path == Path::Code::fp32) {
      GIRIH_QUERY(lattice_fp32_fits, fp32_shape(call), fits);
      return fits;
    }
    kernels::LatticeShape shape{};
    shape.D = static_cast<int>(call.v.size(3)), shape.M = static_cast<int>(call.q.size(3));
    // lattice_fits tests whether position is null and does not read it.
    shape.grid.size = static_cast<int>(call.chunk);
    shape.grid.position =
        is_defined(call.state_position) ? call.state_position->const_data_ptr<int64_t>() : nullptr;
    GIRIH_QUERY(lattice_fits, shape, fits);
    return fits;
  };
  return restrict_path(path, problem.N, call.q.device(), fits, &aten);
}

Results forward_cuda(const Call& call, bool save) {
  const auto problem = Problem::check(call);
  const c10::cuda::CUDAGuard device(call.q.device());
  const auto path = choose_path(problem, call);
  if (path == Path::Code::aten) return WithoutTF32<&forward>::call(call, save);
  if (path == Path::Code::fp32) return Fp32Call(call).forward(problem.saved(call, save), save);
  const Arguments args(call);
  const auto last = args.new_state(), last_step = args.new_state();
  const auto new_empty = [&] { return at::empty({0}, last.options()); };
  const auto memories = save ? args.new_memories() : at::empty({0}, call.q.options());
  const auto ends =
      save ? at::empty({memories.size(0), args.shape.heads, 2, args.shape.M}, last.options()) : new_empty();
  const auto decay = args.g.defined() ? args.new_sequence_scalars() : Tensor();
  const auto position = at::empty({args.sequences()}, call.q.options().dtype(at::kLong));
  const auto o = args.new_rows(args.shape.query_heads, args.shape.D, call.q.scalar_type());
  kernels::LatticeForward p{};
  p.inputs = args.inputs();
  p.end = {output<4>(last), output<4>(last_step), output<2>(decay)};
  p.last_position = position.mutable_data_ptr<int64_t>();
  if (save) p.memories = memories.mutable_data_ptr(), p.ends = ends.mutable_data_ptr<float>();
  p.o = output<4>(o);
  GIRIH_RUN(lattice_forward, p, call.q);

  // The returned states may be overwritten by a step, so saved states are copied.
  const auto clone_if_saved = [&](const Tensor& state) {
    return save ? crop_state(state, args.D, args.M).clone() : crop_state(state, args.D, args.M);
  };
  return {crop_width(o, args.D),
          clone_if_saved(last),
          clone_if_saved(last_step),
          args.g.defined() ? OptionalTensor(decay) : std::nullopt,
          position,
          memories,
          ends,
          save ? last : new_empty(),
          save ? last_step : new_empty()};
}

std::optional<Gradients> backward_cuda(const Call& call, const OutputGradients& grads,
                                       const SavedTensors& saved) {
  const auto problem = Problem::check(call);
  const c10::cuda::CUDAGuard device(call.q.device());
  const auto path = choose_path(problem, call);
  if (path == Path::Code::aten) return std::nullopt;
  const auto shapes = problem.saved(call, true);
  const auto& [memories, ends, last, last_step] = saved;
  check_saved_tensor("lattice", "memories", memories, shapes.memories, shapes.memories_type);
  check_saved_tensor("lattice", "ends", ends, shapes.ends, at::kFloat);
  check_saved_tensor("lattice", "last", last, shapes.last, at::kFloat);
  check_saved_tensor("lattice", "last_step", last_step, shapes.last, at::kFloat);
  if (path == Path::Code::fp32) return Fp32Call(call).backward(grads, memories);
  const Arguments args(call);
  const auto& shape = args.shape;
  const bool has_gates = args.g.defined(), has_position = args.position.defined();
  const auto type = call.q.scalar_type();
  const auto dout = align_output_gradient(grads.o, call.q, shape.query_heads, shape.D, type);
  const auto dlast = pad_state(grads.first, false, shape.D, shape.M),
             dlast_step = pad_state(grads.step, false, shape.D, shape.M);

  const auto dq = args.new_rows(shape.query_heads, shape.M, type),
             dk = args.new_rows(shape.heads, shape.M, type), dv = args.new_rows(shape.heads, shape.D, type),
             dgamma = args.new_token_scalars(), dg = has_gates ? args.new_token_scalars() : Tensor();
  const auto dmemory = args.new_state(), dstep = has_position ? args.new_state() : Tensor(),
             ddecay = has_position && has_gates ? args.new_sequence_scalars() : Tensor();
  kernels::LatticeBackward p{};
  p.inputs = args.inputs();
  p.memories = memories.const_data_ptr(), p.ends = ends.const_data_ptr<float>();
  p.last = input<4>(last), p.last_step = input<4>(last_step);
  p.dout = input<4>(dout);
  p.dlast = input<4>(dlast), p.dlast_step = input<4>(dlast_step), p.dlast_decay = input<2>(grads.decay);
  p.dq = output<4>(dq), p.dk = output<4>(dk), p.dv = output<4>(dv);
  p.dgamma = output<3>(dgamma), p.dg = output<3>(dg);
  p.dmemory = output<4>(dmemory), p.dstep = output<4>(dstep), p.ddecay = output<2>(ddecay);
  GIRIH_RUN(lattice_backward, p, call.q);

  return Gradients{
      crop_width(dq, args.M),
      crop_width(dk, args.M),
      crop_width(dv, args.D),
      dgamma.to(call.gamma.scalar_type()),
      if_defined(call.g, [&] { return dg.to(call.g->scalar_type()); }),
      crop_state(dmemory, args.D, args.M),
      has_position ? OptionalTensor(crop_state(dstep, args.D, args.M)) : zero_gradient(call.state_step),
      has_position && has_gates ? OptionalTensor(ddecay) : zero_gradient(call.state_decay),
      std::nullopt,
      std::nullopt};
}

std::optional<Tensor> step_cuda(const Call& call) {
  Problem::check(call);
  if (Problem::step_path(call) == Path::Code::aten) return std::nullopt;
  const c10::cuda::CUDAGuard device(call.q.device());
  const auto token = [](const Tensor& x) { return x.select(1, 0); };
  const auto o = at::empty({call.q.size(0), 1, call.q.size(2), call.v.size(3)}, call.q.options());
  const auto position = call.state_position->contiguous(), next = at::empty_like(position);
  kernels::LatticeStep p;
  p.sequences = call.q.size(0);
  p.heads = static_cast<int>(call.k.size(2)), p.query_heads = static_cast<int>(call.q.size(2));
  p.D = static_cast<int>(call.v.size(3)), p.M = static_cast<int>(call.k.size(3)),
  p.chunk = static_cast<int>(call.chunk);
  p.objective = parse_objective(call.objective);
  p.q = input<3>(token(call.q)), p.k = input<3>(token(call.k)), p.v = input<3>(token(call.v));
  p.gamma = input<2>(token(call.gamma));
  if (is_defined(call.g)) p.g = input<2>(token(*call.g));
  p.memory = output<4>(*call.state_first);
  p.position = nullptr, p.next_position = nullptr;
  if (call.chunk > 1) {
    p.step = output<4>(*call.state_step);
    if (is_defined(call.g)) p.decay = output<2>(*call.state_decay);
    p.position = position.const_data_ptr<int64_t>(), p.next_position = next.mutable_data_ptr<int64_t>();
  }
  p.o = output<3>(token(o));
  GIRIH_LAUNCH(lattice_step, p);
  if (call.chunk > 1) call.state_position->copy_(next);
  return o;
}

}  // namespace

TORCH_LIBRARY_IMPL(girih, CUDA, m) {
  register_explain<Call, Problem, &choose_path>(m);
  register_forward<&forward_cuda>(m);
  register_backward<&backward_cuda>(m);
  register_step<&step_cuda>(m);
}

}  // namespace girih::lattice
