"""A Llama of transformers before and after its conversion: `make bench OP=converted`.

The model has about 340M parameters: 24 layers, 1024 wide, 16 heads of 64, MLPs of 2816, 32000 tokens, tied
embeddings, random weights in bf16. All attention is computed by SDPA.

Training uses LoRA of peft: r = 16 on q, k, v and o, adapters in fp32, all else frozen; 8 rows of 2048 tokens
a step, bf16 autocast. A step is forward with the model's own loss, backward, AdamW (fused) and zeroing the
gradients. The converted models have an injected linear memory (LiZA, m = 0.5). They compute the same
attention, so the difference is the cost of the memory.

    tokens_per_second   by the median step
    peak_bytes          peak memory of a step, weights included

Generation is greedy `generate()`, including the host time of its loop. A prompt of random tokens is read
once, and its cache is repeated for every sequence. The first 8 tokens are not timed, because transformers
compiles there. The next 64 are timed, at contexts of 1024, 4096 and 16384 tokens. All sequences of a batch
have the same text; no model here benefits from this.

    Llama               DynamicCache of transformers, which is copied for every token
    Llama, compiled     StaticCache of exactly the required length, and torch.compile, as in `generate()`
    gsa, gated_deltanet all attention replaced, without compilation
    LiZA, window        injected at m = 1, attention sees 256 tokens (max_self_attn_length)

The number of sequences is limited by the memory for the Llama's keys at that context, and is at most MOST.
The converted models run with the same number, and with MOST, for which the Llama has no room at longer
contexts.

    tokens_per_second   of all sequences together
    cache_bytes         of one sequence, after the last token
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from device import free_memory, require_gpu
from results import FOLDER, origin, store_part

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
RANK, LORA_TARGETS = 16, ["q_proj", "k_proj", "v_proj", "o_proj"]
CONTEXTS = (16384, 4096, 1024)  # the longest context is compiled first, for its own length
MOST = 256  # sequences
UNTIMED, TIMED = 8, 64
# share of the card's free memory for keys; the keys of one layer exist twice while a token is appended
ROOM = 0.7

# The conversion of each model, by name: None, or a function of girih and its options.
UNCHANGED = "Llama"
TRAINING = {
    UNCHANGED: None,
    "LiZA": ("inject", {}),
    "LiZA, a step size a head": ("inject", {"gate_per": "head"}),
    "LiZA, a step size a head, n = 1": ("inject", {"gate_per": "head", "n": 1}),
}
COMPILED = "Llama, compiled"
DECODING = {
    UNCHANGED: None,
    COMPILED: None,
    "gsa": ("replace_attention", {"mixer": "gsa"}),
    "gated_deltanet": ("replace_attention", {"mixer": "gated_deltanet"}),
    "LiZA, window": ("inject", {"weight": 1.0, "max_self_attn_length": 256}),
}


def llama(conversion, device):
    """The model with random weights, converted as given in TRAINING or DECODING."""
    import girih
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**LLAMA, attn_implementation="sdpa")).to(torch.bfloat16)
    if conversion is not None:
        function, options = conversion
        getattr(girih, function)(model, **options)
    return model


def add_lora(model):
    """Adds LoRA to the projections of attention. Nothing else is trained."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=LORA_TARGETS, task_type="CAUSAL_LM")
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
    model = add_lora(llama(conversion, device))
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-4, fused=True)
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
        "trained": sum(p.numel() for p in trainable),
        "tokens_per_second": round(ROWS * TOKENS / statistics.median(seconds[WARM_UPS:])),
        "peak_bytes": torch.cuda.max_memory_allocated() if on_card else None,
    }


def tensors_of(cache):
    """All tensors of the text that a cache holds."""
    from girih.models.cache import StateLayer
    from girih.nn import map_state

    for layer in cache.layers:
        if isinstance(layer, StateLayer):
            found = []
            map_state(found.append, layer.state)
            yield from found
            layer = getattr(layer, "softmax", None)  # in an injected model, the keys beside its state
        if layer is not None and layer.keys is not None:
            yield layer.keys
            yield layer.values


def bytes_of_a_sequence(cache, sequences):
    """Bytes of the storages that the cache holds. A tensor may be a part of its storage."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(cache)}
    return sum(storages.values()) // sequences


@torch.no_grad()
def cache_after(model, prompt, sequences, length=None):
    """The cache of `sequences` sequences that have read prompt `[1, T]`. length: number of slots of a
    StaticCache."""
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
    """A stopping criterion of `generate()` that never stops. It reads the time after `UNTIMED` tokens and
    after all tokens, and waits for the card only then."""

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

    All tokens of the prompt except the last are read before, once for all sequences.
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
    start, end = clock.times
    row = {
        "sequences": sequences,
        "ms_a_token": round(1e3 * (end - start) / TIMED, 3),
        "tokens_per_second": round(sequences * TIMED / (end - start)),
        "cache_bytes": bytes_of_a_sequence(cache, sequences),
    }
    return text[:, ids.shape[1] :], row


def generation_row(*arguments):
    """The row of `generate` without its tokens."""
    return generate(*arguments)[1]


def keys_of_a_sequence(tokens):
    """Bytes of the Llama's keys and values of this number of tokens, in bf16."""
    return 2 * 2 * LLAMA["num_hidden_layers"] * LLAMA["hidden_size"] * tokens


def count_sequences(context, free):
    """Number of sequences of the Llama that fit into the free memory, at the end of the texts after a
    context."""
    whole = keys_of_a_sequence(context + UNTIMED + TIMED)
    return max(1, min(MOST, int(ROOM * free) // whole))


def texts(name, free):
    """The texts that a model generates: (context, sequences)."""
    for context in CONTEXTS:
        sequences = count_sequences(context, free)
        for batch in sorted({sequences, MOST}) if DECODING[name] else [sequences]:
            yield context, batch


def attempt(measure, *arguments):
    """A row, or an error if the memory of the card is too small."""
    try:
        return measure(*arguments)
    except torch.OutOfMemoryError:
        return {"error": "more memory than the card has"}


def trainings(device):
    """{name: row}, yielded after every new row."""
    rows = {}
    for name, conversion in TRAINING.items():
        rows[name] = attempt(train, conversion, device)
        print(f"LoRA, {name}: {rows[name]}", flush=True)
        yield rows
        free_memory()


def generations(device, free):
    """{context: {name: {sequences: row}}}, yielded after every new row."""
    rows = {str(context): {} for context in sorted(CONTEXTS)}
    for name, conversion in DECODING.items():
        model = llama(conversion, device).eval()
        prompt = torch.randint(LLAMA["vocab_size"], (1, max(CONTEXTS) + 1), device=device)
        for context, sequences in texts(name, free):
            row = attempt(generation_row, model, prompt[:, : context + 1], sequences, name == COMPILED)
            rows[str(context)].setdefault(name, {})[str(sequences)] = row
            print(f"{name}, context {context}, {sequences} sequences: {row}", flush=True)
            yield rows
            free_memory()
        del model
        torch.compiler.reset()
        free_memory()


def times(value, baseline):
    return "" if None in (value, baseline) else f"{value / baseline:.2f}x"


def table_of_training(rows):
    """Markdown. Ratios are relative to the unchanged model."""
    from report import markdown

    cells, baseline = [], rows[UNCHANGED]
    for name, row in rows.items():
        speed, peak = row.get("tokens_per_second"), row.get("peak_bytes")
        cells.append(
            [
                name,
                f"{row['trained'] / 1e6:.1f}M of {row['parameters'] / 1e6:.0f}M" if speed else "",
                row.get("error") or f"{speed:,}",
                times(speed, baseline.get("tokens_per_second")),
                "" if peak is None else f"{peak / 2**30:.1f}",
                times(peak, baseline.get("peak_bytes")),
            ]
        )
    return markdown(["LoRA on", "parameters trained", "tokens/s", "", "peak, GiB", ""], cells)


def best_of_llama(rows):
    """Tokens a second of the unchanged model, with the better of its caches."""
    speeds = [
        row["tokens_per_second"]
        for name in (UNCHANGED, COMPILED)
        for row in rows.get(name, {}).values()
        if "error" not in row
    ]
    return max(speeds, default=None)


def table_of_texts(contexts):
    """Markdown. Ratios are relative to the Llama's better cache at the same context."""
    from report import markdown

    cells = []
    for context, rows in contexts.items():
        best = best_of_llama(rows)
        for name, batches in rows.items():
            for sequences, row in batches.items():
                speed, cache_bytes = row.get("tokens_per_second"), row.get("cache_bytes")
                cells.append(
                    [
                        f"{int(context):,}",
                        name,
                        sequences,
                        "" if speed is None else f"{row['ms_a_token']:.1f}",
                        row.get("error") or f"{speed:,}",
                        times(speed, best),
                        "" if cache_bytes is None else f"{cache_bytes / 2**20:.1f}",
                    ]
                )
    heads = ["context", "", "sequences", "ms a token", "tokens/s", "", "cache of a sequence, MiB"]
    return markdown(heads, cells)


def table(parts):
    """Markdown of the file of results. Each part names its device and versions."""
    tables = (("training", table_of_training), ("texts", table_of_texts))
    return "\n".join(
        make_table(parts[part]["rows"]) + origin(parts[part]) for part, make_table in tables if part in parts
    )


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

    # Without expandable segments, a growing cache cannot use the memory blocks of its earlier sizes.
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}"
    runs = {
        "training": lambda: trainings("cuda"),
        "texts": lambda: generations("cuda", torch.cuda.mem_get_info()[0]),
    }
    for part, run in runs.items():
        if options.part in (None, part):
            parts = store_part(options.folder / "converted.json", part, run(), versions)
    print("\n" + table(parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
