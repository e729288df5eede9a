"""Short trainings of every mixer with every option value: are gradients bounded, does the loss fall?

    python tests/support/training_runs.py [--width 192] [--layers 3] [--rates 1e-3,3e-3,9e-3] [--only trellis]

prints a table with a row for each mixer and options: the largest gradient norm after the warm-up, before
clipping, and bits per byte over the first and the last tenth of the steps. The recipe is the recipe of the
comparison: AdamW with betas 0.9 and 0.95, weight decay 0.1, gradients clipped to 1, warm-up over a twentieth
of the steps, then a cosine.
"""

import argparse
import json
import math
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from girih.models import GirihConfig, GirihForCausalLM
from girih.nn import decay_parameter_names

STEPS, WARM_UP = 60, 3
LARGEST = 50.0  # bound of the gradient norm

WORDS = {  # for every mixer, the options that change its update rule
    "gsa": [{"feature": w} for w in ("softmax", "none", "silu", "relu", "relu2")]
    + [{"data_dependent_decay": False}, {"conv_size": 4}],
    "abc": [{}, {"conv_size": 4}],
    "delta_product": [{}, {"gated": False}, {"allow_neg_eigval": True}, {"n": 1}, {"n": 3}],
    "deltanet": [{}, {"allow_neg_eigval": True}],
    "gated_deltanet": [{}],
    "linear_attention": [{}, {"conv_size": 4}],
    "retnet": [{}],
    "gla": [{}, {"conv_size": 4}],
    "hgrn2": [{}],
    "mamba2": [{}],
    "gated_delta_product": [{}, {"n": 3}],
    "raven": [{}, {"slot_decay": True, "output_gate": True}, {"router_noise": True, "router_mlp": True}],
    "attention": [{}, {"window": 8}],
    "mag": [{}, {"mag_cross": True}, {"mag_learned": True}],
}
PHI = ("identity", "silu", "l2norm", "layer_norm", "l2_silu", "ln_silu", "softmax")
CHUNKS = (1, 4, 16, 64)
CHUNKED = {
    "trellis": [{"phi": phi} for phi in PHI]
    + [{"f": f} for f in PHI if f != "ln_silu"]
    + [
        {"gated": False},
        {"shared_qk": True},
        {"normalize_kv": False},
        {"value_read": "phi"},
        {"post_norm": False},
    ],
    "lattice": [{"objective": w} for w in ("decode", "encode", "similarity")]
    + [{"gated": False}, {"post_norm": True}],
    "delta_product": [{"between_chunks": w} for w in ("gelu", "tanh")],
    "ttt": [{}, {"conv_size": 0}],
}
RUNS = [(mixer, options) for mixer, all_options in WORDS.items() for options in all_options]
RUNS += [
    (mixer, options | {"chunk": chunk})
    for mixer, all_options in CHUNKED.items()
    for options in all_options
    for chunk in CHUNKS
]
RUNS += [("lattice", {"chunk": 1, "normalize": False}), ("lattice", {"chunk": 1, "shrinkage": 0.01})]
RUNS += [("cat", {"chunk": chunk}) for chunk in (4, 16, 64)]

# Without GIRIH_FULL tests train each option value with one chunk length, and the defaults with all lengths.
DEFAULTS = ({"phi": "ln_silu"}, {"objective": "decode"}, {})
SOME = [(mixer, options) for mixer, options in RUNS if mixer not in CHUNKED or "chunk" not in options]
SOME += [
    (mixer, options | {"chunk": chunk})
    for mixer, all_options in CHUNKED.items()
    for i, options in enumerate(all_options)
    for chunk in (CHUNKS if options in DEFAULTS else [CHUNKS[i % len(CHUNKS)]])
]


@dataclass(frozen=True)
class Result:
    largest: float  # largest gradient norm after the warm-up
    first: float  # bits per byte
    last: float


def text() -> torch.Tensor:
    """Bytes of Python's own sources, uint8."""
    return torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)


def train(mixer, options, rate, *, width=32, layers=2, tokens=None, batch=8, seed=0) -> Result:
    """Trains as described in the module's docstring. Two heads; 16 slots for mixers with slots; `tokens`
    bytes per row, by default two chunks and at least 32."""
    tokens = tokens or max(32, 2 * options.get("chunk", 16))
    slots = {"num_slots": 16} if mixer in ("gsa", "abc", "trellis", "lattice") else {}
    config = GirihConfig(
        mixer=mixer, hidden_size=width, num_heads=2, num_hidden_layers=layers, **(slots | options)
    )
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GirihForCausalLM(config).to(device).train()
    decayed = set(decay_parameter_names(model))
    groups = [
        {
            "params": [p for name, p in model.named_parameters() if (name in decayed) == decays],
            "weight_decay": 0.1 * decays,
        }
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
    data, draw = text(), torch.Generator().manual_seed(seed)
    norms, bits = [], []
    for step in range(STEPS):
        done = max(0.0, (step - WARM_UP) / (STEPS - WARM_UP))
        factor = (step + 1) / WARM_UP if step < WARM_UP else (1 + math.cos(math.pi * done)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate * factor
        starts = torch.randint(len(data) - tokens, (batch,), generator=draw)
        ids = torch.stack([data[start : start + tokens] for start in starts.tolist()]).long().to(device)
        loss = model(ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        bits.append(loss.item() / math.log(2))
        optimizer.step()
    tenth = STEPS // 10
    largest = max(norms[WARM_UP:], key=lambda norm: math.inf if math.isnan(norm) else norm)
    return Result(largest, sum(bits[:tenth]) / tenth, sum(bits[-tenth:]) / tenth)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rates", default="1e-3,3e-3,9e-3")
    parser.add_argument("--only", help="mixers separated by commas")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes, which share a GPU")
    arguments = parser.parse_args()
    rates = [float(rate) for rate in arguments.rates.split(",")]
    print("| mixer | options | " + " | ".join(f"lr {rate:g}: norm, bits" for rate in rates) + " |")
    print("|---|---|" + "---|" * len(rates))
    runs = [run for run in RUNS if not arguments.only or run[0] in arguments.only.split(",")]
    sizes = {"width": arguments.width, "layers": arguments.layers, "tokens": arguments.tokens}
    worst = 0.0
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool:
        cells = [[pool.submit(train, *run, rate, **sizes) for rate in rates] for run in runs]
        for (mixer, options), row_cells in zip(runs, cells, strict=True):
            found = [cell.result() for cell in row_cells]
            worst = max([worst, *(result.largest for result in found)])
            option_text = " ".join(
                f"{n}={x if isinstance(x, str) else json.dumps(x)}" for n, x in options.items()
            )
            row = (f"{result.largest:.3g}, {result.first:.2f} to {result.last:.2f}" for result in found)
            print(f"| {mixer} | {option_text} | {' | '.join(row)} |", flush=True)
    print(f"\nlargest norm of all: {worst:.3g}")
    return int(not worst <= LARGEST)


if __name__ == "__main__":
    sys.exit(main())
