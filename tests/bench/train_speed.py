"""Training speed of whole language models, and decoding in one CUDA graph: `make bench OP=model`.

340M parameters: 24 layers, 1024 wide, 4 heads, MLPs of 2816, 32000 tokens, tied embeddings; rows of 2048
tokens, bf16 autocast over fp32 weights. A step is forward, backward, AdamW (fused) and zeroing the gradients.

    girih gsa            gated slot attention, 64 slots
    girih attention      a Transformer: rotary positions, SDPA
    fla gsa              fla's model of the same sizes as it comes: fused norms, SwiGLU and cross entropy
    fla gsa unfused      the same with PyTorch's norms, SwiGLU and cross entropy, as girih's models have
    ... compiled         after torch.compile
"""

import argparse
import gc
import json
import statistics
import sys
import time
from datetime import date, datetime
from importlib.metadata import version
from pathlib import Path

import torch
from device import require_gpu
from results import FOLDER, write

CONTEXT, BATCH, WARM_UPS, STEPS = 2048, 8, 5, 10
DECODED = 128  # sequences that decode together
SIZES = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_heads": 4,
    "num_slots": 64,
    "intermediate_size": 2816,
    "tie_word_embeddings": True,
}


def girih_model(mixer, **sizes):
    from girih.models import GirihConfig, GirihForCausalLM

    return GirihForCausalLM(GirihConfig(mixer=mixer, **SIZES | sizes))


def fla_model(fused, **sizes):
    from fla.models import GSAConfig, GSAForCausalLM

    fuse = {f"fuse_{part}": fused for part in ("norm", "swiglu", "cross_entropy")}
    return GSAForCausalLM(GSAConfig(**SIZES | sizes, **fuse))


MODELS = {
    "girih gsa": lambda **sizes: girih_model("gsa", **sizes),
    "girih attention": lambda **sizes: girih_model("attention", **sizes),
    "fla gsa": lambda **sizes: fla_model(True, **sizes),
    "fla gsa unfused": lambda **sizes: fla_model(False, **sizes),
    "girih gsa compiled": lambda **sizes: torch.compile(girih_model("gsa", **sizes)),
    "girih attention compiled": lambda **sizes: torch.compile(girih_model("attention", **sizes)),
}
DEFAULT = ["girih gsa", "girih attention", "fla gsa", "fla gsa unfused"]


def training_step(model, optimizer, ids):
    with torch.autocast(ids.device.type, torch.bfloat16):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train(make):
    """Tokens a second, seconds of the first step, peak memory."""
    torch.manual_seed(0)
    model = make().cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)
    ids = torch.randint(SIZES["vocab_size"], (BATCH, CONTEXT), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(WARM_UPS + STEPS):
        started = time.perf_counter()
        loss = training_step(model, optimizer, ids)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    if not loss.isfinite():
        raise FloatingPointError("the loss is not finite")
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_per_second": round(BATCH * CONTEXT / statistics.median(seconds[WARM_UPS:])),
        "first_step_s": round(seconds[0], 2),
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


@torch.no_grad()
def decoding(model, batch, prompt=16):
    """A function that decodes one more token of every sequence greedily, and the tokens `[batch, 1]`."""
    device = model.device
    cache = model.new_cache()
    ids = torch.randint(model.config.vocab_size, (batch, prompt), device=device)
    token = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)

    @torch.no_grad()
    def step():
        token.copy_(model(token, past_key_values=cache).logits.argmax(-1))

    return step, token


def decode():
    """Tokens a second of greedy decoding with bf16 weights, every layer of a token in one CUDA graph."""
    from measure import graphed

    torch.manual_seed(0)
    model = girih_model("gsa").cuda().to(torch.bfloat16).eval()
    step, _ = decoding(model, DECODED)
    replay = graphed(step)
    seconds = []
    for _ in range(WARM_UPS + 10 * STEPS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        replay()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return {"tokens_per_second": round(DECODED / statistics.median(seconds[WARM_UPS:]))}


def table(rows):
    """Markdown; a ratio only to the model of the same run."""
    text = "| model | parameters | tokens/s | girih gsa is | peak MiB | first step, s |\n"
    text += "| --- | ---: | ---: | ---: | ---: | ---: |\n"
    ours = rows.get("girih gsa", {})
    for name, row in rows.items():
        if "parameters" in row:
            same = row["run"] == ours.get("run") and name != "girih gsa"
            ratio = f"{ours['tokens_per_second'] / row['tokens_per_second']:.2f}x" if same else ""
            text += (
                f"| {name} | {row['parameters']:,} | {row['tokens_per_second']:,} | {ratio} "
                f"| {row['peak_bytes'] / 2**20:,.0f} | {row['first_step_s']} |\n"
            )
    if "decode" in rows:
        speed = rows["decode"]["tokens_per_second"]
        text += f"\nDecoding {DECODED} sequences in one CUDA graph a token: {speed:,} tokens/s.\n"
    places = sorted({f"{row['device']}, {row['versions']}, {row['date']}" for row in rows.values()})
    return text + "\n" + "".join(f"- {place}\n" for place in places)


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="train_speed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join([*DEFAULT, "decode"]), help="names with commas")
    parser.add_argument("--peer", choices=["yes", "no"], default="yes", help="no: girih's models alone")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the results are")
    options = parser.parse_args(argv)
    require_gpu()
    file = options.folder / "model.json"
    options.folder.mkdir(parents=True, exist_ok=True)
    rows = json.loads(file.read_text())["models"] if file.exists() else {}
    run = datetime.now().isoformat(timespec="seconds")
    for name in options.models.split(","):
        if name != "decode" and name not in MODELS:
            print(f"bench: model {name}: unknown, there are {', '.join(MODELS)}, decode", file=sys.stderr)
            return 2
        if options.peer == "no" and name.startswith("fla"):
            continue
        versions = f"torch {torch.__version__}"
        try:
            row = decode() if name == "decode" else train(MODELS[name])
            if name.startswith("fla"):
                versions += f", flash-linear-attention {version('flash-linear-attention')}"
        except ImportError as error:
            print(f"{name}: its row stays empty: {error} (dependency group `bench` of pyproject.toml)")
            continue
        origin = {"run": run, "date": date.today().isoformat(), "device": torch.cuda.get_device_name()}
        rows[name] = row | origin | {"versions": versions}
        settings = SIZES | {"batch": BATCH, "context": CONTEXT}
        write(file, json.dumps({"settings": settings, "models": rows}, indent=1) + "\n")
        print(f"{name}: {row['tokens_per_second']:,} tokens/s", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    write(options.folder / "model.md", table(rows))
    print("\n" + table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
