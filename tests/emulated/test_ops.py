"""mpipipe's operators on a device without compiled kernels: torch computes them there, with the bits that it
gives on the processor. A kernel that got the address of such a tensor would end the process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.chosen import modules
from mpipipe import ops
from mpipipe.ops import fused
from mpipipe.ops.batch_norm import batch_norm
from mpipipe.ops.bias_gelu import bias_gelu
from mpipipe.ops.convolution import CONVOLUTION_LATER
from mpipipe.ops.deferred import Deferred, Later, Pending
from mpipipe.ops.device import DeviceMemory, use
from mpipipe.ops.evict import evict
from mpipipe.ops.layer_norm import layer_norm, rms_norm
from mpipipe.ops.linear import TORCH_LINEAR_LATER, linear
from mpipipe.ops.swiglu import swiglu

pytestmark = pytest.mark.full

DEVICE = "emulated:1"
DTYPES = [torch.float32, torch.bfloat16]
STREAM = {"key": 7, "step": 3, "micro": 1}


def tables(found: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
    """Of kernels; some modules have several, by a key."""
    of_several = [value for value in found.values() if isinstance(value, dict)]
    yield from of_several or [found]


@pytest.fixture(autouse=True)
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor computes as the device must, without the compiled kernels."""
    for name, module in list(sys.modules.items()):
        for table in ("_KERNELS", "KERNELS"):
            if name.startswith("mpipipe.ops.") and hasattr(module, table):
                for kernels in tables(getattr(module, table)):
                    for key in list(kernels):
                        monkeypatch.delitem(kernels, key)


def equal(host: Tensor | None, device: Tensor | None) -> bool:
    if host is None or device is None:
        return host is device
    assert device.device == torch.device(DEVICE)
    return host.dtype == device.dtype and torch.equal(host, device.cpu())


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


def results(function: Callable[..., Any], inputs: list[Tensor], grads: bool) -> list[Tensor | None]:
    """What it returns, and the gradients of its inputs; with `grads` these have a sum already."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    for leaf in leaves:
        leaf.grad = torch.ones_like(leaf) if grads else None
    found = function(*leaves)
    found = found if isinstance(found, tuple) else (found,)
    sum(t.float().sin().sum() for t in found if t.requires_grad).backward()
    return [*(t.detach() for t in found), *(leaf.grad for leaf in leaves)]


def check(function: Callable[..., Any], inputs: list[Tensor], grads: bool = False) -> None:
    host = results(function, inputs, grads)
    device = results(function, [t.to(DEVICE) for t in inputs], grads)
    assert all(map(equal, host, device))


ROWS = (6, 5, 8)
DIFFERENTIABLE = {
    "layer norm": (lambda x, w, b: layer_norm(x, w, b), [ROWS, (8,), (8,)]),
    "layer norm of a sum": (lambda x, w, b, r: layer_norm(x, w, b, residual=r), [ROWS, (8,), (8,), ROWS]),
    "rms norm": (lambda x, w: rms_norm(x, w), [ROWS, (8,)]),
    "batch norm": (lambda x, w, b: batch_norm(x, w, b), [ROWS, (5,), (5,)]),
    "batch norm and relu": (lambda x, r: batch_norm(x, relu=True, residual=r), [ROWS, ROWS]),
    "gelu": (lambda x, b: bias_gelu(x, b), [ROWS, (8,)]),
    "swiglu": (lambda gate, up: swiglu(gate, up), [ROWS, ROWS]),
    "dropout": (lambda x: ops.dropout(x, 0.3, **STREAM), [ROWS]),
    "linear": (lambda x, w, b: linear(x, w, b), [ROWS, (3, 8), (3,)]),
    "linear, transposed": (lambda x, w: linear(x, w, None, True), [ROWS, (8, 3)]),
    "linear and gelu": (
        lambda x, w, b: fused.linear_gelu(x, w, b, "tanh", False, (30, 3)), [ROWS, (3, 8), (3,)]
    ),
    "attention": (
        lambda q, k, v: ops.flash_attention(q, k, v, causal=True), [(2, 4, 9, 8), *2 * [(2, 2, 9, 8)]]
    ),
    "attention with dropout": (
        lambda q, k, v: ops.attention(q, k, v, None, 0.2, True, **STREAM), [(2, 4, 9, 8)] * 3
    ),
}  # fmt: skip


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_an_operator_and_its_derivative_are_torch_s(name, dtype, grads):
    function, shapes = DIFFERENTIABLE[name]
    check(function, drawn(*shapes, dtype=dtype), grads)


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loss_of_a_head_is_torch_s(dtype, grads):
    labels = torch.tensor([3, 0, -100, 10, 2])

    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return fused.head_loss(x, weight, bias, labels.to(x.device), -100, 0.1, True)

    check(loss, drawn((5, 8), (11, 8), (11,), dtype=dtype), grads)


def test_attention_to_some_keys_is_torch_s():
    q, k, v = drawn(*[(2, 4, 9, 8)] * 3)
    for name, keys in (("key_lengths", torch.tensor([9, 4])), ("key_mask", torch.rand(2, 9) < 0.7)):
        check(lambda *t, n=name, s=keys: ops.flash_attention(*t, **{n: s.to(t[0].device)}), [q, k, v])


def test_a_recurrent_layer_is_close_to_torch_s():
    """Not its bits: only for the processor torch makes the products of all steps at once."""
    stacked = ops.replacement(torch.ops.aten.rnn_tanh.input)
    assert stacked is not None

    def function(x: Tensor, state: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return stacked(x, state, weights, True, 2, 0.5, True, False, True, **STREAM)

    inputs = drawn((3, 5, 4), (2, 3, 4), *2 * [(4, 4), (4, 4), (4,), (4,)])
    host, device = (results(function, [t.to(where) for t in inputs], False) for where in ("cpu", DEVICE))
    for a, b in zip(host, device, strict=True):
        torch.testing.assert_close(a, b.cpu())


@pytest.mark.parametrize("padding", [None, 1])
def test_rows_of_a_table_are_torch_s(padding):
    indices = torch.tensor([[0, 1, 1], [4, 0, 2]])
    host, device = (
        results(lambda w: ops.embedding(indices.to(w.device), w, padding), [t], False)
        for t in (drawn((5, 3))[0], drawn((5, 3))[0].to(DEVICE))
    )
    assert all(map(equal, host, device))
    with_sum = results(lambda w: ops.embedding(indices.to(w.device), w), [drawn((5, 3))[0].to(DEVICE)], True)
    assert with_sum[1] is not None
    assert with_sum[1][3].tolist() == [1.0] * 3


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("name", ["linear", "loss"])
def test_autocast_of_the_device_is_as_that_of_the_processor(name, grads):
    labels = torch.tensor([3, 0, 2, 2, 2])

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
            if name == "linear":
                return linear(x, weight, bias)
            return ops.linear_cross_entropy(x, weight, labels.to(x.device), bias=bias)

    check(function, drawn((5, 8), (11, 8), (11,)), grads)


def test_random_tensors_are_those_of_the_stream():
    for draw in (ops.uniform, ops.normal):
        assert equal(draw((3, 5), **STREAM), draw((3, 5), **STREAM, device=DEVICE))
    assert equal(ops.integers(0, 9, (7,), **STREAM), ops.integers(0, 9, (7,), **STREAM, device=DEVICE))
    (x,) = drawn((4, 3))
    y = x.to(DEVICE)
    assert equal(ops.bernoulli(x.sigmoid(), **STREAM), ops.bernoulli(y.sigmoid(), **STREAM))
    for draw in (ops.uniform_like, ops.normal_like):
        assert equal(draw(x, **STREAM), draw(y, **STREAM))
    for op, *rest in (("aten.feature_dropout.default", 0.5, True), ("aten.dropout_.default", 0.5, True)):
        call = ops.replace.REPLACEMENTS[op]
        assert equal(call(x.clone(), *rest, **STREAM), call(y.clone(), *rest, **STREAM))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_update_is_torch_s(dtype):
    how = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "factor": 0.5}
    found = []
    for device in ("cpu", DEVICE):
        param, grad, *moments = (t.to(device) for t in drawn((9,), (9,), (9,), (9,)))
        moments[1].abs_()
        master = param.clone() if dtype == torch.bfloat16 else None
        buffers = param.to(dtype), grad.to(dtype), *moments
        ops.adamw(*buffers, step=2, master=master, **how)
        found.append([*buffers, *([] if master is None else [master])])
    assert all(map(equal, *found))
    assert found[1][1].count_nonzero() == 0


def test_sums_and_norms_of_gradients_are_torch_s():
    found = []
    for device in ("cpu", DEVICE):
        total, x = (t.to(device) for t in drawn((9,), (9,)))
        part = x.bfloat16()
        ops.accumulate(total, part, zero=True)
        found.append((total, part, x, ops.norms(x, torch.tensor([0, 4]), torch.tensor([4, 5]))))
    assert all(map(equal, found[0][:3], found[1][:3]))
    assert torch.equal(found[0][3], found[1][3])
    assert found[1][1].count_nonzero() == 0
    x = torch.ones(6, device=DEVICE)
    with pytest.raises(ValueError, match="share memory"):
        ops.accumulate(x, x.view(torch.bfloat16)[:6])


@pytest.mark.parametrize(
    "later", [None, TORCH_LINEAR_LATER, CONVOLUTION_LATER], ids=["graph", "linear", "convolution"]
)
def test_weight_gradients_that_wait_come_to_the_same(later: Later | None):
    op, more = (F.conv2d, (3, 3)) if later is CONVOLUTION_LATER else (F.linear, ())

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        pending = Pending()
        y = Deferred(op, (1, 2), later)(pending, x, weight, bias)
        torch.autograd.backward(y.sin().sum(), inputs=[x, pending.trigger])
        assert weight.grad is None
        pending.run()
        return y.detach().requires_grad_()

    check(function, drawn((5, 8, *more), (3, 8, *more), (3,)))


def test_only_the_processor_s_memory_is_dropped_from_its_caches():
    x = torch.ones(1000, device=DEVICE)
    evict([x, x.cpu()])
    assert x.sum() == 1000


@pytest.mark.parametrize("group", ["accumulate", "adamw", "norms"])
def test_the_benchmark_of_a_gpu_makes_its_tensors_there(group):
    """Of the groups that have tensors which are elsewhere, or made by the runtime: each side runs, and takes
    memory of the device."""
    use(torch.device(DEVICE))
    try:
        with torch.device(DEVICE):
            before = DeviceMemory().sample()
            cases = modules()[group].cases()
            assert DeviceMemory().sample() - before > max(case.bytes for case in cases) / 4
            for case in cases:
                for side in (case.ours, *case.theirs.values()):
                    side()
    finally:
        use(torch.device("cpu"))
