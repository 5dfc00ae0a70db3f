"""Layer by layer, with our dropout between, a recurrent network is what torch's one operator is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpipipe.ops import dropout, replacement, stream_key

X = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(2))  # (T, B, features)


def call(net: nn.RNNBase, op: Any, rate: float, **stream: int) -> tuple[Tensor, ...]:
    rows = net.num_layers * (1 + net.bidirectional)
    h = torch.zeros(rows, 3, net.proj_size or 6)
    state = [h, torch.zeros(rows, 3, 6)] if isinstance(net, nn.LSTM) else h
    weights = list(net._flat_weights)
    return op(X, state, weights, net.bias, net.num_layers, rate, True, net.bidirectional, False, **stream)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_without_dropout_it_is_torch_s_operator(kind: Any, both: bool) -> None:
    more = {"proj_size": 2} if kind is nn.LSTM and both else {}
    net = kind(4, 6, 3, bidirectional=both, bias=not both, **more)
    name = {nn.LSTM: "lstm", nn.GRU: "gru", nn.RNN: "rnn_tanh"}[kind]
    op = getattr(torch.ops.aten, name).input
    ours = replacement(op)
    assert ours is not None
    expected, got = call(net, op, 0.0), call(net, ours, 0.0, key=1, step=2, micro=3)
    assert [t.shape for t in got] == [t.shape for t in expected]
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_dropout_is_between_layers_each_with_a_stream_of_its_own() -> None:
    net = nn.LSTM(4, 6, 3)
    ours = replacement(torch.ops.aten.lstm.input)
    assert ours is not None
    y, *_ = call(net, ours, 0.4, key=9, step=1, micro=2)
    x: Tensor = X
    for i in range(3):
        one = nn.LSTM(4 if i == 0 else 6, 6)
        one.load_state_dict(
            {f"{n}_l0": getattr(net, f"{n}_l{i}") for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
        )
        x = one(x)[0]
        if i < 2:
            x = dropout(x, 0.4, stream_key(9, f"layer {i}"), 1, 2)
    assert torch.equal(x, y)
    assert not torch.equal(call(net, ours, 0.4, key=9, step=1, micro=3)[0], y)
