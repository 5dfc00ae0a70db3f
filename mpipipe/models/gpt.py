"""A GPT: pre-norm transformer decoder (Radford et al. 2019).

    tokens -> wte + wpe -> [ x + attn(ln_1(x)) ; x + mlp(ln_2(x)) ] * layers -> ln_f -> head

Plain modules and torch functions only: the model exports, and runs as it stands in a plain loop.
Shapes: B samples, T tokens, C = d_model, H heads, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Causal self-attention, all heads in one projection."""

    def __init__(self, d_model: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) -> (B, T, C)
        batch, tokens, width = x.shape
        split = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)  # (B, H, T, C/H) each
        dropped = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropped, is_causal=True)
        out: Tensor = self.drop(self.proj(y.transpose(1, 2).reshape(batch, tokens, width)))
        return out


class Mlp(nn.Module):
    def __init__(self, d_model: int, dropout: float) -> None:
        super().__init__()
        self.fc = nn.Linear(d_model, 4 * d_model)
        self.act = nn.GELU()
        self.proj = nn.Linear(4 * d_model, d_model)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) -> (B, T, C)
        out: Tensor = self.drop(self.proj(self.act(self.fc(x))))
        return out


class Block(nn.Module):
    def __init__(self, d_model: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(d_model)
        self.attn = Attention(d_model, heads, dropout)
        self.ln_2 = nn.LayerNorm(d_model)
        self.mlp = Mlp(d_model, dropout)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) -> (B, T, C)
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    """`forward(tokens)`: int64 (B, T), T <= context -> logits (B, T, V).

    Weights start from N(0, 0.02), those that write into the residual stream from
    N(0, 0.02 / sqrt(2 layers)); biases from 0. With `tied`, `head.weight` is `wte.weight`.
    """

    def __init__(
        self, vocab: int, layers: int, d_model: int, heads: int, context: int, tied: bool, dropout: float
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab, d_model)
        self.wpe = nn.Embedding(context, d_model)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(d_model, heads, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab, bias=False)
        if tied:
            self.head.weight = self.wte.weight
        self.apply(init_normal)
        for name, weight in self.named_parameters():
            if name.endswith("proj.weight"):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, V)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.wte(tokens) + self.wpe(positions))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.ln_f(x))
        return logits


def init_normal(module: nn.Module) -> None:
    """Weights of linear layers and embeddings from N(0, 0.02), biases from 0 (Radford et al. 2019)."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
