"""Small girih models shared by tests, as options of GirihConfig."""

import torch
from girih.models import GirihConfig
from girih.models.config import OWN_FIELDS
from girih.nn.functional.fields import fields_to_json

SIZES = {"vocab_size": 32, "hidden_size": 32, "num_heads": 2, "num_slots": 8, "chunk": 4}
HYBRID = {
    "mixer": ["gsa", "delta_product", "trellis", "lattice", "mamba2", "mag"],
    "num_hidden_layers": 6,
}
CAT = {"mixer": "cat", "num_hidden_layers": 2, "max_position_embeddings": 64}
ADAPTIVE_CAT = CAT | {"chunks": [4, 8]}


def config_of(**fields):
    """A configuration with shared fields; options that no mixer of the configuration reads are dropped."""
    own = {name: x for name, x in fields.items() if name in OWN_FIELDS}
    unread = torch.ops.girih.unread_options(fields_to_json(own))
    return GirihConfig(**{name: x for name, x in fields.items() if name not in unread})
