"""The emulated device is a device to torch, and computes what the processor computes."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpipipe.models.gpt import GPT

pytestmark = pytest.mark.full

DEVICE = "emulated:1"


def moved(t: Tensor) -> Tensor:
    """A leaf on the device."""
    return t.detach().to(DEVICE).requires_grad_(t.requires_grad)


def equal(host: Tensor, device: Tensor) -> bool:
    """Whether a tensor of the device is as that of the processor, in bits, shape and strides."""
    assert device.device == torch.device(DEVICE)
    return host.stride() == device.stride() and host.dtype == device.dtype and torch.equal(host, device.cpu())


def trained(model: nn.Module, inputs: Tensor, labels: Tensor, precision: torch.dtype) -> list[Tensor]:
    """Losses of three steps, and then all parameters and buffers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    found = []
    for _ in range(3):
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=precision == torch.bfloat16):
            outputs = model(inputs)
            loss = F.cross_entropy(outputs.flatten(0, -2), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *(t.detach() for t in (*model.parameters(), *model.buffers()))]


def check_training(model: nn.Module, inputs: Tensor, labels: Tensor, precision: torch.dtype) -> None:
    of_device = copy.deepcopy(model).to(DEVICE)
    expected = trained(model, inputs, labels, precision)
    found = trained(of_device, inputs.to(DEVICE), labels.to(DEVICE), precision)
    assert len(set(map(float, expected[:3]))) == 3
    assert all(map(equal, expected, found))


# -- the bits of the processor -----------------------------------------------------------------


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_gpt_learns_with_the_bits_of_the_processor(precision):
    torch.manual_seed(1)
    model = GPT(vocab=32, layers=2, d_model=16, heads=2, context=12, tied=True, dropout=0.0)
    tokens = torch.randint(32, (4, 13))
    check_training(model, tokens[:, :-1], tokens[:, 1:], precision)


def test_a_convolutional_net_learns_with_the_bits_of_the_processor():
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, stride=2, bias=False), nn.GroupNorm(2, 8), nn.SiLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip
    check_training(model, torch.randn(4, 3, 16, 16), torch.arange(4), torch.float32)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_takes_the_form_that_it_takes_on_the_processor(causal, masked):
    host = [torch.randn(2, 3, 40, 16, requires_grad=True) for _ in range(3)]
    device = [moved(t) for t in host]
    mask = torch.rand(40, 40) < 0.9 if masked and not causal else None
    of_host = F.scaled_dot_product_attention(*host, attn_mask=mask, is_causal=causal)
    on_device = None if mask is None else mask.to(DEVICE)
    of_device = F.scaled_dot_product_attention(*device, attn_mask=on_device, is_causal=causal)
    assert type(of_host.grad_fn) is type(of_device.grad_fn)
    of_host.square().sum().backward()
    of_device.square().sum().backward()
    assert equal(of_host.detach(), of_device.detach())
    assert all(equal(a.grad, b.grad) for a, b in zip(host, device, strict=True))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("form", ["foreach", "fused", ""])
def test_optimizers_give_the_bits_of_the_processor(kind, form):
    how = {"foreach": form == "foreach", "fused": form == "fused"}
    if kind is torch.optim.Adagrad and form == "fused":
        how = {"fused": True}
    host = [torch.randn(5, 3), torch.randn(7)]
    device = [moved(t) for t in host]
    optimizers = kind(host, lr=0.1, **how), kind(device, lr=0.1, **how)
    for _ in range(3):
        for a, b in zip(host, device, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.to(DEVICE)
        for optimizer in optimizers:
            optimizer.step()
    assert all(map(equal, host, device))


OPERATORS = {
    "embedding": lambda x, i: F.embedding(i, x),
    "index": lambda x, i: x[i],
    "gather": lambda x, i: x.gather(1, i[:, None] % 4),
    "layer_norm": lambda x, i: F.layer_norm(x, (6,)),
    "rms_norm": lambda x, i: F.rms_norm(x, (6,)),
    "softmax": lambda x, i: x.softmax(0),
    "gelu": lambda x, i: F.gelu(x, approximate="tanh"),
    "cross_entropy": lambda x, i: F.cross_entropy(x, i % 6, label_smoothing=0.1),
    "mse_loss": lambda x, i: F.mse_loss(x, x.flip(0)),
    "expanded": lambda x, i: x[:, None].expand(-1, 3, -1) @ x.t(),
    "transposed": lambda x, i: x.t() @ x,
    "norm": lambda x, i: torch.linalg.vector_norm(x),
    "cumsum": lambda x, i: x.cumsum(1),
    "where": lambda x, i: torch.where(x > 0, x, 0.5),
    "sorted": lambda x, i: x.sort(1).values,
    "largest": lambda x, i: x.topk(2).values,
    "in parts": lambda x, i: torch.cat([x.chunk(2, 1)[1], *x.split([2, 4], 1)], 1),
    "strided": lambda x, i: x[::2, 1::2].contiguous(),
    "unfolded": lambda x, i: x.unfold(1, 3, 2).sum(2),
    "einsum": lambda x, i: torch.einsum("ij,kj->ik", x, x),
    "interpolated": lambda x, i: F.interpolate(x[None, None], scale_factor=2, mode="bilinear"),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_and_its_derivative_have_the_bits_of_the_processor(name):
    x, indices = torch.randn(6, 6, requires_grad=True), torch.tensor([3, 1, 1, 5, 0, 3])
    y = moved(x)
    host, device = OPERATORS[name](x, indices), OPERATORS[name](y, indices.to(DEVICE))
    host.sin().sum().backward()
    device.sin().sum().backward()
    assert equal(host.detach(), device.detach())
    assert equal(x.grad, y.grad)


def test_lists_of_tensors_are_written_in_place():
    ts = [torch.ones(3, device=DEVICE), torch.ones(2, 2, device=DEVICE)[:, :1]]
    addresses = [t.data_ptr() for t in ts]
    torch._foreach_mul_(ts, 3.0)
    torch._foreach_add_(ts, ts, alpha=2.0)
    torch._foreach_zero_(ts[1:])
    assert [t.tolist() for t in ts] == [[9.0] * 3, [[0.0], [0.0]]]
    assert [t.data_ptr() for t in ts] == addresses


def test_views_share_memory_and_results_go_where_out_says():
    x = torch.arange(12.0, device=DEVICE).view(3, 4)
    x[1:, ::2].mul_(2.0)
    x.t()[0].zero_()
    x.diagonal().fill_(5.0)
    torch.view_as_complex(x.view(3, 2, 2)).imag[0] += 100.0
    assert x.tolist() == [[5.0, 101.0, 2.0, 103.0], [0.0, 5.0, 12.0, 7.0], [0.0, 9.0, 5.0, 11.0]]
    torch.mm(x[:, :3], x[:, :3], out=x[:, 1:])
    small = torch.empty(0, device=DEVICE)
    torch.add(x, x, out=small)
    assert torch.equal(small, 2 * x)


def test_storage_grows_is_shared_and_let_go(emulated):
    x = torch.ones(4, device=DEVICE)
    other = torch.empty(0, device=DEVICE).set_(x)
    x.resize_(8)[4:] = 2.0
    assert other.untyped_storage().nbytes() == 32
    assert x.tolist() == [1.0] * 4 + [2.0] * 4
    held = emulated.memory_allocated(1)
    x.untyped_storage().resize_(0)
    assert emulated.memory_allocated(1) == held - 32


# -- a device of its own -----------------------------------------------------------------------

MIXED = {
    "addition": lambda x, y: x + y,
    "addition in place": lambda x, y: x.add_(y),
    "linear": lambda x, y: F.linear(x, y),
    "out": lambda x, y: torch.add(x, x, out=y),
    "embedding": lambda x, y: F.embedding(x.long(), y),
    "cat": lambda x, y: torch.cat([x, y]),
    "where": lambda x, y: torch.where(x > 0, y, x),
    "foreach": lambda x, y: torch._foreach_add_([x], [y]),
    "loss": lambda x, y: F.cross_entropy(x, y[0].long()),
    "attention": lambda x, y: F.scaled_dot_product_attention(x, x, y),
}


@pytest.mark.parametrize("other", ["cpu", "emulated:0"])
@pytest.mark.parametrize("name", MIXED)
def test_operators_refuse_tensors_of_several_devices(name, other):
    x, y = torch.ones(3, 3, device=DEVICE), torch.ones(3, 3, device=other)
    for pair in ((x, y), (y, x)):
        with pytest.raises(RuntimeError, match="the same device"):
            MIXED[name](*pair)


def test_numbers_and_indices_of_the_processor_may_be_read_and_not_written():
    x = torch.ones(3, device=DEVICE)
    assert (x * torch.tensor(2.0)).tolist() == [2.0] * 3
    assert x[torch.tensor([0, 2])].device == x.device
    with pytest.raises(RuntimeError, match="the same device"):
        torch.tensor(2.0).add_(x[0])


def test_host_code_gets_no_memory_of_the_device():
    with pytest.raises(TypeError, match=r"can't convert emulated:1 device type tensor to numpy"):
        torch.ones(3, device=DEVICE).numpy()
    program = (
        "import ctypes, emulated_device, torch\n"
        "emulated_device.register()\n"
        "x = torch.ones(3, device='emulated')\n"
        "print(x.tolist(), flush=True)\n"
        "ctypes.c_float.from_address(x.data_ptr()).value\n"
    )
    tests = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tests, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (-11, "[1.0, 1.0, 1.0]\n"), done.stderr


def test_copies_go_between_all_devices_with_any_strides_and_dtypes():
    x = torch.arange(6.0).view(2, 3)
    y = x.to("emulated:0", torch.float64).t().to(DEVICE, torch.bfloat16, non_blocking=True)
    assert (y.device, y.dtype, y.tolist()) == (torch.device(DEVICE), torch.bfloat16, x.t().tolist())
    z = torch.zeros(3, 4)
    z[:, ::2].copy_(y)
    assert z[:, ::2].equal(x.t())
    assert z[:, 1::2].count_nonzero() == 0
    assert torch.tensor([1, 2], device=DEVICE)[1].item() == 2


def test_it_is_the_accelerator_of_the_process(emulated):
    assert torch.accelerator.current_accelerator() == torch.device("emulated")
    assert torch.get_device_module("emulated") is emulated
    assert emulated.device_count() == torch.accelerator.device_count() == 2
    emulated.set_device(1)
    assert torch.ones(1, device="emulated").device == torch.device(DEVICE)
    with emulated.device(0):
        assert (emulated.current_device(), torch.ones(1, device="emulated").get_device()) == (0, 0)
    assert emulated.current_device() == 1
    with pytest.raises(RuntimeError, match="emulated:2 is none of 2 devices"):
        torch.ones(1, device="emulated:2")


def test_memory_is_counted_and_comes_to_an_end(emulated):
    before = emulated.memory_allocated(1)
    emulated.reset_peak_memory_stats(1)
    x = torch.zeros(1000, device=DEVICE)
    y = x + 1.0
    del x
    assert emulated.memory_allocated(1) - before == y.nbytes == 4000
    assert emulated.max_memory_allocated(1) - before == 8000
    free, total = emulated.mem_get_info(1)
    assert total - free == emulated.memory_allocated(1)
    emulated.set_capacity(1, before + 5000)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="emulated:1 out of memory: tried to allocate 4000"):
            torch.zeros(1000, device=DEVICE)
    finally:
        emulated.set_capacity(1, total)


def test_events_and_streams_are_there(emulated):
    events = [torch.Event("emulated", enable_timing=True) for _ in range(2)]
    for event in events:
        event.record(emulated.current_stream())
    emulated.synchronize()
    assert events[0].elapsed_time(events[1]) >= 0.0
    assert emulated.current_stream(1).device == torch.device(DEVICE)


def test_files_hold_tensors_of_the_device(tmp_path):
    torch.save(torch.ones(3, device=DEVICE), tmp_path / "x")
    assert torch.load(tmp_path / "x").device == torch.device(DEVICE)
    assert torch.load(tmp_path / "x", map_location="cpu").tolist() == [1.0] * 3


CASTS = {
    "product": lambda x: x @ x,
    "linear": lambda x: F.linear(x, x, x[0]),
    "softmax": lambda x: (x @ x).softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x @ x, (4,)),
    "cross_entropy": lambda x: F.cross_entropy(x @ x, torch.arange(4, device=x.device)),
    "mse_loss": lambda x: F.mse_loss(x @ x, x),
    "cat": lambda x: torch.cat([x @ x, x]),
    "sum": lambda x: x @ x + x,
    "double": lambda x: x.double() @ x.double(),
}


@pytest.mark.parametrize("name", CASTS)
def test_autocast_casts_what_that_of_the_processor_casts(name):
    x, found = torch.randn(4, 4), []
    for t in (x, x.to(DEVICE)):
        with torch.autocast(t.device.type, torch.bfloat16):
            found.append(CASTS[name](t))
    assert equal(*found)
