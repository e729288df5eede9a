"""Models trained by two processes with DDP and FSDP2, in fp64 and in bf16 (started by test_together.py)."""

import functools
import itertools
from copy import deepcopy

import peft
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from converted import WAYS, converted
from girih import distributed
from girih.models import GirihForCausalLM
from girih.training.processes import exit_at_once
from small_models import CAT, HYBRID, SIZES, config_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

MODELS = {"hybrid": HYBRID, "cat": CAT}


def girih_model(options):
    torch.manual_seed(0)
    return GirihForCausalLM(config_of(**SIZES, **options))


MAKE = {name: functools.partial(girih_model, options) for name, options in MODELS.items()}
MAKE |= {f"converted: {way}": functools.partial(converted, "llama", way) for way in WAYS}


def lora(make):
    """LoRA adapters in fp32 on a model in bf16; the output weights of the adapters are not zero."""
    torch.manual_seed(0)
    options = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(make().bfloat16(), options)


def qwen3_next():
    """A model of transformers with its time scales in fp32."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "linear_num_key_heads": 2}
    linear = {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    sizes = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 64}
    layers = {"mlp_only_layers": [0, 1, 2, 3]}
    return Qwen3NextForCausalLM(Qwen3NextConfig(**sizes, **heads, **linear, **layers))


def gradients(model):
    """Full gradients by the parameter names of the unwrapped model."""
    found = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        assert p.grad is not None, name
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        found[name.removeprefix("module.")] = grad
    return found


def step(model, ids):
    """The loss and its gradients."""
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), gradients(model)


def share(model, way, mesh):
    model = deepcopy(model)
    if way == "ddp":
        return DistributedDataParallel(model)
    if way == "shard":
        return distributed.shard(model, mesh=mesh)
    if way == "shard, mixed precision":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        return distributed.shard(model, mesh=mesh, mp_policy=policy)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def batches():
    """Batches of two steps; the second step starts from the updated weights."""
    for number in range(2):
        yield torch.randint(32, (4, 13), generator=torch.Generator().manual_seed(number))


def assert_close_by_norm(found, want, limit, what):
    """|found - want| <= limit |want|, Frobenius norms."""
    error, size = (found - want).norm().item(), want.norm().item()
    assert error <= limit * size, f"{what}: {error:.3g} of {size:.3g}"


mesh = init_device_mesh("cpu", (2,))
rank = dist.get_rank()
for (name, make), way in itertools.product(MAKE.items(), ("ddp", "fsdp", "shard")):
    alone = make().double().train()
    together = share(alone, way, mesh)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (alone, together)]
    for ids in batches():
        want_loss, want = step(alone, ids)
        loss, found = step(together, ids[2 * rank : 2 * rank + 2])
        dist.all_reduce(loss)
        # transformers computes the loss in fp32.
        torch.testing.assert_close(loss / 2, want_loss, atol=1e-6, rtol=0)
        assert found.keys() == want.keys()
        for parameter, grad in want.items():
            what = f"{name}, {way}: {parameter}"
            torch.testing.assert_close(found[parameter], grad, atol=1e-6, rtol=0, msg=what)
        for optimizer in optimizers:
            optimizer.step()

LOW = MAKE | {"lora": functools.partial(lora, MAKE["hybrid"]), "qwen3_next": qwen3_next}
for (name, make), mixed in itertools.product(LOW.items(), (False, True)):
    alone = make().bfloat16().train()
    if name == "qwen3_next":
        for layer in (m for m in alone.modules() if hasattr(m, "A_log")):
            layer.A_log.data, layer.dt_bias.data = layer.A_log.data.float(), layer.dt_bias.data.float()
    alone = alone.float() if mixed else alone  # under mixed precision the weights are fp32
    together = share(alone, "shard, mixed precision" if mixed else "shard", mesh)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (alone, together)]
    for ids in batches():
        # Each process computes one half of the batch, and gradients are averaged over the processes.
        low = deepcopy(alone).bfloat16() if mixed else alone
        losses, halves = zip(*(step(low, half) for half in ids.chunk(2)), strict=True)
        loss, found = step(together, ids[2 * rank : 2 * rank + 2])
        dist.all_reduce(loss)
        torch.testing.assert_close(loss, sum(losses), atol=2e-3, rtol=0)
        assert found.keys() == halves[0].keys()
        for parameter, grad in found.items():
            p = alone.get_parameter(parameter)
            assert grad.dtype == p.dtype, f"{name}: {parameter}"
            p.grad = sum(half[parameter].to(p.dtype) for half in halves) / 2
            # Both sides are rounded to bf16 (unit roundoff 2^-8).
            assert_close_by_norm(grad.float(), p.grad.float(), 2 * 2**-8, f"{name}, {mixed=}: {parameter}")
        for optimizer in optimizers:
            optimizer.step()
        for parameter, p in together.named_parameters():
            p, want = p.full_tensor().detach(), alone.get_parameter(parameter).data
            assert_close_by_norm(p.float(), want.float(), 2**-8, f"{name}, {mixed=}: {parameter}")
            want.copy_(p)  # bf16 amplifies a difference of one rounding
    before = [p.full_tensor().clone() for p in together.parameters() if p.requires_grad]
    torch.nn.utils.clip_grad_norm_(together.parameters(), 1.0)
    torch.optim.AdamW(together.parameters(), lr=0.1).step()
    after = [p.full_tensor() for p in together.parameters() if p.requires_grad]
    assert all(a.isfinite().all() and not a.equal(b) for a, b in zip(after, before, strict=True)), name

# accelerate supports FSDP only on GPUs, so its state is set manually on this CPU.
accelerator = Accelerator(cpu=True)
accelerator.state.distributed_type = DistributedType.FSDP
accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
)
assert accelerator.is_fsdp2
alone = MAKE["hybrid"]().bfloat16().train()
together = distributed.shard(deepcopy(alone), mesh=mesh)
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (alone, together)]
together, optimizers[1] = accelerator.prepare(together, optimizers[1])
assert accelerator.get_state_dict(together).keys() == alone.state_dict().keys()
ids = next(iter(batches()))
for half in ids.chunk(2):
    (alone(input_ids=half, labels=half).loss / 2).backward()
half = ids[2 * rank : 2 * rank + 2]
accelerator.backward(together(input_ids=half, labels=half).loss)
for optimizer in optimizers:
    optimizer.step()
for parameter, p in together.named_parameters():
    want = alone.get_parameter(parameter).float()
    assert_close_by_norm(p.full_tensor().float(), want, 2**-8, f"accelerate: {parameter}")
dist.barrier()
dist.destroy_process_group()
exit_at_once(0)
