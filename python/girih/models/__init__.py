"""Language models of girih's mixers, as Hugging Face models.

Importing this registers them: `AutoModelForCausalLM.from_pretrained` then loads them from their folder.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from girih.models.cache import GirihCache
from girih.models.cat import CatModel
from girih.models.config import GirihConfig
from girih.models.modeling import GirihForCausalLM, GirihForSequenceClassification, GirihModel
from girih.nn import MIXERS

AutoConfig.register(GirihConfig.model_type, GirihConfig, exist_ok=True)
AutoModel.register(GirihConfig, GirihModel, exist_ok=True)
AutoModelForCausalLM.register(GirihConfig, GirihForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(GirihConfig, GirihForSequenceClassification, exist_ok=True)

__all__ = [
    "MIXERS",
    "CatModel",
    "GirihCache",
    "GirihConfig",
    "GirihForCausalLM",
    "GirihForSequenceClassification",
    "GirihModel",
]
