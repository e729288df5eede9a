"""Small random models of transformers, and conversions of them, shared by tests."""

import girih
import torch
from transformers import AutoConfig, AutoModelForCausalLM

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
FAMILIES = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 6},
    "gpt2": {"n_layer": 2, "n_head": 4, "without": GPT2, **dict.fromkeys(DROPOUT, 0.0)},
    "gemma3_text": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "olmo2": {},
    "phi": {"qk_layernorm": True, "without": ("head_dim",)},
    "phi3": {"without": ("head_dim",)},
    "gpt_neox": {"without": ("head_dim", "num_key_value_heads")},
    "girih": {"mixer": "attention", "initializer_range": 0.2},
}
# Families of the papers' tables whose attention is structured as one above: one short test each.
MORE_FAMILIES = {
    "qwen2": {},
    "olmo": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}
WAYS = {
    "injected": {"weight": 0.6, "n": 2},
    "both, gelu": {
        "weight": 0.3,
        "n": 3,
        "virtual_tokens": "both",
        "gate": "kv",
        "between_chunks": "gelu",
        "chunk": 4,
        "cross": True,
    },
    "window": {"weight": 0.5, "max_self_attn_length": 5, "pool": "window", "gate": "v", "learned": True},
    "linear attention": {"path": "linear_attention", "weight": 0.5, "learned": True},
    "gsa": {"mixer": "gsa", "num_slots": 8},
    "delta_product": {"mixer": "delta_product", "n": 2, "gated": True},
    "trellis": {"mixer": "trellis", "num_slots": 6, "chunk": 4},
}
IDS = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(0))


def base_model(family="llama", seed=0, **own):
    """A model whose layers have a visible effect: with the default initialisation the residual stream
    dominates."""
    torch.manual_seed(seed)
    options = COMMON | (FAMILIES | MORE_FAMILIES)[family] | own
    without = options.pop("without", ())
    config = AutoConfig.for_model(family, **{k: v for k, v in options.items() if k not in without})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1 and "embed" not in name and "wte" not in name and "wpe" not in name:
                p.normal_(std=32**-0.5)
            elif name.endswith("bias"):
                p.normal_(std=0.3)
            elif p.dim() > 1:
                p.normal_(std=0.5)
    return model.eval()


def supports(family, way):
    """Whether the family's attention supports the conversion: girih's own attention keeps all keys."""
    return family != "girih" or "max_self_attn_length" not in WAYS[way]


def convert(model, way):
    torch.manual_seed(1)
    options = dict(WAYS[way])
    if "mixer" in options:
        return girih.replace_attention(model, **options)
    return girih.inject(model, options.pop("path", "delta_product"), **options)


def converted(family="llama", way="injected", **own):
    model = base_model(family, **own)
    convert(model, way)
    return model


def attention(model, i=0):
    """The attention module of a layer."""
    found = (m for m in model.modules() if getattr(m, "layer_idx", None) == i)
    return next(m for m in found if "Attention" in type(m).__name__)


def close(a, b, tolerance=2e-5):
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)
