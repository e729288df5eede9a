"""Every layer refuses a projection sharded over two processes, and names it (started by test_sharding.py)."""

import torch
import torch.distributed as dist
from girih import nn
from girih.training.processes import exit_at_once
from torch.distributed.tensor import Replicate, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

mesh = init_device_mesh("cpu", (2,))


def layers():
    sizes = {"hidden_size": 32, "num_heads": 4}
    yield lambda: nn.GatedSlotAttention(**sizes, num_slots=8)
    yield lambda: nn.GatedLinearAttention(**sizes, gate="scalar")
    yield lambda: nn.DeltaProduct(**sizes, n=2, gated=True)
    yield lambda: nn.Trellis(**sizes, num_slots=8, chunk=4)
    yield lambda: nn.Lattice(**sizes, num_slots=8, chunk=4)
    yield lambda: nn.Attention(**sizes)
    yield lambda: nn.CompressAttend(**sizes, chunk=4)


def refusal(layer, name, **layouts):
    parallelize_module(layer, mesh, {name: ColwiseParallel(**layouts)})
    try:
        return layer(torch.randn(2, 9, 32))[0].shape
    except ValueError as error:
        return str(error)


for make in layers():
    names = [n for n, m in make().named_modules() if isinstance(m, torch.nn.Linear) and "o_proj" not in n]
    for name in names:
        width = make().get_submodule(name).out_features
        expected = (
            f"{name.split('.')[-1]} of {type(make().get_submodule(name.rpartition('.')[0])).__name__} gives"
        )
        message = refusal(make(), name)
        assert (
            message
            == f"{expected} {width // 2} of its {width} features" + str(message)[str(message).find(":") :]
        ), message
        assert refusal(make(), name, output_layouts=Replicate()) == (2, 9, 32), name
dist.barrier()
dist.destroy_process_group()
exit_at_once(0)
