"""Small girih models that tests share, as options of GirihConfig."""

SIZES = {"vocab_size": 32, "hidden_size": 32, "num_heads": 2, "num_slots": 8, "chunk": 4}
HYBRID = {
    "mixer": ["gsa", "delta_product", "trellis", "lattice", "mamba2", "mag"],
    "num_hidden_layers": 6,
}
CAT = {"mixer": "cat", "num_hidden_layers": 2, "max_position_embeddings": 64}
ADAPTIVE_CAT = CAT | {"chunks": [4, 8]}
