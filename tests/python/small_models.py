"""Small girih models that tests share, as options of GirihConfig."""

from girih.models import MIXERS, GirihConfig

SIZES = {"vocab_size": 32, "hidden_size": 32, "num_heads": 2, "num_slots": 8, "chunk": 4}
HYBRID = {
    "mixer": ["gsa", "delta_product", "trellis", "lattice", "mamba2", "mag"],
    "num_hidden_layers": 6,
}
CAT = {"mixer": "cat", "num_hidden_layers": 2, "max_position_embeddings": 64}
ADAPTIVE_CAT = CAT | {"chunks": [4, 8]}


def config_of(**fields):
    """A configuration of fields that tests share between mixers: options that none of its mixers reads go."""
    chosen = {
        name: fields[name]
        for name in fields
        if name in ("mixer", "num_hidden_layers", "mag_base", "mag_mixer")
    }
    of_mixers = GirihConfig(**{n: x for n, x in chosen.items() if "mag" not in n or "mag" in chosen["mixer"]})
    names = set(of_mixers.mixers)
    if "mag" in names:
        names |= {of_mixers.mag_base, of_mixers.mag_mixer}
    options = {field for mixer in MIXERS.values() for field in mixer.fields} - {
        "num_kv_heads",
        "head_dim",
        "norm_eps",
    }
    read = {field for name in names for field in MIXERS[name].fields}
    if not fields.get("between_chunks") and not names & {"trellis", "lattice", "cat"}:
        read.discard("chunk")
    of_cat = {"compressor_hidden_size", "compressor_layers"}
    options, read = options | of_cat, read | (of_cat if of_mixers.is_whole_cat else set())
    return GirihConfig(**{name: x for name, x in fields.items() if name not in options or name in read})
