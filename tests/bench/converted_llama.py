"""A Llama of transformers before and after its conversion: `make bench OP=converted`.

About 340M parameters: 24 layers, 1024 wide, 16 heads of 64, MLPs of 2816, 32000 tokens, tied embeddings,
random weights in bf16; attention is SDPA's, in the model as it comes and where it stays.

Training: LoRA of peft, r = 16 on q, k, v and o, adapters in fp32, the rest frozen; 8 rows of 2048 tokens a
step, bf16 autocast. A step is forward with the model's own loss, backward, AdamW (fused) and zeroing the
gradients. Beside the model as it comes stand models with a linear memory injected (LiZA, m = 0.5), of which
attention is computed as before: what is lost is what the memory costs.

    tokens_per_second   by the median step
    peak_bytes          the most that is there in a step, weights included

Generation: `generate()` itself, greedy, with what its loop costs the host. A prompt of random tokens is read
once and its cache repeated for every sequence; the first 8 tokens after it are not timed (there transformers
compiles), the next 64 are, at contexts of 1024, 4096 and 16384 tokens. All sequences of a batch say the
same, which no model here can use.

    Llama               transformers' DynamicCache, which is copied for every token
    Llama, compiled     its StaticCache of just that length, and torch.compile, as `generate()` does it
    gsa, gated_deltanet all attention replaced; as they come, without compilation
    LiZA, window        injected at m = 1, attention sees 256 tokens (max_self_attn_length)

As many sequences as the card has room for the Llama's keys at that context, MOST at most; converted models
with as many, and with MOST of them, which the Llama cannot hold at the longer contexts.

    tokens_per_second   of all sequences together
    cache_bytes         of one sequence, when the last token is there
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from device import emptied, require_gpu
from results import FOLDER, keep_part, origin

LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 2816,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
ROWS, TOKENS, WARM_UPS, STEPS = 8, 2048, 3, 7
RANK, ADAPTED = 16, ["q_proj", "k_proj", "v_proj", "o_proj"]
CONTEXTS = (16384, 4096, 1024)  # the longest is compiled first, for its length alone
MOST = 256  # sequences
UNTIMED, TIMED = 8, 64
ROOM = 0.7  # of the card's free memory, for keys: one layer's are there twice while a token is appended

# What is done to the model, by name: None, or how, and its options.
AS_IT_COMES = "Llama"
TRAINED = {
    AS_IT_COMES: None,
    "LiZA": ("inject", {}),
    "LiZA, a step size a head": ("inject", {"gate_per": "head"}),
    "LiZA, a step size a head, n = 1": ("inject", {"gate_per": "head", "n": 1}),
}
COMPILED = "Llama, compiled"
DECODED = {
    AS_IT_COMES: None,
    COMPILED: None,
    "gsa": ("replace_attention", {"mixer": "gsa"}),
    "gated_deltanet": ("replace_attention", {"mixer": "gated_deltanet"}),
    "LiZA, window": ("inject", {"weight": 1.0, "max_self_attn_length": 256}),
}


def llama(conversion, device):
    """The model with random weights, converted as TRAINED or DECODED says."""
    import girih
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**LLAMA, attn_implementation="sdpa")).to(torch.bfloat16)
    if conversion is not None:
        how, options = conversion
        getattr(girih, how)(model, **options)
    return model


def adapted(model):
    """With LoRA on attention's projections, and nothing else to train."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=ADAPTED, task_type="CAUSAL_LM")
    return get_peft_model(model.train(), lora)


def training_step(model, optimizer, ids):
    with torch.autocast(ids.device.type, torch.bfloat16):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train(conversion, device):
    """The row of a model in training."""
    model = adapted(llama(conversion, device))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    ids = torch.randint(LLAMA["vocab_size"], (ROWS, TOKENS), device=device)
    on_card = ids.is_cuda
    if on_card:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(WARM_UPS + STEPS):
        started = time.perf_counter()
        loss = training_step(model, optimizer, ids).item()  # waits for the card
        seconds.append(time.perf_counter() - started)
    if not loss < float("inf"):
        raise FloatingPointError("the loss is not finite")
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained": sum(p.numel() for p in trained),
        "tokens_per_second": round(ROWS * TOKENS / statistics.median(seconds[WARM_UPS:])),
        "peak_bytes": torch.cuda.max_memory_allocated() if on_card else None,
    }


def tensors_of(cache):
    """Every tensor that a cache keeps of its text."""
    from girih.models.cache import StateLayer
    from girih.nn import map_state

    for layer in cache.layers:
        if isinstance(layer, StateLayer):
            found = []
            map_state(found.append, layer.state)
            yield from found
            layer = getattr(layer, "softmax", None)  # of an injected model: the keys beside its state
        if layer is not None and layer.keys is not None:
            yield layer.keys
            yield layer.values


def bytes_of_a_sequence(cache, sequences):
    """By what is held, of which tensors of fewer elements may be parts."""
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(cache)}
    return sum(held.values()) // sequences


@torch.no_grad()
def cache_after(model, prompt, sequences, length=None):
    """The cache of so many sequences that have read prompt `[1, T]`. length: of a StaticCache, its room."""
    from transformers import DynamicCache, StaticCache

    cache = DynamicCache(config=model.config)
    model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    if length is None:
        cache.batch_repeat_interleave(sequences)
        return cache
    static = StaticCache(model.config, max_cache_len=length)
    for room, layer in zip(static.layers, cache.layers, strict=True):
        room.update(*(part.expand(sequences, -1, -1, -1) for part in (layer.keys, layer.values)))
    return static


class Clock:
    """A stopping criterion of `generate()` that stops nothing, and reads the time when `UNTIMED` tokens and
    when all are there. The card is waited for at these two alone."""

    def __init__(self):
        self.tokens, self.times = 0, []

    def __call__(self, input_ids, scores, **kwargs):
        self.tokens += 1
        if self.tokens in (UNTIMED, UNTIMED + TIMED):
            if input_ids.is_cuda:
                torch.cuda.synchronize()
            self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def generate(model, prompt, sequences, compiled=False):
    """The tokens after prompt `[1, T + 1]`, `[sequences, UNTIMED + TIMED]`, and their row.

    All but the prompt's last token are read before, once for all sequences.
    """
    from transformers import StoppingCriteriaList

    tokens, clock = UNTIMED + TIMED, Clock()
    room = prompt.shape[1] + tokens if compiled else None
    cache = cache_after(model, prompt[:, :-1], sequences, room)
    ids = prompt.expand(sequences, -1).contiguous()
    text = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=tokens,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    began, ended = clock.times
    row = {
        "sequences": sequences,
        "ms_a_token": round(1e3 * (ended - began) / TIMED, 3),
        "tokens_per_second": round(sequences * TIMED / (ended - began)),
        "cache_bytes": bytes_of_a_sequence(cache, sequences),
    }
    return text[:, ids.shape[1] :], row


def written(*arguments):
    """The row alone."""
    return generate(*arguments)[1]


def keys_of_a_sequence(tokens):
    """Bytes of the Llama's keys and values of so many tokens, in bf16."""
    return 2 * 2 * LLAMA["num_hidden_layers"] * LLAMA["hidden_size"] * tokens


def carried(context, free):
    """How many sequences the Llama holds in so much free memory, at the end of the texts after a context."""
    whole = keys_of_a_sequence(context + UNTIMED + TIMED)
    return max(1, min(MOST, int(ROOM * free) // whole))


def texts(name, free):
    """What a model is asked to write: (context, sequences)."""
    for context in CONTEXTS:
        sequences = carried(context, free)
        for batch in sorted({sequences, MOST}) if DECODED[name] else [sequences]:
            yield context, batch


def attempt(measure, *arguments):
    """A row, or why there is none: a card may be too small for one of them."""
    try:
        return measure(*arguments)
    except torch.OutOfMemoryError:
        return {"error": "more memory than the card has"}


def trainings(device):
    """{name: row}, again with each further row."""
    rows = {}
    for name, conversion in TRAINED.items():
        rows[name] = attempt(train, conversion, device)
        print(f"LoRA, {name}: {rows[name]}", flush=True)
        yield rows
        emptied()


def generations(device, free):
    """{context: {name: {sequences: row}}}, likewise."""
    rows = {str(context): {} for context in sorted(CONTEXTS)}
    for name, conversion in DECODED.items():
        model = llama(conversion, device).eval()
        prompt = torch.randint(LLAMA["vocab_size"], (1, max(CONTEXTS) + 1), device=device)
        for context, sequences in texts(name, free):
            row = attempt(written, model, prompt[:, : context + 1], sequences, name == COMPILED)
            rows[str(context)].setdefault(name, {})[str(sequences)] = row
            print(f"{name}, context {context}, {sequences} sequences: {row}", flush=True)
            yield rows
            emptied()
        del model
        torch.compiler.reset()
        emptied()


def times(value, beside):
    return "" if None in (value, beside) else f"{value / beside:.2f}x"


def table_of_training(rows):
    """Markdown; ratios to the model as it comes."""
    from report import markdown

    cells, beside = [], rows[AS_IT_COMES]
    for name, row in rows.items():
        speed, peak = row.get("tokens_per_second"), row.get("peak_bytes")
        cells.append(
            [
                name,
                f"{row['trained'] / 1e6:.1f}M of {row['parameters'] / 1e6:.0f}M" if speed else "",
                row.get("error") or f"{speed:,}",
                times(speed, beside.get("tokens_per_second")),
                "" if peak is None else f"{peak / 2**30:.1f}",
                times(peak, beside.get("peak_bytes")),
            ]
        )
    return markdown(["LoRA on", "parameters trained", "tokens/s", "", "peak, GiB", ""], cells)


def best_of_llama(rows):
    """Tokens a second of the model as it comes, by the better of its caches."""
    speeds = [
        row["tokens_per_second"]
        for name in (AS_IT_COMES, COMPILED)
        for row in rows.get(name, {}).values()
        if "error" not in row
    ]
    return max(speeds, default=None)


def table_of_texts(contexts):
    """Markdown; ratios to the Llama's better cache at the same context."""
    from report import markdown

    cells = []
    for context, rows in contexts.items():
        best = best_of_llama(rows)
        for name, batches in rows.items():
            for sequences, row in batches.items():
                speed, kept = row.get("tokens_per_second"), row.get("cache_bytes")
                cells.append(
                    [
                        f"{int(context):,}",
                        name,
                        sequences,
                        "" if speed is None else f"{row['ms_a_token']:.1f}",
                        row.get("error") or f"{speed:,}",
                        times(speed, best),
                        "" if kept is None else f"{kept / 2**20:.1f}",
                    ]
                )
    heads = ["context", "", "sequences", "ms a token", "tokens/s", "", "cache of a sequence, MiB"]
    return markdown(heads, cells)


def table(parts):
    """Markdown of the file of results, each part with where it was measured."""
    shown = (("training", table_of_training), ("texts", table_of_texts))
    return "\n".join(made(parts[part]["rows"]) + origin(parts[part]) for part, made in shown if part in parts)


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="converted_llama", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the results are")
    parser.add_argument("--part", choices=["training", "texts"], help="one of the two alone")
    options = parser.parse_args(argv)
    require_gpu()
    import peft
    import transformers

    # A cache that grows finds no room in pieces that were cut to its earlier size.
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}"
    runs = {
        "training": lambda: trainings("cuda"),
        "texts": lambda: generations("cuda", torch.cuda.mem_get_info()[0]),
    }
    for part, run in runs.items():
        if options.part in (None, part):
            parts = keep_part(options.folder / "converted.json", part, run(), versions)
    print("\n" + table(parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
