from girih.training.processes import exit_at_once

"""Every case with operands sharded along the batch and the heads, in two processes (started by
test_sharding.py)."""

import dataclasses

import torch
import torch.distributed as dist
from cases import CASES, cotangents, gradients, operator
from comparison import assert_within
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

mesh = init_device_mesh("cpu", (2,))
HEADS = {"H", "HQ", "HK", "channels"}


def dimension(case, name, letters):
    """The first dimension of the tensor that has one of these letters, or None."""
    shape = case.data[name][0] if name in case.data else case.state[name.removeprefix("state_")][0]
    own = {"Q": "HQ", "K": "HK", "X": "channels"}
    return next((d for d, letter in enumerate(shape) if own.get(letter, letter) in letters), None)


for case in CASES:
    heads = 2 * case.sizes.get("shared", 1)
    inputs = case.draw(9, resumed=case.has_state, dtype=torch.float64, H=heads, X=6, B=2).requiring_grad()
    want = operator(inputs)
    want_grads = gradients(want, inputs)
    cuts = [{"B", "N"}] + ([HEADS] if case.op != "gated_rms_norm" else [])
    for cut in cuts:
        leaves = {}
        for name, x in inputs.floats.items():
            d = dimension(case, name, cut)
            placement = Replicate() if d is None else Shard(d)
            leaves[name] = distribute_tensor(x.detach(), mesh, [placement]).requires_grad_()
        sharded = inputs.with_floats(leaves)
        if inputs.position is not None:
            position = distribute_tensor(inputs.position, mesh, [Replicate()])
            sharded = dataclasses.replace(sharded, position=position)
        outs = operator(sharded)
        assert outs["o"].placements[0].is_shard(), f"{case}, cut along {cut}: {outs['o'].placements}"
        full = {name: x.full_tensor() for name, x in outs.items()}
        assert_within(full, want, 1e-9)
        grads = cotangents(want)
        found = torch.autograd.grad(
            [outs[name] for name in grads],
            list(leaves.values()),
            [distribute_tensor(g, mesh, outs[name].placements) for name, g in grads.items()],
            allow_unused=True,
            materialize_grads=True,
        )
        whole = {
            n: (g.full_tensor() if isinstance(g, DTensor) else g) for n, g in zip(leaves, found, strict=True)
        }
        assert_within(whole, want_grads, 1e-7)
dist.barrier()
dist.destroy_process_group()
exit_at_once(0)
