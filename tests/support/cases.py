"""Every operator and its options as data, so that one test of a property covers all operators.

A `Case` names an operator, its options, the shapes of its tensors as letters, and the kind of their values.
`Case.draw` returns `Inputs`, which `operator` and `recurrence` both accept. Both return a dict: `o` and the
fields of the state that are not None.

Letters: B batch, N sequences, T tokens, R = T n rows, H memory heads, K key heads (fewer than H where
memories share keys), Q query heads, D, V, M widths, X channels, W width of the convolution and P = W - 1.
"""

import functools
import inspect
import itertools
import math
from dataclasses import dataclass, field, replace

import recurrences
import torch
from girih import ops

SIZES = {"B": 2, "H": 2, "Q": 2, "D": 3, "V": 4, "M": 5, "X": 6, "W": 4, "n": 1}

# Gates, step sizes, write weights and filters may stay in fp32 beside bf16 q, k, v and x.
FP32_KINDS = {"gate", "beta", "step", "scale", "weight", "logit", "filter"}


def fill(kind, shape, generator):
    """Random values in the range that is valid for this kind of argument."""
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
    if kind == "gate":  # from -0.001 to -20
        return -((uniform * math.log(20 / 1e-3)).exp() * 1e-3)
    if kind in ("step", "weight"):
        return uniform
    if kind == "beta":
        return 2 * uniform
    if kind == "scale":  # w^2 scales a step: |w| <= 1 keeps steps small
        return 2 * uniform - 1
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "logit":
        return 3 * normal
    if kind not in ("unit", "repeated", "half repeated"):
        return normal
    unit = normal / normal.norm(dim=-1, keepdim=True)
    if kind == "repeated":  # the same direction in every row
        unit = unit[:, :1].expand(shape)
    if kind == "half repeated":  # the same direction in every other row
        unit[:, 2::2] = unit[:, :1]
    return unit


@dataclass(frozen=True)
class Case:
    op: str
    label: str
    data: dict  # name: (letters, kind)
    state: dict = field(default_factory=dict)
    memory: dict = field(default_factory=dict)  # first memories of operators without a zero start
    options: dict = field(default_factory=dict)
    sizes: dict = field(default_factory=dict)

    def __str__(self):
        return f"{self.op}-{self.label}"

    @property
    def chunk(self):
        """The chunk that is part of the model; 1 where the chunk length does not change the result."""
        return self.options.get("chunk", 1)

    @property
    def rows_per_token(self):
        return self.sizes.get("n", 1)

    @property
    def has_state(self):
        return bool(self.state)

    @property
    def packing(self):
        """The keyword that packs sequences into one row; None for operators without sequences."""
        if self.op == "cat_attention":
            return "cu_chunks"
        return "cu_seqlens" if self.has_state else None

    def token_rows(self, name):
        """Rows per token of this tensor; 0 for a tensor without a time dimension."""
        letters = self.data[name][0]
        return self.rows_per_token if "R" in letters else int("T" in letters)

    def draw(
        self,
        T,
        *,
        lengths=None,
        resumed=False,
        calm=False,
        dtype=torch.float64,
        gate_dtype=None,
        device="cpu",
        seed=0,
        **sizes,
    ):
        """Inputs of T tokens, or of packed sequences of these `lengths`.

        `resumed`: from a state in mid-chunk. `calm`: unit keys and values, gates above -0.1. Operators that
        normalise their memory are always calm in half precision: where gates empty a memory or long keys
        perturb it, only rounding errors are left. In fp32 those whose columns are not kept at length 1 are
        calm too.
        """
        normalised = self.op in ("trellis", "ttt", "lattice")
        free = self.options.get("shrinkage") or not self.options.get("normalize", True)
        calm = calm or (normalised and (dtype in HALF_TOLERANCES or (dtype == torch.float32 and bool(free))))
        generator = torch.Generator().manual_seed(seed)
        dims = SIZES | self.sizes | sizes | {"T": T}
        if lengths is not None:
            dims |= {"B": 1, "N": len(lengths), "T": sum(lengths)}
        if normalised and dtype != torch.float64:
            # A norm of few entries is ill-conditioned. In fp32 a test's sizes stay: they select the path.
            more, letters = (13, "DVM") if dtype in HALF_TOLERANCES else (3, set("DVM") - set(sizes))
            dims |= {letter: dims[letter] + more for letter in letters}
        dims["K"] = max(1, dims["H"] // dims.get("shared", 1))
        dims |= {"R": dims["T"] * self.rows_per_token, "P": dims["W"] - 1, "N": dims.get("N", dims["B"])}
        full_dtype = torch.float64 if dtype == torch.float64 else torch.float32

        def tensor(letters, kind, dtype):
            kind = "unit" if calm and kind == "normal" else kind
            filled = fill(kind, [dims[letter] for letter in letters], generator)
            if calm and kind == "gate":
                filled = filled / 200
            if kind == "step":  # the steps of a chunk sum to less than 1
                filled = filled / self.chunk
            return filled.to(device=device, dtype=dtype)

        data = {
            name: tensor(letters, kind, (gate_dtype or dtype) if kind in FP32_KINDS else dtype)
            for name, (letters, kind) in self.data.items()
        }
        start = self.state if resumed else self.memory
        state_dtype = dtype if self.op == "short_conv" else full_dtype
        leaves = {
            f"state_{name}": tensor(*spec, state_dtype) for name, spec in start.items() if name != "position"
        }
        position = None
        if resumed and "position" in self.state:
            position = (torch.arange(dims["N"], device=device) * 2 + 1 + seed) % self.chunk
        return Inputs(self, data, leaves, position, resumed, lengths)


@dataclass(frozen=True)
class Inputs:
    case: Case
    data: dict
    leaves: dict  # tensors that the state is computed from
    position: torch.Tensor | None
    resumed: bool
    lengths: list | None = None
    state_fields: dict | None = None  # the fields of the state, instead of those computed from `leaves`

    @property
    def state(self):
        """None, first memories, or the fields of a state."""
        if self.state_fields is not None:
            return self.state_fields
        leaves = {name.removeprefix("state_"): x for name, x in self.leaves.items()}
        if not leaves:
            return None
        if not self.resumed:
            return first_memory(self.case, leaves)
        begins = None if self.position is None else self.position == 0
        fields = mid_chunk(self.case, leaves, begins)
        return fields if self.position is None else fields | {"position": self.position}

    @property
    def floats(self):
        """Every floating input and every tensor that the initial state is computed from, by name."""
        return self.data | self.leaves

    def with_floats(self, tensors):
        return replace(
            self, data={n: tensors[n] for n in self.data}, leaves={n: tensors[n] for n in self.leaves}
        )

    def map(self, function):
        return self.with_floats({name: function(x) for name, x in self.floats.items()})

    def requiring_grad(self):
        return self.map(lambda x: x.detach().clone().requires_grad_())

    def part(self, a, b, state=None):
        """Tokens a to b, from a state with these fields if given."""
        return self.map_tokens(lambda x, n: x[:, a * n : b * n], state)

    def map_tokens(self, function, state=None):
        """Applies `function(x, rows per token)` to every tensor with a time dimension."""
        rows = {name: self.case.token_rows(name) for name in self.data}
        data = {name: function(x, rows[name]) if rows[name] else x for name, x in self.data.items()}
        return replace(self, data=data, state_fields=self.state_fields if state is None else state)

    def sequence(self, i):
        """Sequence i of a packed batch, as a batch of one."""
        lo = sum(self.lengths[:i])
        alone = replace(self.part(lo, lo + self.lengths[i]), lengths=None)
        state = self.state
        if isinstance(state, dict):
            alone = replace(alone, state_fields={name: x[i : i + 1] for name, x in state.items()})
        return alone

    def cu(self, dtype=torch.int64):
        """`cu_seqlens`, or `cu_chunks` for cat_attention, as a keyword argument."""
        if self.lengths is None:
            return {}
        unit = self.case.chunk if self.case.op == "cat_attention" else 1
        bounds = [n // unit for n in itertools.accumulate(self.lengths, initial=0)]
        device = next(iter(self.data.values())).device
        return {self.case.packing: torch.tensor(bounds, dtype=dtype, device=device)}


def unit(S):
    return S / S.norm(dim=-2, keepdim=True)


def first_memory(case, leaves):
    if case.op == "trellis":
        return leaves["k"], leaves["v"]
    if case.op == "ttt":
        return leaves["k"]
    return unit(leaves["first"]) if case.options.get("normalize", True) else leaves["first"]


def mid_chunk(case, leaves, begins):
    """Free tensors -> a valid state: at the start of a chunk, the state of the chunk is empty."""
    if case.op in ("trellis", "ttt"):
        begins, memories = begins[:, None, None, None], [x for x in "kv" if x in leaves]
        firsts = {f"first_{x}": torch.where(begins, leaves[x], leaves[f"first_{x}"]) for x in memories}
        return leaves | firsts
    if case.op == "lattice":
        first = unit(leaves["first"]) if case.options.get("normalize", True) else leaves["first"]
        tangent = leaves["step"] - first * (first * leaves["step"]).sum(-2, keepdim=True)
        fields = {"first": first, "step": tangent.masked_fill(begins[:, None, None, None], 0.0)}
        if "decay" in leaves:
            fields["decay"] = leaves["decay"].masked_fill(begins[:, None], 0.0)
        return fields
    return leaves


def with_any_first_memories(inputs):
    """Resumed inputs of trellis or ttt with independent first memories, also at the start of a chunk."""
    leaves = {name.removeprefix("state_"): x for name, x in inputs.leaves.items()}
    return replace(inputs, state_fields=leaves | {"position": inputs.position})


def state_class(op):
    """The operator's NamedTuple: the annotation of its parameter `state`."""
    return inspect.signature(getattr(ops, f"{op}_step")).parameters["state"].annotation


# For each operator with a state: the name of the state and the names of its fields.
STATES = {
    name: (
        state_class(name).__name__,
        [t["name"].removeprefix("state_") for t in op["tensors"] if t["state"]],
    )
    for name, op in ops.describe().items()
    if any(t["state"] for t in op["tensors"])
}


def state_of(case, fields):
    """Fields -> the operator's NamedTuple."""
    name, names = STATES[case.op]
    return getattr(ops, name)(*(fields.get(field) for field in names))


def start(inputs):
    """`XState.start` for B sequences of this case."""
    case = inputs.case
    start_state = getattr(ops, STATES[case.op][0]).start
    sizes = SIZES | case.sizes
    known = {
        "batch": sizes["B"],
        "heads": sizes["H"],
        "channels": sizes["X"],
        "width": sizes["W"],
        "abc": "z" in case.state,
        "between_chunks": "between_chunks" in case.options,
        "gated": "g" in case.data,
    } | sizes
    if case.op == "trellis":
        known["first_k"], known["first_v"] = inputs.state
    if case.op == "ttt":
        known["first_k"] = inputs.state
    if case.op == "lattice":
        known["first"] = inputs.state
    known["device"] = next(iter(inputs.data.values())).device
    return start_state(
        **{name: known[name] for name in inspect.signature(start_state).parameters if name in known}
    )


def outputs(case, result):
    """The result of a call -> a dict by name."""
    if not case.has_state:
        return {"o": result}
    o, state = result
    named = zip(STATES[case.op][1], state, strict=True)
    return {"o": o} | {name: x for name, x in named if x is not None}


def arguments(inputs):
    """The keyword arguments of a call."""
    case, state = inputs.case, inputs.state
    keywords = dict(inputs.data) | case.options | inputs.cu()
    if state is not None:
        keywords["state"] = state_of(case, state) if isinstance(state, dict) else state
    return keywords


def operator(inputs, **changed):
    """Calls the operator on these inputs; `changed` replaces arguments."""
    return outputs(inputs.case, getattr(ops, inputs.case.op)(**arguments(inputs) | changed))


def step(inputs):
    """One token through `X_step`: returns o and writes the tensors of the inputs' state."""
    return getattr(ops, f"{inputs.case.op}_step")(**arguments(inputs))


def recurrence(inputs):
    if inputs.lengths is not None:
        alone = [recurrence(inputs.sequence(i)) for i in range(len(inputs.lengths))]
        return {name: torch.cat([x[name] for x in alone], 1 if name == "o" else 0) for name in alone[0]}
    case, state = inputs.case, inputs.state
    keywords = dict(inputs.data) | case.options
    if state is not None:
        fields = isinstance(state, dict) and tuple(state.get(name) for name in STATES[case.op][1])
        keywords["state"] = fields or state
    return outputs(case, getattr(recurrences, case.op)(**keywords))


def cotangents(outs, seed=1):
    """A random gradient for every floating output, including the state."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
        for name, x in outs.items()
        if x.is_floating_point()
    }


def gradients(outs, inputs, grads=None):
    """d(sum of outputs * cotangents) / d(every floating input); zeros for an input without influence."""
    grads = cotangents(outs) if grads is None else grads
    reached = [name for name in grads if outs[name].requires_grad]
    floats = inputs.floats
    if not reached:
        return {name: torch.zeros_like(x) for name, x in floats.items()}
    found = torch.autograd.grad(
        [outs[name] for name in reached],
        list(floats.values()),
        [grads[name] for name in reached],
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(floats, found, strict=True))


QKV = {"q": ("BTQD", "normal"), "k": ("BTHD", "normal"), "v": ("BTHV", "normal")}


def gsa(label, *optional, sizes=None, **options):
    kinds = {"s": ("BTHM", "weight" if "g" in optional else "logit"), "g": ("BTHM", "gate")}
    state = {"k": ("NHDM", "normal"), "v": ("NHMV", "normal")}
    if "g" not in optional:
        state["z"] = ("NHM", "logit")
    return Case("gsa", label, QKV | {x: kinds[x] for x in optional}, state, {}, options, sizes or {})


def key_heads_letter(sizes):
    """The letter of the key heads."""
    return "K" if sizes and "shared" in sizes else "H"


def gla(label, gate=None, sizes=None, **options):
    data = QKV | {"k": (f"BT{key_heads_letter(sizes)}D", "normal")} | ({"g": (gate, "gate")} if gate else {})
    return Case("gla", label, data, {"s": ("NHDV", "normal")}, {}, options, sizes or {})


def delta_product(label, *, g=False, vector=False, keys="unit", sizes=None, **options):
    n = options.get("n") or 1
    data = {
        "q": ("BTQD", "unit"),
        "k": (f"BR{key_heads_letter(sizes)}D", "normal" if options.get("l2norm_qk") else keys),
        "v": ("BRHV", "normal"),
        "beta": ("BRHD" if vector else "BRH", "beta"),
    }
    data |= {"g": ("BTH", "gate")} if g else {}
    state = {"s": ("NHDV", "normal")} | ({"position": ()} if "between_chunks" in options else {})
    sizes = {"n": n} | ({"V": SIZES["D"]} if vector else {}) | (sizes or {})
    return Case("delta_product", label, data, state, {}, options, sizes)


def trellis(label, *, g=False, sizes=None, **options):
    # Without a normalising phi the recurrence is stable only for unit keys and values.
    kind = "unit" if options.get("phi") in ("identity", "silu") else "normal"
    data = {"q": ("BTQD", "normal"), "k": ("BTHD", kind), "v": ("BTHV", kind), "a": ("BTHM", "normal")}
    data |= {"gamma": ("BTH", "step")} | ({"g": ("BTH", "gate")} if g else {})
    memory = {"k": ("HMD", "normal"), "v": ("HMV", "normal")}
    state = {f"{first}{x}": ("N" + memory[x][0], "normal") for x in "kv" for first in ("first_", "")}
    return Case("trellis", label, data, state | {"position": ()}, memory, options, sizes or {})


def ttt(label, *, g=False, weight=False, sizes=None, **options):
    kind = "unit" if options.get("phi") in ("identity", "silu") else "normal"
    data = {"q": ("BTQD", "normal"), "k": ("BTHD", kind), "a": ("BTHM", "normal"), "gamma": ("BTH", "step")}
    data |= ({"g": ("BTH", "gate")} if g else {}) | ({"phi_weight": ("HM", "scale")} if weight else {})
    state = {"first_k": ("NHMD", "normal"), "k": ("NHMD", "normal"), "position": ()}
    return Case("ttt", label, data, state, {"k": ("HMD", "normal")}, options, sizes or {})


def lattice(label, *, g=False, sizes=None, **options):
    data = {
        "q": ("BTQM", "normal"),
        "k": ("BTHM", "normal"),
        "v": ("BTHD", "normal"),
        "gamma": ("BTH", "step"),
    }
    state = {"first": ("NHDM", "normal"), "step": ("NHDM", "normal")}
    if g:
        data, state = data | {"g": ("BTH", "gate")}, state | {"decay": ("NH", "gate")}
    memory = {"first": ("HDM", "normal")}
    return Case("lattice", label, data, state | {"position": ()}, memory, options, sizes or {})


def short_conv(label, *, bias=False, sizes=None, **options):
    data = {"x": ("BTX", "normal"), "weight": ("XW", "filter")} | ({"bias": ("X", "filter")} if bias else {})
    return Case("short_conv", label, data, {"x": ("NPX", "normal")}, {}, options, sizes or {})


def gated_rms_norm(label, shape="BTX", *, gate=True, sizes=None, **options):
    data = {"x": (shape, "normal"), "weight": (shape[-1], "filter")}
    data |= {"gate": (shape, "normal")} if gate else {}
    return Case("gated_rms_norm", label, data, {}, {}, options, sizes or {})


def cat_attention(label, sizes=None, **options):
    return Case("cat_attention", label, QKV, {}, {}, options, sizes or {})


GROUPED = {"H": 2, "Q": 4}
SHARED = {"H": 4, "shared": 2, "Q": 2}  # two memories share one head of keys and of queries

CASES = [
    gsa("g", "g"),
    gsa("s_g", "s", "g", sizes=GROUPED),
    gsa("abc", "s"),
    gsa("abc_none", "s", feature="none", scale=0.7, sizes=GROUPED),
    *(gsa(feature, "g", feature=feature, scale=0.5) for feature in ("none", "silu", "relu", "relu2")),
    gla("plain"),
    gla("g_head", "BTH", scale=0.5, sizes=GROUPED),
    gla("g_channel", "BTHD"),
    gla("shared_g_head", "BTH", sizes=SHARED),
    gla("shared_g_channel", "BTHD", sizes=SHARED | {"Q": 8}),
    delta_product("plain"),
    delta_product("shared_g", g=True, l2norm_qk=True, sizes=SHARED),
    delta_product("shared_n2_grouped", n=2, sizes=SHARED | {"Q": 8}),
    delta_product("shared_vector", vector=True, sizes=SHARED | {"Q": 4}),
    delta_product("g", g=True, scale=0.5),
    delta_product("n2", n=2, g=True, sizes=GROUPED),
    delta_product("n3_vector", n=3, vector=True),
    delta_product("n2_vector_l2", n=2, g=True, vector=True, l2norm_qk=True),
    delta_product("l2", l2norm_qk=True, sizes=GROUPED),
    delta_product("repeated", keys="repeated"),
    delta_product("half_repeated", n=2, g=True, keys="half repeated", sizes=GROUPED),
    delta_product("gelu", n=2, g=True, chunk=5, between_chunks="gelu"),
    delta_product("tanh", chunk=1, between_chunks="tanh"),
    trellis("default", g=True, chunk=4),
    trellis("c1", chunk=1, sizes=GROUPED),
    trellis("c1_g", g=True, chunk=1, phi="layer_norm", f="identity"),
    trellis("identity", chunk=3, phi="identity", f="softmax"),
    trellis("silu", g=True, chunk=4, phi="silu", f="l2norm"),
    trellis("l2norm", chunk=7, phi="l2norm", f="silu"),
    trellis("layer_norm", g=True, chunk=4, phi="layer_norm", f="l2_silu", sizes=GROUPED),
    trellis("l2_silu", chunk=4, phi="l2_silu", f="layer_norm"),
    trellis("softmax", g=True, chunk=5, phi="softmax", f="identity"),
    ttt("default", chunk=4),
    ttt("weight", weight=True, chunk=4, f="layer_norm", sizes=GROUPED),
    ttt("c1", weight=True, chunk=1, phi="l2norm", f="softmax"),
    ttt("identity", g=True, weight=True, chunk=3, phi="identity", f="ln_silu"),
    ttt("silu", weight=True, chunk=4, phi="silu", f="l2norm"),
    ttt("l2_silu", g=True, chunk=5, phi="l2_silu", f="silu", sizes=GROUPED),
    ttt("ln_silu", g=True, weight=True, chunk=4, phi="ln_silu", f="l2_silu"),
    ttt("softmax", g=True, weight=True, chunk=5, phi="softmax"),
    *(
        lattice(f"{objective}_c{chunk}{'_g' * g}", g=g, chunk=chunk, objective=objective, sizes=sizes)
        for objective, chunk, g, sizes in [
            ("decode", 1, False, None),
            ("decode", 1, True, GROUPED),
            ("decode", 4, False, GROUPED),
            ("decode", 4, True, None),
            ("decode", 8, True, None),
            ("encode", 1, True, None),
            ("encode", 4, False, None),
            ("encode", 5, True, GROUPED),
            ("encode", 9, False, GROUPED),
            ("similarity", 1, False, None),
            ("similarity", 3, True, None),
        ]
    ),
    lattice("wide", g=True, chunk=4, sizes={"M": 3, "D": 6}),
    lattice("unnormalised", chunk=1, normalize=False),
    lattice("unnormalised_encode", g=True, chunk=1, normalize=False, objective="encode"),
    lattice("shrinkage", chunk=1, shrinkage=0.02),
    lattice("shrinkage_g", g=True, chunk=1, shrinkage=0.05, objective="encode"),
    short_conv("w1", bias=True, sizes={"W": 1}),
    short_conv("w4"),
    short_conv("w3_bias", bias=True, sizes={"W": 3}),
    short_conv("w2_silu", activation="silu", sizes={"W": 2}),
    short_conv("w4_bias_silu", bias=True, activation="silu"),
    gated_rms_norm("silu"),
    gated_rms_norm("gelu_heads", "BTHD", activation="gelu", eps=1e-3),
    gated_rms_norm("sigmoid", "BTHD", activation="sigmoid"),
    gated_rms_norm("no_gate", gate=False),
    cat_attention("c2", chunk=2, scale=0.7),
    cat_attention("c4", chunk=4, sizes=GROUPED),
]

# One case of each operator, on the tensor cores where the operator has such kernels: for tests that do not
# depend on the options, or that take seconds.
ONE_EACH = [
    next(case for case in CASES if str(case) == name)
    for name in (
        "gsa-s_g",
        "gsa-abc",
        "gla-g_channel",
        "delta_product-n2",
        "trellis-default",
        "ttt-default",
        "lattice-decode_c8_g",
        "short_conv-w4_bias_silu",
        "gated_rms_norm-gelu_heads",
        "cat_attention-c4",
    )
]

# Cases for sequences of 4096 tokens, whose recurrence takes seconds.
LONG = ONE_EACH + [
    case
    for case in CASES
    if str(case)
    in {
        "gsa-g",
        "delta_product-n3_vector",
        "delta_product-gelu",
        "trellis-identity",
        "lattice-decode_c1",
        "lattice-encode_c5_g",
        "lattice-unnormalised",
    }
]

RECURRENT = [case for case in CASES if case.has_state]
PACKED = [case for case in CASES if case.packing]


def path_of(inputs, device="cuda"):
    """The path that the operator selects for these inputs on a device."""
    return ops.explain(inputs.case.op, **arguments(inputs), device=str(device)).path


@functools.cache
def has_kernels(op):
    """Whether the operator has CUDA kernels; these support at most fp32."""
    case = next(case for case in CASES if case.op == op)
    return path_of(case.draw(2, dtype=torch.float32)) != "aten"


def float_of(device):
    """The dtype for draws on this device where any float dtype is valid."""
    return getattr(device, "dtype", None) or torch.float32


# Tolerances in half precision (outputs, gradients) for properties that a bug violates by far. The tests of
# the kernels measure the error exactly: at most twice the error of PyTorch.
HALF_TOLERANCES = {torch.bfloat16: (4e-2, 8e-2), torch.float16: (5e-3, 1e-2)}


def precision(case, device):
    """The dtype and the tolerances of outputs and gradients for an operator on a device.

    Rounding across a kink makes a gradient jump: gradients of relu are not checked in half precision, and
    shrinkage, which moves columns to 0, is drawn in fp32."""
    if getattr(device, "dtype", None) and not case.options.get("shrinkage"):
        tolerance, grad_tolerance = HALF_TOLERANCES[device.dtype]
        return device.dtype, tolerance, math.inf if case.options.get("feature") == "relu" else grad_tolerance
    if device == "cuda" and has_kernels(case.op):
        return torch.float32, 1e-4, 1e-3
    return torch.float64, 1e-9, 1e-7
