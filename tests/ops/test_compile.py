"""torch.compile sees each registered operator as one, without a break of the graph: the same values and
gradients.

By the backend that traces forward and backward and then runs them as they are: a compiler of its own is not
needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from mpipipe.ops import (
    accumulate,
    adamw,
    dropout,
    embedding,
    flash_attention,
    kernels,
    linear_cross_entropy,
    native,
    norms,
)
from mpipipe.ops.batch_norm import batch_norm
from mpipipe.ops.bias_gelu import bias_gelu
from mpipipe.ops.layer_norm import layer_norm, rms_norm
from mpipipe.ops.max_pool2d import max_pool2d
from mpipipe.ops.swiglu import swiglu

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(kernels is None, reason="the compiled kernels are not built"),
]

Tensor = torch.Tensor
LABELS = torch.tensor([1, 0, 3, -100, 2])


def head(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return linear_cross_entropy(x, weight, LABELS, bias=bias, label_smoothing=0.1)


# operator -> calls of it, with the shapes of their inputs
CALLS: dict[str, list[tuple[Callable[..., object], list[tuple[int, ...]]]]] = {
    "batch_norm": [(partial(batch_norm, relu=True), [(4, 3, 5), (3,), (3,)])],
    "bias_gelu": [
        (bias_gelu, [(5, 8), (8,)]),
        (partial(bias_gelu, approximate="tanh"), [(5, 8), (8,)]),
    ],
    "dropout": [(partial(dropout, p=0.3, key=(1 << 63) + 5, step=2, micro=3), [(5, 8)])],
    "embedding": [(lambda weight: embedding(LABELS.clamp(min=0), weight, 3), [(4, 8)])],
    "flash_attention": [(partial(flash_attention, causal=True), [(2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)])],
    "linear_cross_entropy": [(head, [(5, 8), (4, 8), (4,)])],
    "max_pool2d": [(partial(max_pool2d, kernel_size=3, stride=2, padding=1), [(2, 3, 7, 8)])],
    "norm": [
        (lambda x, w, b, r: layer_norm(x, w, b, residual=r), [(5, 8), (8,), (8,), (5, 8)]),
        (rms_norm, [(5, 8), (8,)]),
    ],
    "swiglu": [(swiglu, [(5, 8), (5, 8)])],
}
UPDATE = ["accumulate", "norms", "adamw"]  # without derivatives, in the order in which `update` calls them


def registered() -> set[str]:
    """Those that are called; their derivatives come with them."""
    names = {
        name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("mpipipe::")
    }
    return {name for name in names if not name.endswith("_backward")}


def test_every_registered_operator_is_here() -> None:
    assert set(CALLS) | set(UPDATE) == registered()


def results(call: Callable[..., object], shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Values, and gradients of all inputs."""
    draw = torch.Generator().manual_seed(1)
    inputs = [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]
    found = call(*inputs)
    values = [found] if isinstance(found, Tensor) else list(found)  # type: ignore[call-overload]
    total = torch.stack([y.square().sum() for y in values if y.requires_grad]).sum()
    return [*(y.detach() for y in values), *torch.autograd.grad(total, inputs)]


@pytest.mark.parametrize(("operator", "nth"), [(name, i) for name in CALLS for i in range(len(CALLS[name]))])
def test_compiled_as_eager(operator: str, nth: int) -> None:
    call, shapes = CALLS[operator][nth]
    seen = set()

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        seen.update(str(node.target) for node in graph.graph.nodes)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(lambda *inputs: call(*inputs), backend=backend, fullgraph=True)
    for got, expected in zip(results(compiled, shapes), results(call, shapes), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    assert any(operator in name for name in seen), seen


@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"embedding"}))  # which without a gradient is torch's
def test_a_derivative_in_forward_mode_is_refused(name: str) -> None:
    """There is none: the result would have no tangent, without a word."""
    for function, shapes in CALLS[name]:
        with forward_ad.dual_level(), pytest.raises((NotImplementedError, RuntimeError), match="forward"):
            function(*(forward_ad.make_dual(torch.randn(shape), torch.ones(shape)) for shape in shapes))


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_transform_of_functions_is_refused(name: str) -> None:
    for function, shapes in CALLS[name]:
        first, *others = (torch.randn(shape) for shape in shapes)

        def total(x: Tensor, function: Any = function, others: list[Tensor] = others) -> Tensor:
            y = function(x, *others)
            return (y[0] if isinstance(y, tuple) else y).sum()

        with pytest.raises(RuntimeError, match="functorch transforms"):
            torch.func.grad(total)(first)


def test_labels_of_a_graph_are_checked_when_it_runs() -> None:
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    x, weight = torch.randn(5, 8), torch.randn(4, 8)
    assert compiled(x, weight, LABELS).isfinite()
    with pytest.raises(ValueError, match="label 4 with a vocabulary of 4"):
        compiled(x, weight, LABELS + 1)


def update(buffers: list[Tensor], part: Tensor, step: int, lr: float) -> Tensor:
    """Of a loop of one's own: a gradient is added, all are clipped by their norm, and the weights go on."""
    accumulate(buffers[1], part, zero=True)
    total = norms(buffers[1], torch.tensor([0, 8]), torch.tensor([8, 32])).norm()
    factor = (1.0 / (total + 1e-6)).clamp(max=1.0)
    adamw(*buffers, step=step, lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, factor=factor)
    return total


def drawn() -> list[Tensor]:
    """param, grad, exp_avg and exp_avg_sq."""
    found = [torch.rand(40, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    return [found[0].requires_grad_(), *found[1:]]


@pytest.fixture(params=[True, False], ids=["kernels", "torch"])
def by_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    native.use_kernels(request.param)
    yield
    native.use_kernels(True)


def test_an_update_is_a_graph_that_stays_when_its_numbers_change(by_kernels: None) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(update, backend=backend, fullgraph=True)
    ours, theirs = drawn(), drawn()
    for step in range(1, 13):
        part = torch.randn(40).bfloat16()
        totals = update(ours, part.clone(), step, 1e-3 / step), compiled(theirs, part, step, 1e-3 / step)
        assert torch.equal(*totals)
        assert not part.any()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert len(graphs) == 2  # the second has numbers as inputs
    for names in graphs:
        assert [name for name in names if "mpipipe" in name] == [f"mpipipe.{name}" for name in UPDATE]


def test_export_of_an_update_has_one_operator_each() -> None:
    class Update(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for i, t in enumerate(drawn()):
                self.register_buffer(f"b{i}", t.detach())

        def forward(self, part: Tensor) -> Tensor:
            return update([self.b0, self.b1, self.b2, self.b3], part, 3, 1e-3)

    ours, part = drawn(), torch.randn(40).bfloat16()
    program = torch.export.export(Update(), (part.clone(),), strict=False)
    names = [str(node.target) for node in program.graph.nodes]
    assert [name for name in names if "mpipipe" in name] == [f"mpipipe.{name}.default" for name in UPDATE]
    module = program.module()
    assert torch.equal(module(part.clone()), update(ours, part, 3, 1e-3))
    assert all(torch.equal(a, b) for a, b in zip(ours, module.buffers(), strict=True))
