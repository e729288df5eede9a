"""Models of transformers whose attention is replaced by girih's mixers, or mixed with a linear path, and
layers with the parameters of Megatron-LM."""

from girih.conversion.config import Injection, Replacement
from girih.conversion.convert import Conversion, inject, replace_attention
from girih.conversion.liza import LinearPath, Liza
from girih.conversion.loading import from_pretrained
from girih.conversion.megatron import load_megatron, to_megatron
from girih.conversion.schedule import MixSchedule

__all__ = [
    "Conversion",
    "Injection",
    "LinearPath",
    "Liza",
    "MixSchedule",
    "Replacement",
    "from_pretrained",
    "inject",
    "load_megatron",
    "replace_attention",
    "to_megatron",
]
