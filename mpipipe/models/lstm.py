"""A recurrent language model: a stack of LSTMs (Hochreiter & Schmidhuber 1997), with dropout between
the layers and never inside the recurrence (Zaremba et al. 2014).

    tokens -> embed -> drop -> [ LSTM -> drop ] * layers -> head

Each layer is an nn.LSTM of its own, so that cuts fall between layers. Every text starts from zeros.
Shapes: B samples, T tokens, V vocabulary.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from mpipipe.errors import ConfigError


class LSTM(nn.Module):
    """`forward(tokens)`: int64 (B, T) -> logits (B, T, V).

    The embedding starts from U(-0.1, 0.1) (Zaremba et al. 2014), the rest as torch's layers do. With
    `tied`, `head.weight` is `embed.weight` (Press & Wolf 2017). Raises ConfigError when it cannot be:
    its shape is (V, width) here and (V, hidden) there.
    """

    def __init__(self, vocab: int, layers: int, width: int, hidden: int, tied: bool, dropout: float) -> None:
        super().__init__()
        if tied and hidden != width:
            raise ConfigError(
                f"tied = true, but width = {width} and hidden = {hidden}; make them equal or untie"
            )
        self.embed = nn.Embedding(vocab, width)
        nn.init.uniform_(self.embed.weight, -0.1, 0.1)
        widths = [width, *[hidden] * layers]
        self.layers = nn.ModuleList(nn.LSTM(a, b, batch_first=True) for a, b in pairwise(widths))
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, vocab)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, V)
        x = self.drop(self.embed(tokens))
        for layer in self.layers:
            x = self.drop(layer(x)[0])
        logits: Tensor = self.head(x)
        return logits
