"""The delta rules, with the signatures of `fla.ops.delta_rule`, `fla.ops.gated_delta_rule` and
`fla.ops.gated_delta_product`."""

from typing import Any, NamedTuple

from torch import Tensor

from girih import ops
from girih.fla.arguments import (
    check_dims,
    check_word,
    final_state,
    first_state,
    outside_autocast,
    read_options,
    refuse,
    sequences,
    show,
    value_first,
)
from girih.nn.functional.gates import apply_gate

CHUNK_SIZES = (16, 32, 64)  # those of fla; the result does not depend on them


@outside_autocast
def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule by :func:`girih.ops.delta_product`.

    Shapes: q and k ``[B, T, H, K]``, v ``[B, T, H, V]``, beta ``[B, T, H]``; state ``[N, H, K, V]``. fp32 is
    accepted too, which fla refuses.
    """
    function = "chunk_delta_rule"
    options = read_options(function, kwargs, chunk_size=64)
    check_word(function, "chunk_size", options["chunk_size"], CHUNK_SIZES)
    state = (initial_state, output_final_state, False, cu_seqlens)
    return _delta_rule(function, q, k, v, beta, None, scale, use_qk_l2norm_in_kernel, *state)


@outside_autocast
def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As :func:`chunk_delta_rule`; ``beta=None`` is 1. A beta for each channel of the values raises
    ValueError."""
    beta = ones_per_head(v) if beta is None else beta
    state = (initial_state, output_final_state, False, cu_seqlens)
    return _delta_rule(
        "fused_recurrent_delta_rule", q, k, v, beta, None, scale, use_qk_l2norm_in_kernel, *state
    )


@outside_autocast
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule by :func:`girih.ops.delta_product`.

    Shapes: q and k ``[B, T, H, K]``, v ``[B, T, HV, V]`` with HV a multiple of H, g and beta ``[B, T, HV]``;
    state ``[N, HV, K, V]``, or ``[N, HV, V, K]`` with ``state_v_first``; o ``[B, T, HV, V]``.

    ``use_beta_sigmoid_in_kernel``: beta are logits, and the step sizes are their sigmoid, doubled with
    ``allow_neg_eigval``. Options by keyword: ``use_gate_in_kernel`` with ``A_log`` and ``dt_bias``, both
    ``[HV]``: the gates are ``-exp(A_log) softplus(g + dt_bias)``; ``chunk_size``, 16, 32 or 64, has no effect
    on the result. A ``cp_context`` raises ValueError.
    """
    function = "chunk_gated_delta_rule"
    refuse(function, cp_context=cp_context)
    is_value_first, gates = gated_options(
        function, state_v_first, use_beta_sigmoid_in_kernel, allow_neg_eigval, kwargs
    )
    state = (initial_state, output_final_state, is_value_first, cu_seqlens)
    return _delta_rule(function, q, k, v, beta, g, scale, use_qk_l2norm_in_kernel, *state, gates=gates)


@outside_autocast
def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """As :func:`chunk_gated_delta_rule`; ``beta=None`` is 1. ``gk``, ``gv`` and a beta for each channel of
    the values raise ValueError."""
    function = "fused_recurrent_gated_delta_rule"
    refuse(function, gk=gk, gv=gv)
    kwargs = {**kwargs, "use_gate_in_kernel": use_gate_in_kernel, "A_log": A_log, "dt_bias": dt_bias}
    is_value_first, gates = gated_options(
        function, state_v_first, use_beta_sigmoid_in_kernel, allow_neg_eigval, kwargs
    )
    beta = ones_per_head(v) if beta is None else beta
    state = (initial_state, output_final_state, is_value_first, cu_seqlens)
    return _delta_rule(function, q, k, v, beta, g, scale, use_qk_l2norm_in_kernel, *state, gates=gates)


@outside_autocast
def chunk_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    num_householder: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """``num_householder`` delta-rule updates for each token, by :func:`girih.ops.delta_product`.

    Shapes: q ``[B, T, H, K]``; k ``[B, T * num_householder, H, K]``, v ``[B, T * num_householder, H, V]`` and
    beta ``[B, T * num_householder, H]``, token by token; g ``[B, T, H]`` or None; state ``[N, H, K, V]``.
    cu_seqlens counts tokens. A ``cp_context`` raises ValueError.
    """
    function = "chunk_gated_delta_product"
    refuse(function, cp_context=cp_context)
    state = (initial_state, output_final_state, False, cu_seqlens)
    inputs = (q, k, v, beta, g, scale, use_qk_l2norm_in_kernel)
    return _delta_rule(function, *inputs, *state, n=num_householder)


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule


class Gates(NamedTuple):
    """How gates and step sizes come from their arguments."""

    use_decay: bool = False  # g -> -exp(A_log) softplus(g + dt_bias)
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    beta_scale: float | None = None  # beta -> beta_scale sigmoid(beta)

    def activate(self, function: str, beta: Tensor, g: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if self.beta_scale is not None:
            beta = apply_gate(beta, "sigmoid", scale=self.beta_scale)
        if self.use_decay:
            self.check_parameters(function, g)
            g = apply_gate(g, "decay", self.dt_bias, self.A_log)
        return beta, g

    def check_parameters(self, function: str, g: Tensor | None) -> None:
        if g is None:
            raise ValueError(
                f"girih.fla.{function}: g is None but should be a tensor with use_gate_in_kernel"
            )
        for name, x in (("A_log", self.A_log), ("dt_bias", self.dt_bias)):
            is_vector = isinstance(x, Tensor) and x.shape == g.shape[2:]
            if not is_vector and not (name == "dt_bias" and x is None):
                raise ValueError(
                    f"girih.fla.{function}: {name} is {show(x)} but should be [HV] = {list(g.shape[2:])}"
                )


AS_GIVEN = Gates()


def gated_options(
    function: str,
    state_v_first: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    kwargs: dict[str, Any],
) -> tuple[bool, Gates]:
    """Whether states are [V, K], and the gates. A_log and dt_bias are read with use_gate_in_kernel only, as
    in fla."""
    sizes = {"chunk_size": 64} if function.startswith("chunk") else {}
    options = read_options(
        function,
        kwargs,
        **sizes,
        use_gate_in_kernel=False,
        A_log=None,
        dt_bias=None,
        transpose_state_layout=None,
    )
    if sizes:
        check_word(function, "chunk_size", options["chunk_size"], CHUNK_SIZES)
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(
            f"girih.fla.{function}: allow_neg_eigval is True but should be False without "
            "use_beta_sigmoid_in_kernel"
        )
    beta_scale = (2.0 if allow_neg_eigval else 1.0) if use_beta_sigmoid_in_kernel else None
    gates = Gates(options["use_gate_in_kernel"], options["A_log"], options["dt_bias"], beta_scale)
    return value_first(function, state_v_first, options["transpose_state_layout"]), gates


def check_gates(function: str, beta: Tensor, g: Tensor | None) -> None:
    """Raises ValueError unless both are per head. A fourth dimension of delta_product's beta means key
    channels, of fla's beta channels of the values."""
    check_dims(function, "beta", beta, "[B, T, H]")
    check_dims(function, "g", g, "[B, T, H]")


def ones_per_head(v: Tensor) -> Tensor:
    return v.new_ones(v.shape[:3])


def _delta_rule(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    scale: float | None,
    l2norm_qk: bool,
    initial_state: Tensor | None,
    output_final_state: bool,
    is_value_first: bool,
    cu_seqlens: Tensor | None,
    *,
    n: int = 1,
    gates: Gates = AS_GIVEN,
) -> tuple[Tensor, Tensor | None]:
    check_gates(function, beta, g)
    check_dims(function, "cu_seqlens", cu_seqlens, "[N + 1]")
    state = None
    if initial_state is not None:
        sizes = (sequences(q, cu_seqlens), v.shape[2], k.shape[3], v.shape[3])
        first = first_state(function, initial_state, sizes, q, value_first=is_value_first)
        state = ops.DeltaProductState(first)
    beta, g = gates.activate(function, beta, g)
    options = {"n": n, "scale": scale, "l2norm_qk": l2norm_qk, "state": state, "cu_seqlens": cu_seqlens}
    o, state = ops.delta_product(q, k, v, beta, g, **options)
    return o, final_state(state.s, output_final_state, is_value_first)
