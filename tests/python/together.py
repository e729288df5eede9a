"""Models trained by two processes, by DDP and by FSDP2: run by test_together.py."""

import functools
import itertools
import os
from copy import deepcopy

import torch
import torch.distributed as dist
from converted import WAYS, converted
from girih.models import GirihConfig, GirihForCausalLM
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

SIZES = {"vocab_size": 32, "hidden_size": 32, "num_heads": 2, "num_slots": 8, "chunk": 4}
MODELS = {
    "hybrid": {
        "mixer": ["gsa", "delta_product", "trellis", "lattice", "mamba2", "mag"],
        "num_hidden_layers": 6,
    },
    "cat": {"mixer": "cat", "num_hidden_layers": 2, "max_position_embeddings": 64},
}


def girih_model(options):
    torch.manual_seed(0)
    return GirihForCausalLM(GirihConfig(**SIZES, **options))


MAKE = {name: functools.partial(girih_model, options) for name, options in MODELS.items()}
MAKE |= {f"converted: {way}": functools.partial(converted, "llama", way) for way in WAYS}


def gradients(model):
    """By the names that the model has alone, whole."""
    found = {}
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        found[name.removeprefix("module.")] = grad
    return found


def step(model, ids):
    """The loss and the gradients of it."""
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), gradients(model)


def share(model, way, mesh):
    model = deepcopy(model)
    if way == "ddp":
        return DistributedDataParallel(model)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


mesh = init_device_mesh("cpu", (2,))
rank = dist.get_rank()
for (name, make), way in itertools.product(MAKE.items(), ("ddp", "fsdp")):
    alone = make().double().train()
    together = share(alone, way, mesh)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (alone, together)]
    for number in range(2):  # the second step is from what the first has made
        ids = torch.randint(32, (4, 13), generator=torch.Generator().manual_seed(number))
        want_loss, want = step(alone, ids)
        loss, found = step(together, ids[2 * rank : 2 * rank + 2])
        dist.all_reduce(loss)
        # transformers takes the loss in fp32.
        torch.testing.assert_close(loss / 2, want_loss, atol=1e-6, rtol=0)
        assert found.keys() == want.keys()
        for parameter, grad in want.items():
            what = f"{name}, {way}: {parameter}"
            torch.testing.assert_close(found[parameter], grad, atol=1e-6, rtol=0, msg=what)
        for optimizer in optimizers:
            optimizer.step()
dist.barrier()
dist.destroy_process_group()
# PyTorch's own threads, gloo's among them, now and then end the process with an error when it winds up.
os._exit(0)
