"""Recurrent networks of several layers with dropout between them, layer by layer: torch draws the mask
inside one operator, ours is a slice of the random stream.

    x -> layer 0 -> dropout -> layer 1 -> dropout -> ... -> last layer

Each single layer is torch's own operator; layer i's dropout has the stream key of (key, i).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpipipe.ops.dropout import dropout as drop
from mpipipe.ops.philox import stream_key

Tensor = torch.Tensor


def stacked(op: Any) -> Callable[..., tuple[Tensor, ...]]:
    """`op` (aten.lstm.input, gru, rnn_tanh, rnn_relu; same arguments and results) with our dropout."""

    def run(
        x: Tensor, state: Any, params: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float,
        train: bool, bidirectional: bool, batch_first: bool, *, key: int, step: int, micro: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        directions, weights = 1 + bidirectional, len(params) // num_layers
        last: list[tuple[Tensor, ...]] = []
        for i in range(num_layers):
            if i and train:
                x = drop(x, dropout, key=stream_key(key, f"layer {i - 1}"), step=step, micro=micro)
            rows = slice(i * directions, (i + 1) * directions)
            own = [s[rows] for s in state] if isinstance(state, (list, tuple)) else state[rows]
            layer = params[i * weights : (i + 1) * weights]
            x, *final = op(x, own, layer, has_biases, 1, 0.0, train, bidirectional, batch_first)
            last.append(tuple(final))
        return x, *(torch.cat(parts) for parts in zip(*last, strict=True))

    run.__name__ = op.__name__.replace(".", "_")
    return run
