"""FSDP2 for models whose blocks have parameters of two dtypes."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

LOW = (torch.bfloat16, torch.float16)


def shard(model: nn.Module, **options: Any) -> nn.Module:
    """Apply torch's `fully_shard` to each block of a model and to the model, with separate groups of fp32
    parameters.

    A model in bf16 keeps its time scales, memories and gate biases in fp32 (`girih.nn.Layer.fp32`), and FSDP2
    refuses a group of parameters of two dtypes. Each block gets two groups: the parameters in bf16, and those
    in fp32, which also compute in fp32 under `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`. Names of
    parameters, `state_dict` and training steps are those of the model alone.

    model: a girih model, a converted one or another model of transformers, wrapped by peft or not. Its blocks
        are the modules that `_no_split_modules` names; a module without blocks is one block. Blocks that are
        sharded already stay as they are.
    options: those of `fully_shard`: mesh, reshard_after_forward, mp_policy, offload_policy, ignored_params.

    Returns model. accelerate takes a model that is sharded as it is: call this before `prepare`, or before
    the model goes to a Trainer.

    Raises ValueError for a layer that holds fp32 parameters itself: shard the module around it.

    >>> from torch.distributed import HashStore, device_mesh
    >>> torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    >>> from girih.models import GirihConfig, GirihForCausalLM
    >>> config = GirihConfig(mixer="mamba2", hidden_size=32, num_hidden_layers=1, num_heads=2)
    >>> model = shard(GirihForCausalLM(config).bfloat16(), mesh=device_mesh.init_device_mesh("cpu", (1,)))
    >>> ids = torch.randint(256, (2, 12))
    >>> model(ids, labels=ids).loss.backward()
    >>> torch.distributed.destroy_process_group()
    """
    models = [m for m in model.modules() if getattr(m, "_no_split_modules", None)]
    names = {name for owner in models for name in owner._no_split_modules}
    for module in reversed(list(model.modules())):  # children come before their parents
        is_block = type(module).__name__ in names and module is not model
        if is_block and not isinstance(module, FSDPModule):
            name = type(module).__name__
            shard_block(module, **options)
            # fully_shard renames a class; accelerate looks for blocks by the names that a model gives.
            for owner in models:
                renamed = {type(module).__name__ if n == name else n for n in owner._no_split_modules}
                owner._no_split_modules = renamed
    if not isinstance(model, FSDPModule):
        shard_block(model, **options)
    return model


def shard_block(block: nn.Module, **options: Any) -> None:
    """Apply `fully_shard` to the parameters of a block, and to its fp32 parameters as groups of children.

    A module has one group, so fp32 parameters belong to the group of the child that has them. The block is
    sharded first, because `fully_shard` skips modules that are sharded already.
    """
    ignored = set(options.pop("ignored_params", None) or ())
    policy = options.get("mp_policy") or MixedPrecisionPolicy()
    fp32 = fp32_parameters(block, ignored, policy)
    children = list(children_with(block, fp32)) if fp32 else []
    fully_shard(block, ignored_params=(ignored | fp32) or None, **options)
    if not fp32:
        return
    fp32_policy = dataclasses.replace(
        policy, param_dtype=None, reduce_dtype=None, output_dtype=None, cast_forward_inputs=False
    )
    for child in children:
        others = set(child.parameters()) - fp32
        fully_shard(child, ignored_params=(ignored | others) or None, **options | {"mp_policy": fp32_policy})


def fp32_parameters(block: nn.Module, ignored: set[Tensor], policy: MixedPrecisionPolicy) -> set[Tensor]:
    """The parameters of a block that need a separate group: parameters that stay in fp32 (`Layer.fp32`), if
    others compute in 16 bits, and trainable fp32 parameters, if other trainable parameters are 16-bit."""
    named, others = set(), set()
    for module in unsharded_modules(block):
        for name, p in module.named_parameters(recurse=False):
            if p not in ignored:
                (named if name in getattr(module, "fp32", ()) else others).add(p)
    named = {p for p in named if p.dtype == torch.float32} - others
    has_low = any((policy.param_dtype or p.dtype) in LOW for p in others)
    own_group = named if has_low else set()
    trainable = {p for p in others if p.requires_grad}
    if len({p.dtype for p in trainable}) > 1:
        own_group |= {p for p in trainable if p.dtype == torch.float32}
    return own_group


def unsharded_modules(module: nn.Module) -> Iterator[nn.Module]:
    """A module and its descendants, without those that `fully_shard` was applied to."""
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from unsharded_modules(child)


def children_with(module: nn.Module, parameters: set[Tensor]) -> Iterator[nn.Module]:
    """The children of a module that have these parameters. A container without a `forward` is replaced by its
    children.

    Raises ValueError if the module itself has such a parameter.
    """
    names = [name for name, p in module.named_parameters(recurse=False) if p in parameters]
    if names:
        raise ValueError(
            f"model is a {type(module).__name__} with the fp32 parameters {', '.join(names)} of its own "
            "beside parameters in 16 bits; expected a module around it, as the block of a model"
        )
    for child in module.children():
        if isinstance(child, FSDPModule) or parameters.isdisjoint(child.parameters()):
            continue
        if type(child).forward is nn.Module.forward:
            yield from children_with(child, parameters)
        else:
            yield child
