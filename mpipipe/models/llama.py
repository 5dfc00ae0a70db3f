"""A Llama: decoder with rotary positions, SwiGLU and grouped-query attention (Touvron et al. 2023).

    tokens -> embed_tokens -> [ x + self_attn(norm(x)) ; x + mlp(norm(x)) ] * layers -> norm -> lm_head

RMSNorm: Zhang & Sennrich 2019. Rotary positions: Su et al. 2021. SwiGLU: Shazeer 2020. Grouped
queries: Ainslie et al. 2023. No biases, no dropout. Parameters have the names of Hugging Face's
LlamaForCausalLM without the leading `model.`, and mean the same.
Shapes: B samples, T tokens, C = d_model, H heads, K kv_heads, D = C / H, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mpipipe.errors import ConfigError
from mpipipe.models.gpt import init_normal

Tables = tuple[Tensor, Tensor]  # cosines and sines, (T, D/2) each


def rotary(tokens: int, width: int, base: float, device: torch.device) -> Tables:
    """Position p turns pair i of a head by the angle p / base**(2 i / width). Made of nothing but
    numbers, so each stage makes its own instead of receiving it."""
    speed = 1.0 / base ** (torch.arange(0, width, 2, device=device).float() / width)
    angle = torch.arange(tokens, device=device).float()[:, None] * speed  # (T, D/2)
    return angle.cos(), angle.sin()


def turned(x: Tensor, tables: Tables) -> Tensor:  # (B, H, T, D) -> (B, H, T, D)
    """Pairs are (i, i + D/2)."""
    cos, sin = tables
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention; each head of keys and values serves H / K heads of queries."""

    def __init__(self, d_model: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.width = d_model // heads
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, kv_heads * self.width, bias=False)
        self.v_proj = nn.Linear(d_model, kv_heads * self.width, bias=False)
        self.o_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor, tables: Tables) -> Tensor:  # (B, T, C) -> (B, T, C)
        parts = (project(x) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in parts)
        q, k = turned(q, tables), turned(k, tables)  # (B, H or K, T, D)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out


class SwiGLU(nn.Module):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d_model, d_ff, bias=False)
        self.up_proj = nn.Linear(d_model, d_ff, bias=False)
        self.down_proj = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) -> (B, T, C)
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    def __init__(self, d_model: int, heads: int, kv_heads: int, d_ff: int, norm_eps: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(d_model, norm_eps)
        self.self_attn = Attention(d_model, heads, kv_heads)
        self.post_attention_layernorm = nn.RMSNorm(d_model, norm_eps)
        self.mlp = SwiGLU(d_model, d_ff)

    def forward(self, x: Tensor, tables: Tables) -> Tensor:  # (B, T, C) -> (B, T, C)
        x = x + self.self_attn(self.input_layernorm(x), tables)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class Llama(nn.Module):
    """`forward(tokens)`: int64 (B, T), T <= context -> logits (B, T, V).

    Weights start from N(0, 0.02), norms from 1. With `tied`, `lm_head.weight` is `embed_tokens.weight`.
    Raises ConfigError when the heads do not divide, or a text is longer than `context`.
    """

    def __init__(
        self,
        vocab: int,
        layers: int,
        d_model: int,
        heads: int,
        kv_heads: int,
        d_ff: int,
        context: int,
        rope_base: float = 10000.0,
        tied: bool = False,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        if d_model % (2 * heads) or heads % kv_heads:
            raise ConfigError(
                f"d_model = {d_model}, heads = {heads}, kv_heads = {kv_heads}: make d_model a multiple of "
                "2 * heads (positions turn pairs of a head's channels), and heads a multiple of kv_heads"
            )
        self.context, self.width, self.rope_base = context, d_model // heads, rope_base
        self.embed_tokens = nn.Embedding(vocab, d_model)
        self.layers = nn.ModuleList(Block(d_model, heads, kv_heads, d_ff, norm_eps) for _ in range(layers))
        self.norm = nn.RMSNorm(d_model, norm_eps)
        self.lm_head = nn.Linear(d_model, vocab, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight
        self.apply(init_normal)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, V)
        length = tokens.shape[1]
        if length > self.context:
            raise ConfigError(
                f"a text of {length} tokens, but context = {self.context}; shorten it or raise it"
            )
        tables = rotary(length, self.width, self.rope_base, tokens.device)
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, tables)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits
