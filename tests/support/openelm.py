"""A model with the structure of OpenELM (Mehta et al. 2024), whose code is not part of transformers.

Its attention is called with `past_key_value` and returns three values. One projection computes q, k and v;
the numbers of heads differ between layers; q and k may have norms. Rotary positions are applied inside the
attention, to keys that the cache holds unrotated. The model creates one mask over all positions, and
attention selects the rows of its tokens by `cache_position`; for sdpa the rows of padding see all keys.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

MASK_LENGTH = 64  # positions of the mask
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"  # until 5.24


class ElmConfig(PretrainedConfig):
    model_type = "elm"
    attribute_map: ClassVar[dict[str, str]] = {"hidden_size": "model_dim"}

    def __init__(
        self,
        model_dim=32,
        head_dim=8,
        query_heads=(4, 6),
        kv_heads=(2, 3),
        has_norms=True,
        vocab_size=64,
        **more,
    ):
        self.model_dim, self.head_dim, self.vocab_size = model_dim, head_dim, vocab_size
        self.query_heads, self.kv_heads, self.has_norms = list(query_heads), list(kv_heads), has_norms
        self.num_hidden_layers = len(self.query_heads)
        self.num_attention_heads, self.use_cache = max(self.query_heads), True
        super().__init__(**{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} | more)


class ElmRotary(nn.Module):
    """The last query has the position of the last key."""

    def forward(self, q, k):
        angle = torch.arange(k.shape[2], dtype=torch.float64, device=k.device)[:, None]
        angle = angle / 10000 ** (torch.arange(0, k.shape[3], 2, device=k.device) / k.shape[3])
        cos, sin = angle.cos().to(k.dtype).repeat(1, 2), angle.sin().to(k.dtype).repeat(1, 2)

        def rotate(x):
            n = x.shape[2]
            a, b = x.chunk(2, -1)
            return x * cos[-n:] + torch.cat((-b, a), -1) * sin[-n:]

        return rotate(q), rotate(k)


class ElmCausalAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.layer_idx, self.head_dim = layer_idx, config.head_dim
        self.num_q_heads, self.num_kv_heads = config.query_heads[layer_idx], config.kv_heads[layer_idx]
        heads = self.num_q_heads + 2 * self.num_kv_heads
        self.qkv_proj = nn.Linear(config.model_dim, heads * config.head_dim, bias=False)
        self.out_proj = nn.Linear(self.num_q_heads * config.head_dim, config.model_dim, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, 1e-6) if config.has_norms else None
        self.k_norm = nn.RMSNorm(config.head_dim, 1e-6) if config.has_norms else None
        self.pos_embedding = ElmRotary()

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        past_key_value=None,
        output_attentions=False,
        use_cache=False,
        cache_position=None,
    ):
        B, T, _ = hidden_states.shape
        heads = [self.num_q_heads, self.num_kv_heads, self.num_kv_heads]
        qkv = self.qkv_proj(hidden_states).view(B, T, sum(heads), self.head_dim).transpose(1, 2)
        q, k, v = qkv.split(heads, 1)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        past_key_value = getattr(self, "past_key_value", past_key_value)
        if past_key_value is not None:
            k, v = past_key_value.update(k, v, self.layer_idx, {"cache_position": cache_position})
        q, k = self.pos_embedding(q, k)
        if attention_mask is not None and cache_position is not None:
            attention_mask = attention_mask[:, :, cache_position, : k.shape[2]]
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, enable_gqa=True)
        attn_weights = None
        return self.out_proj(o.transpose(1, 2).flatten(2)), attn_weights, past_key_value


class ElmLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.attn_norm, self.ffn_norm = nn.RMSNorm(config.model_dim), nn.RMSNorm(config.model_dim)
        self.attn = ElmCausalAttention(config, layer_idx)
        self.proj_1 = nn.Linear(config.model_dim, 2 * config.model_dim, bias=False)
        self.proj_2 = nn.Linear(config.model_dim, config.model_dim, bias=False)

    def forward(self, x, attention_mask, past_key_value, output_attentions, use_cache, cache_position):
        y, _weights, present = self.attn(
            hidden_states=self.attn_norm(x),
            attention_mask=attention_mask,
            past_key_value=past_key_value,
            output_attentions=output_attentions,
            use_cache=use_cache,
            cache_position=cache_position,
        )
        x = x + y
        a, b = self.proj_1(self.ffn_norm(x)).chunk(2, -1)
        return x + self.proj_2(F.silu(a) * b), present


class ElmPreTrainedModel(PreTrainedModel):
    config_class = ElmConfig
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    _supports_sdpa = True


class ElmModel(ElmPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.token_embeddings = nn.Embedding(config.vocab_size, config.model_dim)
        self.layers = nn.ModuleList(ElmLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.model_dim)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self):
        return self.token_embeddings

    def set_input_embeddings(self, value):
        self.token_embeddings = value

    def forward(self, input_ids, attention_mask=None, cache=None, use_cache=None):
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if self.gradient_checkpointing and self.training:
            use_cache = False
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        x = self.token_embeddings(input_ids)
        past = 0 if cache is None else cache.get_seq_length()
        cache_position = torch.arange(past, past + x.shape[1], device=x.device)
        mask, present = self.mask_over_all(attention_mask, x), None
        for layer in self.layers:
            arguments = (x, mask, cache, False, use_cache, cache_position)
            if self.gradient_checkpointing and self.training:
                x, present = self._gradient_checkpointing_func(layer.__call__, *arguments)
            else:
                x, present = layer(*arguments)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), **{CACHE: present})

    def mask_over_all(self, attention_mask, x):
        least = torch.finfo(x.dtype).min
        mask = torch.full((MASK_LENGTH, MASK_LENGTH), least, dtype=x.dtype, device=x.device).triu(1)
        mask = mask.expand(x.shape[0], 1, MASK_LENGTH, MASK_LENGTH).clone()
        if attention_mask is not None:
            n = attention_mask.shape[1]
            mask[..., :n].masked_fill_(attention_mask[:, None, None] == 0, least)
            mask *= ~(mask == least).all(-1, keepdim=True)
        return mask


class ElmForCausalLM(ElmPreTrainedModel, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.transformer = ElmModel(config)
        self.post_init()

    def get_input_embeddings(self):
        return self.transformer.token_embeddings

    def forward(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        cache=None,
        past_key_values=None,
        use_cache=None,
        labels=None,
        return_dict=None,
    ):
        out = self.transformer(input_ids, attention_mask, cache or past_key_values, use_cache)
        logits = F.linear(out.last_hidden_state, self.transformer.token_embeddings.weight)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: out.get(CACHE)})


def elm(**own):
    torch.manual_seed(0)
    model = ElmForCausalLM(ElmConfig(**own))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(std=0.5 if "embeddings" in name else 32**-0.5)
            else:
                p.uniform_(0.5, 1.5)
    return model.eval()


AutoConfig.register("elm", ElmConfig)
AutoModel.register(ElmConfig, ElmModel)
AutoModelForCausalLM.register(ElmConfig, ElmForCausalLM)
