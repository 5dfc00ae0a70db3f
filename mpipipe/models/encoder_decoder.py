"""A text encoder-decoder: the transformer (Vaswani et al. 2017), with the norms before each part.

    source -> embed -> [ x + attn(x) ; x + mlp(x) ] * layers -> norm = memory
    target -> embed -> [ x + causal attn(x) ; x + attn(x, memory) ; x + mlp(x) ] * layers -> norm -> head

Positions are learned. The encoder comes first and the memory crosses every cut in the decoder.
Shapes: B samples, S source tokens, T target tokens, C = d_model, H heads, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mpipipe.data.base import PAD
from mpipipe.errors import ConfigError
from mpipipe.models.gpt import Mlp, init_normal


class Attention(nn.Module):
    """Queries from x, keys and values from memory."""

    def __init__(self, d_model: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.q, self.kv = nn.Linear(d_model, d_model), nn.Linear(d_model, 2 * d_model)
        self.proj = nn.Linear(d_model, d_model)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """x (B, T, C), memory (B, S, C), mask (B, 1, 1, S): true where one may look -> (B, T, C)"""
        k, v = self.kv(memory).chunk(2, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q(x), k, v))
        dropped = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, mask, dropped, causal)
        out: Tensor = self.drop(self.proj(y.transpose(1, 2).flatten(2)))
        return out


class EncoderBlock(nn.Module):
    def __init__(self, d_model: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(d_model)
        self.attn = Attention(d_model, heads, dropout)
        self.ln_2 = nn.LayerNorm(d_model)
        self.mlp = Mlp(d_model, dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # (B, S, C) -> (B, S, C)
        y = self.ln_1(x)
        x = x + self.attn(y, y, mask, False)
        x = x + self.mlp(self.ln_2(x))
        return x


class DecoderBlock(nn.Module):
    def __init__(self, d_model: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(d_model)
        self.attn = Attention(d_model, heads, dropout)
        self.ln_2 = nn.LayerNorm(d_model)
        self.cross = Attention(d_model, heads, dropout)
        self.ln_3 = nn.LayerNorm(d_model)
        self.mlp = Mlp(d_model, dropout)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:  # (B, T, C) -> (B, T, C)
        y = self.ln_1(x)
        x = x + self.attn(y, y, None, True)
        x = x + self.cross(self.ln_2(x), memory, mask, False)
        x = x + self.mlp(self.ln_3(x))
        return x


class EncoderDecoder(nn.Module):
    """`forward(source, target)`: int64 (B, S) and (B, T), S, T <= context -> logits (B, T, V).

    Source tokens equal to PAD = 0 are never looked at; target tokens look only back, so padding at the
    end needs no mask there: give it the label -100. Weights start from N(0, 0.02), biases from 0. With
    `tied`, source, target and head share `embed.weight` (Press & Wolf 2017); else source and target
    have an embedding each. Raises ConfigError for a text longer than `context`.
    """

    def __init__(
        self, vocab: int, layers: int, d_model: int, heads: int, context: int, tied: bool, dropout: float
    ) -> None:
        super().__init__()
        self.context = context
        self.embed = nn.Embedding(vocab, d_model)
        self.embed_target = self.embed if tied else nn.Embedding(vocab, d_model)
        self.positions, self.positions_target = nn.Embedding(context, d_model), nn.Embedding(context, d_model)
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.ModuleList(EncoderBlock(d_model, heads, dropout) for _ in range(layers))
        self.ln_encoder = nn.LayerNorm(d_model)
        self.decoder = nn.ModuleList(DecoderBlock(d_model, heads, dropout) for _ in range(layers))
        self.ln_decoder = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.apply(init_normal)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:  # (B, S), (B, T) -> (B, T, V)
        mask = (source != PAD)[:, None, None, :]  # nothing attends to padding
        memory = self._embedded(source, self.embed, self.positions)
        for block in self.encoder:
            memory = block(memory, mask)
        memory = self.ln_encoder(memory)
        x = self._embedded(target, self.embed_target, self.positions_target)
        for block in self.decoder:
            x = block(x, memory, mask)
        logits: Tensor = self.head(self.ln_decoder(x))
        return logits

    def _embedded(self, tokens: Tensor, embed: nn.Module, positions: nn.Module) -> Tensor:
        length = tokens.shape[1]
        if length > self.context:
            raise ConfigError(
                f"a text of {length} tokens, but context = {self.context}; shorten it or raise it"
            )
        out: Tensor = self.drop(embed(tokens) + positions(torch.arange(length, device=tokens.device)))
        return out
