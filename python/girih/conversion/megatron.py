"""Parameters of Megatron-LM's Gated DeltaProduct, read into girih's layer and written from it."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from girih.nn import GatedDeltaProduct

# Names in Megatron: names in girih, and the axis that tensor parallelism splits.
PARAMETERS = {
    "in_proj.weight": ("in_proj.weight", 0),
    "conv1d.weight": ("conv.weight", 0),
    "A_log": ("A_log", 0),
    "dt_bias": ("dt_bias", 0),
    "norm.weight": ("norm.weight", 0),
    "out_proj.weight": ("o_proj.weight", 1),
}
BLOCK_NORM = (
    "in_proj.layer_norm_weight"  # of the norm before the layer, which Transformer Engine fuses with it
)


def part_sizes(layer: GatedDeltaProduct, name: str) -> list[int]:
    """The sizes of the parts of a parameter that are split over the shards one by one, along the split axis.

    z, the n values, the n keys, the query, the n betas and a are parts of in_proj of their own.
    """
    n, heads = layer.n, layer.num_heads
    width, keys = heads * layer.head_dim, layer.num_groups * layer.state_size
    vkq = [width] * n + [keys] * (n + 1)
    if name == "in_proj.weight":
        return [width, *vkq, *[heads] * (n + 1)]
    return vkq if name == "conv1d.weight" else [heads if name in ("A_log", "dt_bias") else width]


def check_shards(layer: nn.Module, shards: int) -> None:
    """Raises unless Megatron has such a layer, and its groups can be split over this number of shards."""
    if not isinstance(layer, GatedDeltaProduct):
        raise TypeError(f"layer is a {type(layer).__name__}; expected a girih.nn.GatedDeltaProduct")
    if layer.conv.weight is None:
        raise ValueError(
            "conv_size of the layer is 0; expected 1 or more: Megatron's layer has a convolution"
        )
    if shards < 1 or layer.num_groups % shards:
        raise ValueError(f"shards is {shards}; expected a divisor of num_groups, {layer.num_groups}")


def load_megatron(
    layer: GatedDeltaProduct, *shards: Mapping[str, Tensor], norm: nn.Module | None = None
) -> None:
    """Copies the parameters of Megatron-LM's `GatedDeltaProductMixer` into a layer.

    shards: the mixer's state_dict of each rank of tensor parallelism, in the order of the ranks; one without
        tensor parallelism. Keys without the prefix of the mixer: `in_proj.weight`, `conv1d.weight`, `A_log`,
        `dt_bias`, `norm.weight`, `out_proj.weight`. Entries `_extra_state`, the scales of Transformer
        Engine's fp8 products, are no parameters and are skipped.
    norm: the norm before the layer. It is needed where the shards have `in_proj.layer_norm_weight`, into
        which Transformer Engine puts its weight.

    The norm of Megatron's layer has eps 1e-5, `norm_eps` of the layer. Raises a ValueError that names a
    missing or further entry, such as a bias, and one of another shape; the layer is then unchanged.

    >>> layer = GatedDeltaProduct(64, 4, n=3, num_groups=2, state_size=32, norm_eps=1e-5)
    >>> load_megatron(layer, *to_megatron(layer, shards=2))
    """
    check_shards(layer, len(shards))
    expected = set(PARAMETERS) | ({BLOCK_NORM} if norm is not None else set())
    for rank, shard in enumerate(shards):
        found = {name for name in shard if not name.endswith("_extra_state")}
        for name in sorted(found ^ expected):
            kind = "no" if name in expected else "an entry"
            hint = "; give the norm before the layer as norm" if name == BLOCK_NORM and norm is None else ""
            raise ValueError(f"shard {rank} has {kind} {name}; expected {', '.join(sorted(expected))}{hint}")
    state = {
        PARAMETERS[name][0]: join_parts(layer, name, [shard[name] for shard in shards]) for name in PARAMETERS
    }
    if norm is not None and shards[0][BLOCK_NORM].shape != norm.weight.shape:
        shape = list(shards[0][BLOCK_NORM].shape)
        raise ValueError(f"{BLOCK_NORM} has shape {shape}; expected {list(norm.weight.shape)}")
    layer.load_state_dict(state)
    if norm is not None:
        with torch.no_grad():
            norm.weight.copy_(shards[0][BLOCK_NORM])


def to_megatron(layer: GatedDeltaProduct, shards: int = 1) -> list[dict[str, Tensor]]:
    """The state_dict of Megatron-LM's `GatedDeltaProductMixer` for each of `shards` ranks of tensor
    parallelism; `shards` divides num_groups. See `load_megatron`."""
    check_shards(layer, shards)
    state = layer.state_dict()
    split: list[dict[str, Tensor]] = [{} for _ in range(shards)]
    for name, (own_name, axis) in PARAMETERS.items():
        parts = state[own_name].split(part_sizes(layer, name), axis)
        for rank, shard in enumerate(split):
            joined = torch.cat([part.chunk(shards, axis)[rank] for part in parts], axis)
            shard[name] = joined.unsqueeze(1) if name == "conv1d.weight" else joined
    return split


def join_parts(layer: GatedDeltaProduct, name: str, tensors: Sequence[Tensor]) -> Tensor:
    """The layer's parameter from the shards' tensors of Megatron's parameter `name`."""
    own_name, axis = PARAMETERS[name]
    sizes = [size // len(tensors) for size in part_sizes(layer, name)]
    shape = list(layer.get_parameter(own_name).shape)
    shape[axis] = sum(sizes)
    if name == "conv1d.weight":
        shape.insert(1, 1)
    for rank, tensor in enumerate(tensors):
        if list(tensor.shape) != shape:
            raise ValueError(f"{name} of shard {rank} has shape {list(tensor.shape)}; expected {shape}")
    parts = zip(*(tensor.split(sizes, axis) for tensor in tensors), strict=True)
    joined = torch.cat([piece for pieces in parts for piece in pieces], axis)
    return joined.squeeze(1) if name == "conv1d.weight" else joined
