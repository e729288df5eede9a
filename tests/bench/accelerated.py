"""Linear layers of transformers before and after `girih.accelerate`: `make bench OP=accelerate`.

    Qwen3-Next layer    Gated DeltaNet: 2048 wide, 16 key and 32 value heads of 128
    Mamba-2 layer       2048 wide, 64 heads of 64, states of 128, one group
    decoding            4 Qwen3-Next layers, 1 and 64 sequences, cache of transformers, token by token

The layers read one row of 8192 tokens in bf16. Times are those of the card; peak memory excludes the memory
in use before. If transformers uses an installed package (flash-linear-attention, causal-conv1d, mamba-ssm),
the result still counts as "transformers".
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from datetime import date
from pathlib import Path

import torch
from device import free_memory, require_gpu
from results import FOLDER, write
from torch import nn

TOKENS, NEW_TOKENS = 8192, 32
SEQUENCES = (1, 64)
QWEN3_NEXT = {
    "hidden_size": 2048,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
MAMBA2 = {"hidden_size": 2048, "num_heads": 64, "head_dim": 64, "state_size": 128, "n_groups": 1, "expand": 2}
DECODING_MODEL = QWEN3_NEXT | {
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "intermediate_size": 5120,
    "vocab_size": 32000,
    "mlp_only_layers": [0, 1, 2, 3],
}


def layer_of(family):
    """One linear layer with random weights, in bf16 on the GPU."""
    torch.manual_seed(0)
    if family == "Qwen3-Next layer":
        from transformers import Qwen3NextConfig
        from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

        config = Qwen3NextConfig(**QWEN3_NEXT, num_hidden_layers=1, layer_types=["linear_attention"])
        layer = Qwen3NextGatedDeltaNet(config, 0)
    else:
        from transformers import Mamba2Config
        from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

        layer = Mamba2Mixer(Mamba2Config(**MAMBA2, num_hidden_layers=1), 0)
    for p in layer.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.02)
    return layer.cuda().bfloat16()


def measure_layer(card, layer):
    """Milliseconds of forward, milliseconds of forward and backward, and the peak memory of both."""
    from measure import peak_bytes

    x = torch.randn(1, TOKENS, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)

    @torch.no_grad()
    def forward():
        layer(x)

    def forward_backward():
        torch.autograd.grad(layer(x), [x, *layer.parameters()], dy)

    parts = {
        "forward": lambda: card.milliseconds(forward),
        "forward_backward": lambda: card.milliseconds(forward_backward),
        "peak_bytes": lambda: peak_bytes(forward_backward),
    }
    figures = {}
    for name, part in parts.items():
        try:
            figures[name] = part()
        except torch.OutOfMemoryError:
            figures["error"] = "more memory than the card has"
    return figures


@torch.no_grad()
def milliseconds_a_token(model, sequences):
    """Milliseconds a token of greedy decoding with the cache of transformers, including the host."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    ids = torch.randint(32000, (sequences, 64), device="cuda")
    token = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
    times = []
    for _ in range(NEW_TOKENS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[5:])


def measure_all():
    """{what: {"transformers": figures, "girih": figures}}"""
    from girih import accelerate
    from measure import Card
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    card, rows = Card(), {}
    for family in ("Qwen3-Next layer", "Mamba-2 layer"):
        layer = layer_of(family)
        before = measure_layer(card, layer)
        with accelerate(layer):
            rows[family] = {"transformers": before, "girih": measure_layer(card, layer)}
        print(family, rows[family], flush=True)
        del layer
        free_memory()
    torch.manual_seed(0)
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**DECODING_MODEL)).cuda().bfloat16().eval()
    for sequences in SEQUENCES:
        before = {"ms_a_token": milliseconds_a_token(model, sequences)}
        with accelerate(model):
            after = {"ms_a_token": milliseconds_a_token(model, sequences)}
        rows[f"decoding, {sequences} sequences"] = {"transformers": before, "girih": after}
        print(sequences, before, after, flush=True)
    return rows


def table(result):
    """Markdown of the file of results."""
    from report import markdown, mib, ms, ratio

    titles = {
        "forward": ("forward, ms", ms),
        "forward_backward": ("with backward, ms", ms),
        "peak_bytes": ("peak, MiB", mib),
        "ms_a_token": ("ms a token", ms),
    }
    cells = []
    for what, sides in result["rows"].items():
        for key, (title, show) in titles.items():
            if key in sides["girih"]:
                ours, theirs = sides["girih"][key], sides["transformers"].get(key)
                error = sides["transformers"].get("error", "")
                cells.append([what, title, show(ours), show(theirs) or error, ratio(ours, theirs)])
    text = markdown(["model", "measure", "accelerated", "transformers", "ratio"], cells)
    return text + f"\n- {result['device']}, {result['versions']}, {result['date']}\n"


def main(argv=None):
    import transformers

    parser = argparse.ArgumentParser(
        prog="accelerated", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the results are")
    options = parser.parse_args(argv)
    require_gpu()
    warnings.filterwarnings("ignore", message=".*girih.accelerate")
    result = {
        "rows": measure_all(),
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
    }
    options.folder.mkdir(parents=True, exist_ok=True)
    write(options.folder / "accelerate.json", json.dumps(result, indent=1) + "\n")
    print("\n" + table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
