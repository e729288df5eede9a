"""Language models of girih's mixers, as Hugging Face models.

`import girih` registers them with transformers (`girih._auto`): `AutoModelForCausalLM.from_pretrained` then
loads them from their folder. `adapters` holds the calls of transformers' attention modules and models.
"""

from girih.models.cache import GirihCache
from girih.models.cat import CatModel
from girih.models.config import GirihConfig
from girih.models.modeling import GirihForCausalLM, GirihForSequenceClassification, GirihModel
from girih.models.tokenizer import byte_tokenizer
from girih.nn import MIXERS

__all__ = [
    "MIXERS",
    "CatModel",
    "GirihCache",
    "GirihConfig",
    "GirihForCausalLM",
    "GirihForSequenceClassification",
    "GirihModel",
    "byte_tokenizer",
]
