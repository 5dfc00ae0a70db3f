"""The random operators that capture meets are found, and ours take their place as they stand."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from mpipipe.ops import bernoulli, draws, dropout, replacement, stream_key, uniform

aten = torch.ops.aten
STREAM = {"key": stream_key(1, "n"), "step": 2, "micro": 3}


class Noisy(nn.Module):
    """Every random operator that has a replacement."""

    def __init__(self):
        super().__init__()
        self.drop, self.inplace, self.channels = (
            nn.Dropout(0.3),
            nn.Dropout(0.3, inplace=True),
            nn.Dropout2d(0.3),
        )

    def forward(self, x):  # (2, 3, 4, 8)
        x = self.channels(self.inplace(self.drop(x) * 1.0))
        x = F.scaled_dot_product_attention(x, x, x, dropout_p=0.2, is_causal=True)
        x = x + torch.rand_like(x) + torch.randn_like(x) + torch.rand(8) + torch.randn(4, 8)
        x = x + torch.randint(5, (8,)) + torch.randint_like(x, 2, 9)
        return x + torch.bernoulli(torch.sigmoid(x)) + torch.empty_like(x).bernoulli_(0.4)


def random_nodes(module, x):
    graph = torch.export.export(module, (x,), strict=False).module()
    return graph, [
        n for n in graph.graph.nodes if n.op == "call_function" and draws(n.target, n.args, n.kwargs)
    ]


def test_replaced_in_a_captured_graph():
    graph, nodes = random_nodes(Noisy().train(), torch.randn(2, 3, 4, 8))
    missing = {str(n.target) for n in nodes if replacement(n.target) is None}
    assert missing == set()
    for i, node in enumerate(nodes):
        node.target = replacement(node.target)
        node.kwargs = {**node.kwargs, **STREAM, "key": stream_key(1, str(i))}
    graph.recompile()
    x, state = torch.randn(2, 3, 4, 8), torch.get_rng_state()
    first, second = graph(x), graph(x)
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)  # torch's generator was never read
    assert first.shape == x.shape


def test_dropout_outside_of_training_is_not_random():
    _, nodes = random_nodes(
        nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout1d(0.1)).eval(), torch.randn(2, 3, 4)
    )
    assert nodes == []


def test_draws():
    x = torch.ones(1, 2, 3, 4)
    assert draws(aten.dropout.default, (x, 0.5, True))
    assert not draws(aten.dropout.default, (x, 0.5, False))
    assert not draws(aten.dropout.default, (x, 0.0, True))
    assert not draws(aten.scaled_dot_product_attention.default, (x, x, x))
    assert draws(aten.scaled_dot_product_attention.default, (x, x, x), {"dropout_p": 0.1})
    assert draws(aten.bernoulli.p, (x, 0.0))
    assert draws(aten.rand.default, ([3],))
    assert draws(aten.rrelu.default, (x, 0.1, 0.3, True))
    assert not draws(aten.rrelu.default, (x,), {"training": False})
    assert not draws(aten.add.Tensor, (x, x))
    assert not draws(print, ())
    lstm = (x, [x], [x], True, 2)
    assert draws(aten.lstm.input, (*lstm, 0.5, True, False, False))
    assert not draws(aten.lstm.input, (*lstm, 0.0, True, False, False))
    assert not draws(aten.lstm.input, (*lstm, 0.5, False, False, False))


def test_each_is_the_named_op():
    x = torch.rand(4, 6, 5)
    expected = dropout(x, 0.3, **STREAM)
    assert torch.equal(replacement(aten.dropout.default)(x, 0.3, True, **STREAM), expected)
    assert replacement(aten.dropout.default)(x, 0.3, False, **STREAM) is x
    inplace = x.clone()
    assert replacement(aten.dropout_.default)(inplace, 0.3, True, **STREAM) is inplace
    assert torch.equal(inplace, expected)
    channels = replacement(aten.feature_dropout.default)(x, 0.3, True, **STREAM)
    assert torch.equal(channels, x * dropout(torch.ones(4, 6, 1), 0.3, **STREAM))
    assert torch.equal(replacement(aten.bernoulli.default)(x, **STREAM), bernoulli(x, **STREAM))
    rand = replacement(aten.rand.default)([3, 2], device=torch.device("cpu"), pin_memory=False, **STREAM)
    assert torch.equal(rand, uniform((3, 2), **STREAM))
    half = replacement(aten.rand_like.default)(x, dtype=torch.bfloat16, pin_memory=False, **STREAM)
    assert torch.equal(half, uniform(x.shape, **STREAM, dtype=torch.bfloat16))
    whole = replacement(aten.randint.low)(2, 5, [100], **STREAM)
    assert (whole.dtype, sorted(set(whole.tolist()))) == (torch.int64, [2, 3, 4])
