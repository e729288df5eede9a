"""Replaces functions that transformers' models call with girih's, and restores them."""

import functools
import inspect
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import nn
from transformers import PreTrainedModel

from girih import ops
from girih.acceleration import functions, packed
from girih.nn.functional.gates import canonical_activation

# Functions of modelling modules by name, and the functions that wrap them.
SERVED: dict[str, Callable] = {
    "torch_chunk_gated_delta_rule": functions.chunk_gated_delta_rule,
    "torch_recurrent_gated_delta_rule": functions.fused_recurrent_gated_delta_rule,
    "mamba2_chunk_scan": functions.mamba_chunk_scan_combined,
    "mamba2_selective_state_update": functions.selective_state_update,
    "mamba2_split_conv1d_scan_combined": functions.mamba_split_conv1d_scan_combined,
    "causal_conv1d_fn": functions.causal_conv1d_fn,
    "causal_conv1d_update": functions.causal_conv1d_update,
}
# Layers by class, and the wrappers of their `forward`.
SERVED_LAYERS: dict[str, Callable] = {"MiniMaxLightningAttention": functions.lightning_attention}
# Functions that are not replaced, and why.
NOT_SERVED = {
    "chunk_kimi_delta_attention": "a gate for every key channel, which delta_product has not",
    "recurrent_kimi_delta_attention": "a gate for every key channel, which delta_product has not",
    "mamba_selective_scan": "Mamba-1: a step and a rate for every channel",
    "mamba_inner_fn": "Mamba-1: a step and a rate for every channel",
    "mamba_selective_state_update": "Mamba-1: a step and a rate for every channel",
}
# Norms whose gate follows the norm. In the families of Mamba-2 the gate precedes the norm.
GATED_NORM = re.compile(
    r"(Qwen3Next|Qwen3_5|Qwen3_5Moe|Qwen4ExpText|OlmoHybrid|LaraMini|KimiLinear|BailingHybrid|Glm5NextText)"
    r"RMSNormGated"
)
# Attributes of a layer that hold its `forward` as a bound method if the layer has hooks, as with device_map.
BOUND_FORWARDS = ("forward", "_old_forward")
MODELS = re.compile(r"transformers\.models\.\w+\.modeling_\w+")


class Row(NamedTuple):
    """A line of the report: a class of layers, their number, a function that they call, the path of its
    computation, and the reason."""

    layer: str
    count: int
    function: str
    path: str
    why: str


class Attribute(NamedTuple):
    """An attribute that holds a function: a global of a module, or `forward` of a class."""

    owner: Any
    name: str


# The replaced functions: number of users, and the original.
_replaced: dict[Attribute, tuple[int, Callable]] = {}
# Models that `accelerate` was called with. Their hooks may hold a wrapper until its last user is undone.
_models: WeakSet[nn.Module] = WeakSet()

# Replaced to accelerate every new model.
POST_INIT = Attribute(PreTrainedModel, "post_init")
_global_accelerations: list["Acceleration"] = []


def _wrap_post_init(original: Callable) -> Callable:
    @functools.wraps(original)
    def post_init(model: PreTrainedModel) -> None:
        original(model)
        for acceleration in _global_accelerations:
            acceleration._accelerate(model)

    return post_init


def _replace(attribute: Attribute, serve: Callable) -> None:
    users, original = _replaced.get(attribute, (0, None))
    if users == 0:
        original = vars(attribute.owner)[attribute.name]
        setattr(attribute.owner, attribute.name, serve(original))
    _replaced[attribute] = users + 1, original


def _restore(attribute: Attribute) -> None:
    users, original = _replaced.pop(attribute)
    if users > 1:
        _replaced[attribute] = users - 1, original
    else:
        setattr(attribute.owner, attribute.name, original)


def _bound_forwards(layer: nn.Module) -> Iterator[tuple[str, Callable]]:
    """The functions that a layer itself holds as bound methods, and the names of their attributes."""
    for name in BOUND_FORWARDS:
        if (function := getattr(vars(layer).get(name), "__func__", None)) is not None:
            yield name, function


def _bind(models: Iterable[nn.Module], functions: dict[Callable, Callable]) -> None:
    """Replaces functions that layers of these models hold as bound methods: a class does not reach them."""
    for layer in (layer for model in models for layer in model.modules()):
        for name, function in list(_bound_forwards(layer)):
            if function in functions:
                setattr(layer, name, MethodType(functions[function], layer))


def _attributes(module: ModuleType) -> Iterator[tuple[Attribute, Callable]]:
    """The attributes of a modelling module to replace, with their wrappers: functions, `forward` of layers,
    and if there are any, `forward` of the module's gated norms and models."""
    members = list(vars(module).items())
    classes = [
        (name, value)
        for name, value in members
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    attributes = [
        (Attribute(module, name), SERVED[name])
        for name, value in members
        if name in SERVED and callable(value)
    ]
    attributes += [
        (Attribute(value, "forward"), SERVED_LAYERS[name]) for name, value in classes if name in SERVED_LAYERS
    ]
    yield from attributes
    for name, value in classes if attributes else ():
        if GATED_NORM.fullmatch(name):
            yield Attribute(value, "forward"), functions.rms_norm_gated
        elif (serve := packed.find_wrapper(value)) is not None:
            yield Attribute(value, "forward"), serve


def _find_definition(layer: nn.Module) -> tuple[type, ModuleType] | None:
    """The class of transformers that a layer is an instance of, and the module that defines the class."""
    for kind in type(layer).__mro__:
        if MODELS.fullmatch(kind.__module__) and kind.__module__ in sys.modules:
            return kind, sys.modules[kind.__module__]
    return None


class Acceleration:
    """The replaced functions. `report()` lists them; `undo()`, or the end of a `with`, restores them."""

    def __init__(self, model: nn.Module | None):
        self._model = model
        self._attributes: set[Attribute] = set()
        if model is None:
            self._accelerate_every_model()
        else:
            self._accelerate(model)

    def _accelerate(self, model: nn.Module) -> None:
        for module in {m[1] for layer in model.modules() if (m := _find_definition(layer)) is not None}:
            self._serve(module)
        _models.add(model)
        _bind([model], {_replaced[a][1]: function for a, function in self._forwards().items()})

    def _forwards(self) -> dict[Attribute, Callable]:
        """`forward` of the replaced classes, as it is now."""
        return {a: vars(a.owner)[a.name] for a in self._attributes if a.name == "forward"}

    def _serve(self, module: ModuleType) -> None:
        for attribute, serve in _attributes(module):
            if attribute not in self._attributes:
                _replace(attribute, serve)
                self._attributes.add(attribute)

    def _accelerate_every_model(self) -> None:
        """Accelerates existing models through their modules, and new models in their constructor."""
        for name, module in list(sys.modules.items()):
            if MODELS.fullmatch(name):
                self._serve(module)
        if not _global_accelerations:
            _replace(POST_INIT, _wrap_post_init)
        _global_accelerations.append(self)

    def undo(self) -> None:
        """Restores every function. A second call does nothing."""
        if self in _global_accelerations:
            _global_accelerations.remove(self)
            if not _global_accelerations:
                _restore(POST_INIT)
        replaced = self._forwards()
        while self._attributes:
            _restore(self._attributes.pop())
        _bind(_models, {function: vars(a.owner)[a.name] for a, function in replaced.items()})

    def __enter__(self) -> "Acceleration":
        return self

    def __exit__(self, *error: Any) -> None:
        self.undo()

    def rows(self, model: nn.Module | None = None) -> list[Row]:
        """The accelerated and similar layers of a model, and how they are computed. model: default: the
        accelerated model."""
        model = self._model if model is None else model
        if model is None:
            raise ValueError(
                "model: accelerate() was called without one; give report() the model to report on"
            )
        kinds: Counter[tuple[str, str, str, str]] = Counter()
        for layer in model.modules():
            for function, attribute in _called_functions(layer):
                if attribute not in self._attributes:
                    path, why = "transformers", NOT_SERVED.get(function, "undone")
                elif _replaced[attribute][1] in dict(_bound_forwards(layer)).values():
                    path, why = "transformers", "hooks of device_map; call accelerate with this model"
                else:
                    path, why = _explain_path(layer, function)
                kinds[type(layer).__name__, function, path, why] += 1
        return [Row(layer, n, function, path, why) for (layer, function, path, why), n in kinds.items()]

    def report(self, model: nn.Module | None = None) -> str:
        """`rows` as a table."""
        header = ("layer", "", "function", "path", "why")
        table = [header, *((r.layer, f"x{r.count}", r.function, r.path, r.why) for r in self.rows(model))]
        widths = [max(len(row[i]) for row in table) for i in range(len(header))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in table
        )

    def __repr__(self) -> str:
        return f"Acceleration of {len(self._attributes)} functions"


def _called_functions(layer: nn.Module) -> Iterator[tuple[str, Attribute]]:
    """The functions of `SERVED` and `NOT_SERVED` that a layer's `forward` calls."""
    definition = _find_definition(layer)
    if definition is None:
        return
    kind, module = definition
    if GATED_NORM.fullmatch(kind.__name__) or kind.__name__ in SERVED_LAYERS:
        yield kind.__name__, Attribute(kind, "forward")
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    for name in code.co_names if code else ():
        if name in SERVED or name in NOT_SERVED:
            yield name, Attribute(module, name)


def _explain_path(layer: nn.Module, function: str) -> tuple[str, str]:
    """The path and the reason with which girih computes a function of this layer, for the layer's sizes,
    device and dtype."""
    weight = max(layer.parameters(), key=lambda p: p.dim())  # a projection or a filter, not a gate
    device, dtype = weight.device.type, weight.dtype
    is_step = function.endswith(("_recurrent_gated_delta_rule", "_state_update", "_update"))

    def x(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def size(name: str) -> int:
        return getattr(layer, name, 64)

    T, options = 1 if is_step else 64, {}
    if "delta_rule" in function:
        D, V = size("head_k_dim"), size("head_v_dim")
        op, inputs, options = (
            "delta_product",
            (x(1, T, 1, D), x(1, T, 1, D), x(1, T, 1, V), x(1, T, 1)),
            {"n": 1},
        )
        state = ops.DeltaProductState
    elif function == "mamba2_split_conv1d_scan_combined":
        return "girih, in parts", "the functions of its parts are called"
    elif function.startswith("mamba2") or function in SERVED_LAYERS:
        D, V = size("head_dim" if function in SERVED_LAYERS else "ssm_state_size"), size("head_dim")
        op, inputs, state = "gla", (x(1, T, 1, D), x(1, T, 1, D), x(1, T, 1, V), x(1, T, 1)), ops.GLAState
    elif function.startswith("causal_conv1d"):
        conv = next((m for m in layer.modules() if isinstance(m, nn.Conv1d)), None)
        taps = 4 if conv is None else conv.kernel_size[0]
        if taps > functions.MAX_TAPS:
            return "transformers", f"a filter of {taps} taps; girih.short_conv has {functions.MAX_TAPS}"
        if canonical_activation(getattr(layer, "activation", None)) not in functions.FILTER_ACTIVATIONS:
            return "transformers", f"the activation {layer.activation!r}"
        op, inputs, is_step = "short_conv", (x(1, T, 64), x(64, taps)), False
    else:
        if canonical_activation(layer.activation) not in functions.NORM_ACTIVATIONS:
            return "transformers", f"the activation {layer.activation!r}"
        op, inputs = "gated_rms_norm", (x(64, 64), x(64), x(64, 64))
    if is_step:
        state_dtype = torch.promote_types(dtype, torch.float32)
        options["state"] = state(torch.empty(1, 1, D, V, dtype=state_dtype, device="meta"))
        op += "_step"
    explanation = ops.explain(op, *inputs, **options, device=device)
    return f"girih.{op}, {explanation.path}", explanation.why


def accelerate(model: nn.Module | None = None) -> Acceleration:
    """Runs the linear-attention layers of transformers' models on girih's kernels, with the same weights and
    results.

    Replaces the gated delta rule (Qwen3-Next, Qwen3.5, OLMo-hybrid, ...), Mamba-2 (Mamba-2, Bamba, Falcon-H1,
    Granite 4, Nemotron-H, Zamba2), lightning attention (MiniMax) and short convolutions (these models, LFM2,
    Kimi-Linear, ...), in training and in decoding, with packed sequences, padding and transformers' own
    caches. The functions are replaced in the module that defines the model, so every model of the family in
    this process uses them.

    model: a model, wrapped or not. None: all existing and future models of this process.

    Raises ValueError for a model without a function to replace.

    >>> from transformers import Mamba2Config, Mamba2ForCausalLM
    >>> config = Mamba2Config(hidden_size=32, num_heads=4, head_dim=16, state_size=16, num_hidden_layers=1)
    >>> with accelerate(Mamba2ForCausalLM(config)) as acceleration:
    ...     print(acceleration.rows()[0].path)
    girih.short_conv, aten
    """
    acceleration = Acceleration(model)
    if model is not None and not acceleration._attributes:
        raise ValueError(
            f"model is a {type(model).__name__} without a layer that girih serves: no gated delta rule, no "
            "Mamba-2, no lightning attention, no short convolution"
        )
    if not torch.cuda.is_available():
        warnings.warn(
            "girih.accelerate: without a GPU the layers compute the same, but hardly faster",
            stacklevel=2,
        )
    return acceleration
