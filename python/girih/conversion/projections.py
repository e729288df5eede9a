"""Finds the projections of an attention module by their names in transformers' models, and calls them."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from girih.nn import Attention
from girih.nn.layers.sequence_layer import CACHES, SequenceLayer

SEPARATE = (("q_proj", "k_proj", "v_proj"),)  # Llama, Qwen, Mistral, Gemma, OLMo, Phi, ...
WITHOUT_OUT = ("query", "key", "value")  # BERT, RoBERTa, ELECTRA: the output projection is in another module
FUSED = ("c_attn", "qkv_proj")  # GPT-2, Phi-3, OpenELM: channels of q, then of k, then of v
MODERN = ("Wqkv", "Wo")  # ModernBERT: the same order
HEAD_MAJOR = ("query_key_value",)  # GPT-NeoX, Persimmon: channels of q, k and v for each head
DROPOUT = ("resid_dropout", "out_drop")  # GPT-2, GPT-J; ModernBERT
HEAD_DIM = ("head_dim", "head_size", "attention_head_size")
OUT = ("o_proj", "dense", "c_proj", "out_proj", "Wo")
NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))  # Qwen3, Gemma 3, OLMo 2; Phi
# Modules between attention and its output projection: norms of BitNet, DiffLlama and Kosmos, gates of Afmoe,
# Laguna and MiniMax.
BETWEEN = ("attn_sub_norm", "groupnorm", "inner_attn_ln", "o_norm", "gate_proj", "g_proj", "output_gate")


def width(projection: nn.Module) -> tuple[int, int]:
    """The numbers of input and output features of an nn.Linear, a quantized or adapted one, or a Conv1D of
    transformers."""
    if hasattr(projection, "out_features"):
        return projection.in_features, projection.out_features
    return projection.nx, projection.nf


class Projections(NamedTuple):
    """The names of an attention's projections and norms, and its sizes.

    qkv: three names, or one if they are fused. out: the output projection; None: it is in another module.
    norms: norms of q and k before rotary positions, or None. heads, kv_heads: numbers of query heads, and of
    heads of keys and values, each of head_dim channels. hidden_size: width of the input. is_head_major: the
    channels of the fused projection are ordered by head, then q, k, v. causal: whether no token attends to
    later tokens.
    """

    qkv: tuple[str, ...]
    out: str | None
    norms: tuple[str, str] | None
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    is_head_major: bool = False
    causal: bool = True

    @property
    def channels(self) -> tuple[int, int, int]:
        """Numbers of channels of q, k and v."""
        return tuple(n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads))

    def split_qkv(self, fused: Tensor) -> tuple[Tensor, ...]:
        """q, k and v of a fused projection's output, `[B, T, channels]` each."""
        if self.is_head_major:
            fused = fused.unflatten(-1, (self.heads, 3, -1)).transpose(-3, -2).flatten(-3)
        return fused.split(self.channels, -1)

    def apply_norms(self, attention: nn.Module, parts: dict[int, Tensor]) -> list[Tensor]:
        """Applies attention's norms to q, k and v, given by index: q (0), k (1), v (2)."""
        norms = dict(enumerate(self.norms or ()))
        return [
            apply_norm(getattr(attention, norms[i]), x, self.head_dim) if i in norms else x
            for i, x in parts.items()
        ]

    def get_qkv(self, attention: nn.Module, outputs: list[Tensor]) -> list[Tensor]:
        """q, k and v from the projections' outputs, after attention's norms, before rotary positions."""
        parts = outputs if len(outputs) == 3 else self.split_qkv(outputs[0])
        return self.apply_norms(attention, dict(enumerate(parts)))

    def project(self, attention: nn.Module, x: Tensor) -> Tensor:
        """q, k and v of x, concatenated, `[B, T, (heads + 2 kv_heads) head_dim]`."""
        outputs = [getattr(attention, name)(x) for name in self.qkv]
        if len(outputs) == 1 and self.norms is None and not self.is_head_major:
            return outputs[0]
        return torch.cat(self.get_qkv(attention, outputs), -1)

    def project_out(self, attention: nn.Module, o: Tensor) -> Tensor:
        """Applies the output projection to o, and the dropout after it (GPT-2)."""
        if self.out is None:
            return o
        y = getattr(attention, self.out)(o)
        dropout = next(
            (
                dropout_module
                for name in DROPOUT
                if (dropout_module := getattr(attention, name, None)) is not None
            ),
            None,
        )
        return y if dropout is None else dropout(y)

    def weight(self, attention: nn.Module) -> Tensor:
        """A weight of the attention, from which callers read device and dtype."""
        return getattr(attention, self.out or self.qkv[0]).weight

    def project_selected(self, attention: nn.Module, x: Tensor, *indices: int) -> list[Tensor]:
        """The projections of x with these indices: q (0), k (1), v (2)."""
        if len(self.qkv) == 1:
            parts = self.split_qkv(getattr(attention, self.qkv[0])(x))
            return self.apply_norms(attention, {i: parts[i] for i in indices})
        return self.apply_norms(attention, {i: getattr(attention, self.qkv[i])(x) for i in indices})


def apply_norm(norm: nn.Module, x: Tensor, head_dim: int) -> Tensor:
    """Applies a norm to x `[B, T, heads head_dim]`: over all channels (OLMo 2) or over each head (Qwen3,
    Gemma 3)."""
    if norm.weight.shape == x.shape[-1:]:
        return norm(x)
    return norm(x.unflatten(-1, (-1, head_dim))).flatten(-2)


def find(attention: nn.Module) -> Projections | str:
    """The `Projections` of a module, or the reason why it cannot be converted."""

    def has_modules(*names: str) -> bool:
        return all(isinstance(getattr(attention, name, None), nn.Module) for name in names)

    if not isinstance(getattr(attention, "layer_idx", None), int):
        return "it has no layer_idx, its place in a cache"
    causal = bool(getattr(attention, "is_causal", getattr(attention, "causal", True)))
    if isinstance(attention, SequenceLayer):
        if not isinstance(attention, Attention):
            return "it is a mixer of girih's"
    else:
        forward_parameters = inspect.signature(type(attention).forward).parameters
        has_cache = not forward_parameters.keys().isdisjoint(CACHES)
        # Other modules with is_causal=False may be causal by their masks (GIT), or read blocks of tokens with
        # a cache.
        is_encoder = not has_cache or getattr(attention, "is_decoder", None) is False
        if not causal and (not is_encoder or "encoder_hidden_states" in forward_parameters):
            return "it is not causal self-attention"
        if causal and not has_cache:
            return f"its forward takes no cache by the name of {' or '.join(CACHES)}"
        if "residual" in forward_parameters:
            return "its forward takes residual, which it adds to what it returns"
    if hasattr(attention, "dense_bias"):
        return "its dense_bias is added outside of it, as a third value that its forward returns"
    if getattr(attention, "is_kv_shared_layer", False):
        return "it reads the keys and values of another layer"
    between = next((name for name in BETWEEN if has_modules(name)), None)
    if between is not None:
        return f"its {between} stands between attention and its output projection"
    clip = getattr(attention, "clip_qkv", getattr(getattr(attention, "config", None), "clip_qkv", None))
    if clip is not None:
        return f"its q, k and v are clipped: clip_qkv is {clip}"
    if getattr(attention, "is_cross_attention", False):
        return "it is not causal self-attention"
    fused = [(name,) for name in (*FUSED, *HEAD_MAJOR)]
    qkv = next((names for names in (*SEPARATE, *fused) if has_modules(*names)), None)
    out = next((name for name in OUT if has_modules(name)), None)
    if qkv is None and has_modules(*MODERN):
        qkv, out = MODERN[:1], MODERN[1]
    if qkv is None and has_modules(*WITHOUT_OUT):
        qkv = WITHOUT_OUT
        other = next(
            (name for name, _ in attention.named_parameters() if name.partition(".")[0] not in qkv), None
        )
        if other is not None:
            return f"it has {other} beside {', '.join(qkv)}, and what it does is not known"
    if qkv is None:
        return f"it has neither {', '.join(SEPARATE[0])} nor {' nor '.join((*FUSED, *HEAD_MAJOR))}"
    if out is None and qkv != WITHOUT_OUT:
        return f"it has none of {', '.join(OUT)}"
    head_dim = next(
        (value for name in HEAD_DIM if (value := getattr(attention, name, None)) is not None), None
    )
    if not isinstance(head_dim, int):
        return "it has no head_dim"
    inputs, widths = [], []
    for name in qkv:
        x, y = width(getattr(attention, name))
        inputs.append(x)
        widths.append(y)
    channels = widths[0] if out is None else width(getattr(attention, out))[0]
    if len(widths) == 1:
        kv = (widths[0] - channels) // 2
        widths = [channels, kv, widths[0] - channels - kv]
    q, k, v = widths
    # The channels of CodeGen are ordered by blocks of model parallelism; before transformers 5.24 the number
    # of blocks was an argument. Those of GPT-BigCode are ordered by head, if each head has its own keys.
    parameters = inspect.signature(getattr(attention, "_split_heads", find)).parameters
    if "mp_num" in parameters or hasattr(attention, "mp_num"):
        return f"the channels of its {qkv[0]} go by blocks of q, v and k"
    is_head_major = qkv[0] in HEAD_MAJOR or (
        len(qkv) == 1 and getattr(attention, "multi_query", True) is False
    )
    if is_head_major and k != q:
        return f"its {qkv[0]} has fewer keys than queries, and their order is not known"
    if q != channels or k != v or k <= 0 or q % k or any(n % head_dim for n in widths):
        return f"its q, k, v and output have {q}, {k}, {v} and {channels} channels, no heads of {head_dim}"
    norms = next((names for names in NORMS if has_modules(*names)), None)
    for name, channels in zip(norms or (), (q, k), strict=False):
        shape = getattr(getattr(attention, name), "weight", torch.empty(())).shape
        if shape not in ((channels,), (head_dim,), (channels // head_dim, head_dim)):
            return f"its {name} has a weight of {list(shape)}, for neither q and k nor their heads"
    heads = q // head_dim, k // head_dim
    return Projections(qkv, out, norms, inputs[0], *heads, head_dim, is_head_major, causal)


class Shared:
    """A function of an attention's projections that a mixer calls as its own projection.

    It is not a module, so that the weights keep one name. It looks the projections up at each call, so that
    later adapters or quantized layers are used. A copy of the mixer alone, which peft's modules_to_save
    makes, shares the attention; a copy of the model has its own.
    """

    def __init__(self, attention: nn.Module, function: Callable[..., Any]):
        self.attention, self.function = attention, function

    def __call__(self, x: Tensor) -> Tensor:
        return self.function(self.attention, x)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Shared":
        return Shared(memo.get(id(self.attention), self.attention), self.function)


class ChangedProjection:
    """A projection whose call is `function(projection, o)`; its attributes are the projection's."""

    def __init__(self, projection: nn.Module, function: Callable[[nn.Module, Tensor], Tensor]):
        self._projection, self._function = projection, function

    def __call__(self, o: Tensor) -> Tensor:
        return self._function(self._projection, o)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._projection, name)


class RecordingAttention:
    """Stands in for an attention module in its `forward`, and records the outputs of the projections `names`.

    All other attributes are the module's.
    """

    def __init__(self, attention: nn.Module, names: tuple[str, ...]):
        self._attention, self._names = attention, names
        self._outputs: dict[str, Tensor] = {}
        self._out: str | None = None
        self.has_changed, self.result = False, None

    def change(self, out: str, function: Callable[..., tuple[Tensor, Any]]) -> None:
        """Changes the input o `[..., channels]` of the projection `out` to the first value of `function(o,
        outputs, project)`; the second is stored in `result`. project reshapes `[B, T, channels]` to
        o's shape.

        `has_changed` is false after a `forward` that leaves the projection to a method of the module.
        """
        self._out, self._function = out, function

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._attention, name)
        if name == self._out:
            return ChangedProjection(value, self._call_changed)
        if name not in self._names:
            return value

        def record(x: Tensor) -> Tensor:
            y = self._outputs[name] = value(x)
            return y

        return record

    def _call_changed(self, out: nn.Module, o: Tensor) -> Tensor:
        if self.has_changed:
            raise RuntimeError(
                f"{self._out} was called a second time in one forward of {type(self._attention)}"
            )
        o, self.result = self._function(o, self.outputs(), lambda y: y.reshape(o.shape))
        self.has_changed = True
        return out(o)

    def outputs(self) -> list[Tensor]:
        return [self._outputs[name] for name in self._names]
