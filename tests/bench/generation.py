"""Generation by CAT and by a Transformer with a static cache: `make bench OP=generation`.

The sizes are those of the paper (appendix E.3). CAT has 12 layers, 2048 wide, and a compressor of 6 layers,
1024 wide, with C of 8 and 32. One Transformer has 12 layers of the same width, another has half the width as
in the paper. 50257 tokens, bf16 weights, greedy, texts of 1024 and 4096 tokens. Every model decodes as many
sequences as the card holds, with a step in one CUDA graph. A cache is allocated for the whole text, and a
step reads all of the cache, so all steps cost the same. STEPS steps are measured, a multiple of the chunk. In
CAT, a token that ends a chunk is another graph, which contains the compressor.

    tokens_per_second   of all sequences together
    cache_bytes         of one sequence, at the full length of the text

The second part measures a token of greedy `generate()` after a prompt of 128 tokens. The models have 24
layers, 1024 wide, 32000 tokens, bf16, at batch 1, 64 and 128. They are compared with a Llama of the same
sizes, compiled by transformers with its static cache; with the models of fla at batch 1; and with the same
models in C++ by girih-generate, which reports the mean of all tokens after the first.

The third part measures the same for CAT, compared with attention. Padded prompts have from half of the 128
tokens to all of them, so that sequences end their chunks at different tokens.

    ms_a_token          the median token; mean_ms: includes the tokens before the graph and its capture;
                        late_ms: the mean of the second half, including CAT's compressions
    start_s             of girih-generate: from the start of the process to the first token
"""

import argparse
import itertools
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from device import free_memory, require_gpu
from girih import _library
from results import FOLDER, origin, store_part

VOCABULARY, LAYERS, WIDTH, HEAD = 50257, 12, 2048, 128
LENGTHS, CHUNKS, WARM_UPS, STEPS = (1024, 4096), (8, 32), 3, 256
TOKEN_LAYERS, TOKEN_WIDTH, TOKEN_HEADS, PROMPT, BATCHES = 24, 1024, 16, 128, (1, 64, 128)
TOKEN_SIZES = {"vocab_size": 32000, "num_hidden_layers": TOKEN_LAYERS, "hidden_size": TOKEN_WIDTH}
TOKEN_CHUNK = 16  # chunk length of CAT
NEW, NEW_OF_FLA = 128, 32  # tokens; fewer tokens are enough for the median of slow models
PROGRAM = Path(__file__).parents[2] / "build" / _library.loaded.name / "bin" / "girih-generate"
IN_CPP = ("GSA", "Gated DeltaNet")
EXTRA_BYTES = 2**20  # bytes of a sequence while a token is decoded, in addition to its cache: mainly logits


def models():
    """The configuration of each model, by name."""
    shared = {"vocab_size": VOCABULARY, "num_hidden_layers": LAYERS, "max_position_embeddings": max(LENGTHS)}
    wide = shared | {"hidden_size": WIDTH, "num_heads": WIDTH // HEAD}
    half = shared | {"hidden_size": WIDTH // 2, "num_heads": WIDTH // 2 // HEAD}
    cats = {
        f"CAT C={chunk}": wide
        | {
            "mixer": "cat",
            "chunk": chunk,
            "compressor_hidden_size": WIDTH // 2,
            "compressor_layers": LAYERS // 2,
        }
        for chunk in CHUNKS
    }
    return cats | {
        "Transformer": wide | {"mixer": "attention"},
        "Transformer, half as wide": half | {"mixer": "attention"},
    }


class StaticAttention(torch.nn.Module):
    """A girih Attention whose keys and values of `slots` tokens are allocated in advance."""

    def __init__(self, layer, batch, slots):
        super().__init__()
        self.layer = layer
        weight = layer.o_proj.weight
        shape = batch, layer.heads[1], slots, layer.head_dim
        self.k, self.v = (torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in range(2))
        self.position = torch.zeros(1, dtype=torch.long, device=weight.device)

    def forward(self, x, attention_mask=None, state=None, use_cache=False, cu_seqlens=None):
        from girih.nn import rotary

        layer = self.layer
        q, k, v = layer.qkv_proj(x).unflatten(-1, (-1, layer.head_dim)).split(layer.heads, 2)
        q, k = (rotary(p, self.position, layer.rope_theta) for p in (q, k))
        for buffer, new in ((self.k, k), (self.v, v)):
            buffer.index_copy_(2, self.position, new.transpose(1, 2))
        mask = torch.arange(self.k.shape[2], device=x.device) <= self.position
        self.position += 1
        o = F.scaled_dot_product_attention(q.transpose(1, 2), self.k, self.v, attn_mask=mask[None])
        return layer.o_proj(o.transpose(1, 2).flatten(-2)), None


class Decoder:
    """Greedy decoding of sequences from their first token, one `token [batch, 1]` at a time."""

    def __init__(self, model, batch, slots):
        self.model, self.cache = model, model.new_cache()
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
        self.chunk = model.config.chunk if model.config.is_whole_cat else None
        if self.chunk is None:
            for block in model.model.layers:
                block.mixer = StaticAttention(getattr(block.mixer, "layer", block.mixer), batch, slots)
            self.cache_tensors = [t for block in model.model.layers for t in (block.mixer.k, block.mixer.v)]
        else:
            with torch.no_grad():
                model(self.token[:1, :0], past_key_values=self.cache)  # creates the first header
            layer = self.cache.layers[0]
            layer.state = layer.state.with_room(slots)
            # from the room of one sequence, so that no second cache is allocated
            self.cache.batch_repeat_interleave(batch)
            self.cache_tensors = [t for kv in layer.state.kv for t in kv]

    def bytes_of_a_sequence(self):
        return sum(t.nbytes for t in self.cache_tensors) // self.token.shape[0]

    def ends(self, tokens):
        """True if the token after `tokens` tokens ends a chunk."""
        return self.chunk is not None and (tokens + 1) % self.chunk == 0

    @torch.no_grad()
    def step(self):
        self.token.copy_(self.model(self.token, past_key_values=self.cache).logits.argmax(-1))

    def go_to(self, tokens):
        """Sets the number of tokens of the sequences, whatever the tokens are."""
        if self.chunk is None:
            for block in self.model.model.layers:
                block.mixer.position.fill_(tokens)
        else:
            layer = self.cache.layers[0]
            seq_lengths = layer.state.seq_lengths
            layer.state = layer.state._replace(
                seq_lengths=seq_lengths._replace(tokens=seq_lengths.tokens.fill_(tokens), host_tokens=tokens)
            )

    def graphs(self):
        """{whether a chunk ends: function that replays such a step}"""
        replays, stream = {}, torch.cuda.Stream()
        for tokens in (0,) if self.chunk is None else (0, self.chunk - 1):
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    self.go_to(tokens)
                    self.step()
                self.go_to(tokens)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                self.step()
            replays[self.ends(tokens)] = graph.replay
        self.go_to(0)
        return replays


def build_model(device, make):
    """The model with random weights in bf16."""
    torch.manual_seed(0)
    with torch.device(device):
        return make().to(torch.bfloat16).eval()


def measure(config, length):
    """Measures one model at one length, with as many sequences as the card holds."""
    from girih.models import GirihConfig, GirihForCausalLM

    model = build_model("cuda", lambda: GirihForCausalLM(GirihConfig(**config)))
    bytes_a_sequence = Decoder(model, 1, length).bytes_of_a_sequence() + EXTRA_BYTES
    batch = max(1, int(0.8 * torch.cuda.mem_get_info()[0] / bytes_a_sequence) // 32 * 32)
    decoder = Decoder(model, batch, length)
    replays = decoder.graphs()
    for timed in (False, True):
        decoder.go_to(0)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for t in range(STEPS if timed else max(CHUNKS)):
            replays[decoder.ends(t)]()
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    return {
        "parameters": model.num_parameters(),
        "batch": batch,
        "cache_bytes": decoder.bytes_of_a_sequence(),
        "ms_a_step": round(1e3 * seconds / STEPS, 3),
        "tokens_per_second": round(batch * STEPS / seconds),
    }


def decoders():
    """For each model of 24 layers, by name: the function that builds it, and the options of its
    `generate()`."""
    from girih.models import GirihConfig, GirihForCausalLM
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = TOKEN_SIZES
    mixers = {
        "GSA": "gsa",
        "Gated DeltaNet": "gated_deltanet",
        "GSA, every 4th attention": (["gsa"] * 3 + ["attention"]) * (TOKEN_LAYERS // 4),
        "Gated DeltaNet, every 4th attention": (["gated_deltanet"] * 3 + ["attention"]) * (TOKEN_LAYERS // 4),
        "attention": "attention",
    }
    configs = {
        # Values are as wide as keys, as in the figures of docs/decoding.md.
        name: GirihConfig(
            **sizes,
            num_heads=TOKEN_HEADS,
            mixer=mixer,
            **({"expand_v": 1} if "gated_deltanet" in mixer else {}),
        )
        for name, mixer in mixers.items()
    }
    llama = LlamaConfig(
        **sizes,
        num_attention_heads=TOKEN_HEADS,
        intermediate_size=configs["attention"].intermediate_size,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    builders = {
        name: (lambda config=config: GirihForCausalLM(config), {}) for name, config in configs.items()
    }
    static = {"cache_implementation": "static"}
    builders["Llama, compiled"] = (lambda: LlamaForCausalLM(llama), static)
    fla_options = {"max_new_tokens": NEW_OF_FLA}
    return builders | {name: (make, fla_options) for name, make in fla_models(sizes).items()}


def decoders_of_cat():
    from girih.models import GirihConfig, GirihForCausalLM

    config = GirihConfig(**TOKEN_SIZES, num_heads=TOKEN_HEADS, mixer="cat", chunk=TOKEN_CHUNK)
    name = f"CAT C={TOKEN_CHUNK}"
    return {
        "attention": decoders()["attention"],
        name: (lambda: GirihForCausalLM(config), {}),
        f"{name}, padded prompts": (lambda: GirihForCausalLM(config), {"padded": True}),
    }


def fla_models(sizes):
    """fla's models of about the same sizes, or none if fla is not installed."""
    try:
        import fla.models
    except ImportError:
        return {}
    options = {"tie_word_embeddings": True, "intermediate_size": 2816, "fuse_cross_entropy": False}
    gsa = fla.models.GSAConfig(num_heads=TOKEN_HEADS, num_slots=64, **sizes, **options)
    heads = {"num_heads": TOKEN_HEADS, "head_dim": 64, "expand_v": 1}
    gated_deltanet = fla.models.GatedDeltaNetConfig(**heads, **sizes, **options)
    return {
        "fla GSA": lambda: fla.models.GSAForCausalLM(gsa),
        "fla Gated DeltaNet": lambda: fla.models.GatedDeltaNetForCausalLM(gated_deltanet),
    }


def times_in_cpp(make, batches, device="cuda"):
    """The same texts by girih-generate, in one process for each batch: (batch, row)."""
    model = build_model(device, make)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for batch in batches:
            for _ in range(2):  # the files of the second run are in memory
                row = time_in_cpp(folder, batch, device)
            yield batch, {"parameters": model.num_parameters()} | row


def time_in_cpp(folder, batch, device):
    prompts = [" ".join(str((7 * i + 13 * j) % 32000) for j in range(PROMPT)) for i in range(batch)]
    options = ["--ids", "--lines", "--device", device, "--max-new-tokens", str(NEW)]
    started = time.perf_counter()
    done = subprocess.run(
        [PROGRAM, folder, *options], input="\n".join(prompts) + "\n", capture_output=True, text=True
    )
    seconds = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(done.stderr)
    match = re.search(r"tokens in ([\d.]+) s.*first after ([\d.]+) s.*, ([\d.]+) ms a token", done.stderr)
    whole, first, each = map(float, match.groups())
    return {"ms_a_token": each, "mean_ms": each, "start_s": round(seconds - whole + first, 2)}


def padding(batch):
    """The mask of prompts that are padded on the left, with lengths from half of PROMPT to PROMPT."""
    lengths = torch.linspace(PROMPT / 2, PROMPT, batch, device="cuda").long()
    return (torch.arange(PROMPT, device="cuda") >= PROMPT - lengths[:, None]).long()


def time_of_a_token(make, options, batch):
    """Times of a token, after a first text that compiles the model."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Clock(StoppingCriteria):
        """Reads the time at each token. generate() waits for every token."""

        def __call__(self, input_ids, scores, **kwargs):
            times.append(time.perf_counter())
            return go_on

    model = build_model("cuda", make)
    ids = torch.randint(32000, (batch, PROMPT), device="cuda")
    go_on = torch.zeros(batch, dtype=torch.bool, device="cuda")
    options = {"max_new_tokens": NEW} | options
    if options.pop("padded", False):
        options["attention_mask"] = padding(batch)
    for _ in range(2):
        times = []
        criteria = StoppingCriteriaList([Clock()])
        model.generate(ids, **options, do_sample=False, stopping_criteria=criteria)
    tokens = [1e3 * (b - a) for a, b in itertools.pairwise(times)]
    return {
        "parameters": model.num_parameters(),
        "ms_a_token": round(statistics.median(tokens), 3),
        "mean_ms": round(statistics.mean(tokens), 3),
        "late_ms": round(statistics.mean(tokens[len(tokens) // 2 :]), 3),
    }


def table_of_tokens(result):
    """Markdown. Ratios are relative to the Llama of the same run and batch."""
    text = "| batch | model | parameters | ms a token, median | to Llama | mean | start to first token, s |\n"
    text += "| ---: | --- | ---: | ---: | ---: | ---: | ---: |\n"
    for batch, rows in result["tokens"]["rows"].items():
        baseline = rows.get("Llama, compiled", {}).get("ms_a_token")
        for name, row in rows.items():
            ratio = f"{row['ms_a_token'] / baseline:.2f}x" if baseline else ""
            text += (
                f"| {batch} | {name} | {row['parameters']:,} | {row['ms_a_token']} | {ratio} "
                f"| {row['mean_ms']} | {row.get('start_s', '')} |\n"
            )
    return text + origin(result["tokens"])


def table_of_cat(result):
    """Markdown. Ratios are relative to attention in the same run and batch, for the second half of the
    tokens."""
    text = "| batch | model | parameters | ms a token, median | mean of the second half "
    text += "| to attention | mean |\n"
    text += "| ---: | --- | ---: | ---: | ---: | ---: | ---: |\n"
    for batch, rows in result["cat"]["rows"].items():
        for name, row in rows.items():
            ratio = row["late_ms"] / rows["attention"]["late_ms"]
            text += (
                f"| {batch} | {name} | {row['parameters']:,} | {row['ms_a_token']} | {row['late_ms']} "
                f"| {ratio:.2f}x | {row['mean_ms']} |\n"
            )
    return text + origin(result["cat"])


def table(result):
    """Markdown. Ratios are relative to the Transformer of the same run and length."""
    text = "| N | model | parameters | sequences | ms a step | tokens/s | to Transformer "
    text += "| cache of a sequence, MiB | to Transformer |\n"
    text += "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
    for length, rows in result["texts"]["rows"].items():
        baseline = rows["Transformer"]
        for name, row in rows.items():
            speed = row["tokens_per_second"] / baseline["tokens_per_second"]
            cache_ratio = baseline["cache_bytes"] / row["cache_bytes"]
            text += (
                f"| {length} | {name} | {row['parameters']:,} | {row['batch']:,} | {row['ms_a_step']} "
                f"| {row['tokens_per_second']:,} | {speed:.2f}x "
                f"| {row['cache_bytes'] / 2**20:.1f} | {cache_ratio:.1f}x less |\n"
            )
    return text + origin(result["texts"])


def measure_tokens(is_cat=False):
    """{batch: {model: row}}, yielded after every new row."""
    found = {str(batch): {} for batch in BATCHES}
    for name, (make, options) in (decoders_of_cat() if is_cat else decoders()).items():
        batches = BATCHES[:1] if name.startswith("fla") else BATCHES[1:] if "padded" in options else BATCHES
        for batch in batches:
            row = found[str(batch)][name] = time_of_a_token(make, options, batch)
            print(f"batch {batch}, {name}: {row['ms_a_token']} ms a token", flush=True)
            yield found
            free_memory()
    for name in IN_CPP if PROGRAM.exists() and not is_cat else ():
        for batch, row in times_in_cpp(decoders()[name][0], BATCHES):
            found[str(batch)][f"{name} in C++"] = row
            print(f"batch {batch}, {name} in C++: {row['ms_a_token']} ms a token", flush=True)
            yield found


def measure_texts():
    """{length: {model: row}}, yielded after every new row."""
    found = {}
    for length in LENGTHS:
        rows = found[str(length)] = {}
        for name, config in models().items():
            rows[name] = measure(config, length)
            print(f"N {length}, {name}: {rows[name]['tokens_per_second']:,} tokens/s", flush=True)
            yield found
            free_memory()


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="generation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the results are")
    parser.add_argument("--part", choices=["tokens", "cat", "texts"], help="one of the three alone")
    options = parser.parse_args(argv)
    require_gpu()
    file = options.folder / "generation.json"
    for part, run, text in (
        ("tokens", measure_tokens, table_of_tokens),
        ("cat", lambda: measure_tokens(is_cat=True), table_of_cat),
        ("texts", measure_texts, table),
    ):
        if options.part in (None, part):
            print("\n" + text(store_part(file, part, run(), f"torch {torch.__version__}")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
