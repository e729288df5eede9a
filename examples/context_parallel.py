"""A language model that trains on sequences cut over processes.

torchrun --nproc-per-node=2 examples/context_parallel.py
torchrun --nproc-per-node=4 examples/context_parallel.py --context=2 --tokens=4096 --compile

Rows of the batch are divided over the dimension `dp` of the mesh, tokens of a row over `cp`.
"""

import argparse

import girih
import torch
import torch.distributed as dist
from girih.models import GirihConfig, GirihForCausalLM
from torch.distributed.device_mesh import init_device_mesh

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def parallelize(model, mesh, *, checkpoints=True, compile=False):
    """Activation checkpoints, compiled blocks and FSDP2 over all ranks, in this order. Context parallel needs
    no change of the model: enter `girih.context_parallel(mesh["cp"])` around its calls."""
    if checkpoints:
        model.gradient_checkpointing_enable()
    if compile:
        for block in model.model.layers:
            block.compile()
    return girih.distributed.shard(model, mesh=mesh["dp", "cp"]._flatten("dp_cp"))


def make_rows(step, rows, tokens):
    """Rows in which the second half repeats the first: a model with memory learns to predict it."""
    generator = torch.Generator().manual_seed(step)
    half = torch.randint(256, (rows, tokens // 2), generator=generator)
    return torch.cat([half, half], 1).to(DEVICE)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--context", type=int, help="ranks of a sequence (default: all)")
    parser.add_argument("--tokens", type=int, default=512, help="of a row")
    parser.add_argument("--rows", type=int, default=1, help="of the batch, for each rank of dp")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--mixer", nargs="+", default=["gated_deltanet", "gsa", "attention"])
    parser.add_argument("--compile", action="store_true", help="compile each block")
    options = parser.parse_args()

    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    size = dist.get_world_size()
    context = options.context or size
    if size % context:
        parser.error(f"--context is {context} but should divide the {size} processes")
    if DEVICE == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    mesh = init_device_mesh(DEVICE, (size // context, context), mesh_dim_names=("dp", "cp"))

    torch.manual_seed(0)
    config = GirihConfig(
        mixer=options.mixer, num_hidden_layers=len(options.mixer), hidden_size=64, num_heads=2, head_dim=32
    )
    model = parallelize(GirihForCausalLM(config).to(DEVICE), mesh, compile=options.compile)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows = slice(options.rows * mesh.get_local_rank("dp"), options.rows * (mesh.get_local_rank("dp") + 1))
    for step in range(options.steps):
        ids = make_rows(step, options.rows * mesh["dp"].size(), options.tokens)[rows]
        with girih.context_parallel(mesh["cp"]):
            loss = model(ids, labels=ids).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step % 5 == 4 or step == 0):
            print(f"step {step + 1}: loss {loss.item():.3f} of {options.tokens} tokens in {context} pieces")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
