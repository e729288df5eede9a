"""Training speed of whole language models, and decoding in one CUDA graph: `make bench OP=model`.

The models have 340M to 420M parameters: 24 layers, 1024 wide, MLPs of 2816 (Trellis: 2432), 32000 tokens,
tied embeddings. A step has 16384 tokens in rows of 2048 or of `--context`, with bf16 autocast and fp32
weights. A step is forward, backward, AdamW (fused) and zeroing the gradients.

    girih ...               a mixer of MIXERS in shapes.py with its options, loss in chunks; attention has
                            rotary positions and SDPA
    fla ...                 the model of fla with the same sizes and its defaults: fused norms, SwiGLU and
                            cross entropy
    fla ... unfused         the same with PyTorch's norms, SwiGLU and cross entropy
    ... compiled            after torch.compile
    ... graphed             the whole step in one CUDA graph, so that the host launches nothing else
    ... at T                in rows of T tokens
"""

import argparse
import json
import statistics
import sys
import time
from datetime import date, datetime
from functools import partial
from pathlib import Path

import torch
from device import free_memory, require_gpu
from peers import fla_version
from results import FOLDER, write
from shapes import MIXERS
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

CONTEXT, TOKENS, WARM_UPS, STEPS = 2048, 16384, 5, 10
DECODING_SEQUENCES = 128  # sequences that decode together
SIZES = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "intermediate_size": 2816,
    "tie_word_embeddings": True,
}


def girih_model(mixer, **sizes):
    from girih.models import GirihConfig, GirihForCausalLM

    return GirihForCausalLM(GirihConfig(mixer=mixer, loss_in_chunks=True, **SIZES | MIXERS[mixer][0] | sizes))


def fla_model(mixer, fused, **sizes):
    import fla.models

    name, fla_sizes = MIXERS[mixer][1]
    config, model = getattr(fla.models, f"{name}Config"), getattr(fla.models, f"{name}ForCausalLM")
    fuse = {f"fuse_{part}": fused for part in ("norm", "swiglu", "cross_entropy")}
    return model(config(**SIZES | fla_sizes | sizes, **fuse))


def models():
    """The functions that build each model, by name."""
    eager_models = {}
    for mixer, (_, peer) in MIXERS.items():
        eager_models[f"girih {mixer}"] = partial(girih_model, mixer)
        if peer:
            eager_models[f"fla {mixer}"] = partial(fla_model, mixer, True)
            eager_models[f"fla {mixer} unfused"] = partial(fla_model, mixer, False)
    compiled = {
        f"{name} compiled": lambda make=make, **sizes: torch.compile(make(**sizes))
        for name, make in eager_models.items()
        if name.startswith("girih")
    }
    in_graphs = {f"{name} graphed": make for name, make in eager_models.items() if name.startswith("girih")}
    return eager_models | compiled | in_graphs


MODELS = models()
DEFAULT = [name for name in MODELS if not name.endswith(("compiled", "graphed"))]


def training_step(model, optimizer, ids):
    with torch.autocast(ids.device.type, torch.bfloat16):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def capture_graph(model, optimizer, ids):
    """A function that replays a training step on the current contents of ids. The optimizer is
    `capturable`."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(3):  # one-time work happens before the capture
            training_step(model, optimizer, ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        loss = training_step(model, optimizer, ids)

    def step():
        graph.replay()
        return loss

    return step


def milliseconds_of_the_card(call):
    """Milliseconds of all kernels and copies of the call, without their launches on the host."""
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        call()
        torch.cuda.synchronize()
    work = (e for e in record.events() if e.device_type == DeviceType.CUDA and not e.is_user_annotation)
    return sum(e.self_device_time_total for e in work) / 1e3


def train(make, context, in_graph=False):
    """Tokens a second, time of a step on the card, seconds of the first step, peak memory."""
    torch.manual_seed(0)
    model = make().cuda().train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True, capturable=in_graph
    )
    ids = torch.randint(SIZES["vocab_size"], (TOKENS // context, context), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    step = capture_graph(model, optimizer, ids) if in_graph else partial(training_step, model, optimizer, ids)
    for _ in range(WARM_UPS + STEPS):
        started = time.perf_counter()
        loss = step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated()
    if not loss.isfinite():
        raise FloatingPointError("the loss is not finite")
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_per_second": round(TOKENS / statistics.median(seconds[WARM_UPS:])),
        "card_ms": round(milliseconds_of_the_card(step), 1),
        "first_step_s": None if in_graph else round(seconds[0], 2),
        "peak_bytes": peak,
    }


@torch.no_grad()
def decoding(model, batch, prompt=16):
    """A function that greedily decodes one more token of every sequence, and the tokens `[batch, 1]`."""
    device = model.device
    cache = model.new_cache()
    ids = torch.randint(model.config.vocab_size, (batch, prompt), device=device)
    token = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)

    @torch.no_grad()
    def step():
        token.copy_(model(token, past_key_values=cache).logits.argmax(-1))

    return step, token


def decode():
    """Tokens a second of greedy decoding with bf16 weights. A token is one CUDA graph."""
    from measure import capture_graph

    torch.manual_seed(0)
    model = girih_model("gsa").cuda().to(torch.bfloat16).eval()
    step, _ = decoding(model, DECODING_SEQUENCES)
    replay = capture_graph(step)
    seconds = []
    for _ in range(WARM_UPS + 10 * STEPS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        replay()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return {"tokens_per_second": round(DECODING_SEQUENCES / statistics.median(seconds[WARM_UPS:]))}


def compared_model(name):
    """The model of girih that a model is compared with."""
    name, separator, context = name.partition(" at ")
    ours = f"girih {name.split()[1]}"
    return ("girih gsa" if ours == "girih attention" else ours) + separator + context


def table(rows):
    """Markdown. A ratio is shown only to a model of the same run."""
    text = "| model | parameters | tokens/s | beside it | the card's ms a step | peak MiB | first step, s |\n"
    text += "| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
    for name, row in rows.items():
        if "parameters" in row:
            ours = rows.get(compared_model(name), {})
            same = row["run"] == ours.get("run") and name != compared_model(name)
            ratio = ours["tokens_per_second"] / row["tokens_per_second"] if same else None
            text += (
                f"| {name} | {row['parameters']:,} | {row['tokens_per_second']:,} "
                f"| {f'{compared_model(name)} {ratio:.2f}x' if same else ''} | {row.get('card_ms', '')} "
                f"| {row['peak_bytes'] / 2**20:,.0f} | {row['first_step_s'] or ''} |\n"
            )
    if "decode" in rows:
        speed = rows["decode"]["tokens_per_second"]
        text += f"\nDecoding {DECODING_SEQUENCES} sequences in one CUDA graph a token: {speed:,} tokens/s.\n"
    places = sorted({f"{row['device']}, {row['versions']}, {row['date']}" for row in rows.values()})
    return text + "\n" + "".join(f"- {place}\n" for place in places)


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="train_speed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join([*DEFAULT, "decode"]), help="names with commas")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens of a row, a divisor of 16384")
    parser.add_argument("--peer", choices=["yes", "no"], default="yes", help="no: girih's models alone")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the results are")
    options = parser.parse_args(argv)
    if options.context < 1 or TOKENS % options.context:
        parser.error(f"--context {options.context}: should be a divisor of {TOKENS}")
    require_gpu()
    file = options.folder / "model.json"
    options.folder.mkdir(parents=True, exist_ok=True)
    rows = json.loads(file.read_text())["models"] if file.exists() else {}
    run = datetime.now().isoformat(timespec="seconds")
    for name in options.models.split(","):
        if name != "decode" and name not in MODELS:
            print(
                f"bench: model {name}: unknown; expected one of {', '.join(MODELS)}, decode", file=sys.stderr
            )
            return 2
        if options.peer == "no" and name.startswith("fla"):
            continue
        versions = f"torch {torch.__version__}"
        row_name = name if name == "decode" or options.context == CONTEXT else f"{name} at {options.context}"
        try:
            row = (
                decode()
                if name == "decode"
                else train(MODELS[name], options.context, name.endswith("graphed"))
            )
            if name.startswith("fla"):
                versions += f", {fla_version()}"
        except ImportError as error:
            print(f"{name}: its row stays empty: {error} (dependency group `bench` of pyproject.toml)")
            continue
        except RuntimeError as error:  # out of memory, or an error of a peer
            if not name.startswith("fla") and not isinstance(error, torch.OutOfMemoryError):
                raise
            print(f"{name}: its row stays empty: {error}".splitlines()[0])
            continue
        origin = {"run": run, "date": date.today().isoformat(), "device": torch.cuda.get_device_name()}
        rows[row_name] = row | origin | {"versions": versions}
        settings = SIZES | {"mixers": {name: ours for name, (ours, _) in MIXERS.items()}}
        settings |= {"tokens": TOKENS, "context": CONTEXT}
        write(file, json.dumps({"settings": settings, "models": rows}, indent=1) + "\n")
        print(f"{row_name}: {row['tokens_per_second']:,} tokens/s", flush=True)
        free_memory()
    write(options.folder / "model.md", table(rows))
    print("\n" + table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
