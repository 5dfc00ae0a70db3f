"""The kernels for GPUs: compiled by nvcc, emulated by the processor, and on a GPU if there is one."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from compiling import COMPILER, REPOSITORY, emulated, setup

from mpipipe import ops
from mpipipe.ops import native
from mpipipe.ops.batch_norm import batch_norm
from mpipipe.ops.bias_gelu import bias_gelu
from mpipipe.ops.layer_norm import layer_norm, rms_norm
from mpipipe.ops.swiglu import swiglu

ON_CPU_ALONE = re.compile("words|evict|reuse|gemm|max_pool2d|reference_|math_|__|version|instruction_set")
on_gpu = pytest.mark.skipif(
    native.cuda_kernels is None or not torch.cuda.is_available(),
    reason="no GPU that torch can use, or no kernels for it (make kernels CUDA=1)",
)
Tensor = torch.Tensor


@pytest.mark.kernels
def test_emulated(tmp_path: Path) -> None:
    """Every kernel against its reference, its threads in an order that changes."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no {COMPILER} (CXX names another compiler)")
    done = subprocess.run([emulated(tmp_path)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:]
    assert len(re.findall(r"[1-9][0-9]* comparisons, 0 failed", done.stdout)) >= 12


@pytest.mark.kernels
def test_compiled(tmp_path: Path) -> None:
    """All that an operator may ask the module for is in it, for each of the GPUs that setup.py names."""
    if (os.environ.get("NVCC") or shutil.which("nvcc")) is None:
        pytest.skip("no nvcc (NVCC names one)")
    module = tmp_path / "_kernels_cuda.so"
    names, here = setup(), os.getcwd()
    os.chdir(REPOSITORY)
    try:
        names["build_cuda"](tmp_path / "objects", module)
    finally:
        os.chdir(here)
    found = loaded(module)
    assert found.version == native.KERNELS_VERSION
    wanted = {name for name in dir(native.kernels) if not ON_CPU_ALONE.match(name)}
    assert wanted == {name for name in dir(found) if not ON_CPU_ALONE.match(name)}
    if lister := shutil.which("cuobjdump"):
        listed = subprocess.run(
            [lister, "--list-elf", module], capture_output=True, text=True, check=True
        ).stdout
        assert set(re.findall(r"\.(sm_[0-9]+)\.cubin", listed)) == {"sm_80", "sm_90"}


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("_kernels_cuda", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_kernels_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = SimpleNamespace(name=len), SimpleNamespace(name=abs)
    monkeypatch.setattr(native, "MODULES", {"cpu": one, "cuda": other, "meta": None})
    assert native.by_device({1: ("name",)}) == {("cpu", 1): (len,), ("cuda", 1): (abs,)}
    assert native.workers(torch.empty(0)) == (torch.get_num_threads(),)


# -- on a GPU: as on the processor, to rounding ---------------------------------------------------------

DTYPES = [torch.float32, torch.bfloat16]


def head(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return ops.linear_cross_entropy(x, weight, labels, label_smoothing=0.1)


def normed(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None, relu: bool = False
) -> Tensor:
    """Weights of bfloat16 are those of float32, which is what the kernel takes."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return batch_norm(x, weight.to(wide), bias.to(wide), relu=relu, residual=residual)[0]


def shaped(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape) for shape in shapes]


LABELS = torch.tensor([3, -100, 900, 0, 17])
CALLS: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "layer_norm": (lambda *x: layer_norm(*x), shaped((7, 300), (300,), (300,))),
    "rms_norm": (lambda x, w, r: rms_norm(x, w, residual=r)[0], shaped((7, 300), (300,), (7, 300))),
    "batch_norm": (lambda *x: normed(*x, relu=True), shaped((4, 5, 41, 67), (5,), (5,))),
    "batch_norm_1d": (normed, shaped((70, 33), (33,), (33,), (70, 33))),
    "bias_gelu": (bias_gelu, shaped((70, 33), (33,))),
    "swiglu": (swiglu, shaped((7, 300), (7, 300))),
    "flash_attention": (lambda *x: ops.flash_attention(*x, causal=True), shaped(*[(2, 3, 70, 40)] * 3)),
    "head": (lambda x, w: head(x, w, LABELS.to(x.device)), shaped((5, 64), (1000, 64))),
    "dropout": (lambda x: ops.dropout(x, 0.3, 11, 2, 5), shaped((7, 301))),
}


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    function, inputs = CALLS[name]
    results = []
    for device, computed in (("cpu", torch.float64), ("cuda", dtype)):
        leaves = [t.to(dtype).to(computed).to(device).requires_grad_() for t in inputs]
        out = function(*leaves)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        results.append([t.detach().cpu().double() for t in (out, *grads)])
    bound = 1e-4 if dtype == torch.float32 else 3e-2
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=bound, atol=bound * max(1.0, float(want.abs().max())))


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(70, 33), (4, 5, 41, 67)])
def test_batch_norm_has_the_bits_of_its_parts(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The norm, the addition and the ReLU one by one."""
    inputs = [t.cuda() for t in shaped(shape, shape[1:2], shape[1:2], shape)]
    inputs = [t.to(dtype) if t.dim() > 1 else t for t in inputs]
    dy, found = torch.randn_like(inputs[0]), []
    for function in (
        lambda x, w, b, r: normed(x, w, b, r, relu=True),
        lambda x, w, b, r: torch.relu(normed(x, w, b) + r),
    ):
        leaves = [t.detach().requires_grad_() for t in inputs]
        y = function(*leaves)
        found.append([y, *torch.autograd.grad(y, leaves, dy)])
    assert all(map(torch.equal, *found))


@on_gpu
def test_optimizer_on_a_gpu() -> None:
    grad = torch.randn(1001)
    offsets, counts = torch.tensor([0, 500]), torch.tensor([500, 501])
    found = []
    for device in ("cpu", "cuda"):
        param, m, v, sum, x = (torch.ones(1001, device=device) for _ in range(5))
        of_grad, half = grad.clone().to(device), x.bfloat16()  # the update clears its gradient
        norms = ops.norms(of_grad, offsets, counts)
        ops.adamw(
            param, of_grad, m, v, step=3, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, factor=0.5
        )
        ops.accumulate(sum, half, zero=True)
        found.append([t.cpu() for t in (norms, param, m, v, of_grad, sum, half)])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


@on_gpu
def test_the_gradient_of_an_embedding_has_the_bits_of_the_processor() -> None:
    """Each time: rows that come often, a padding among them, added to what is there."""
    indices, dy, before = torch.randint(0, 40, (3000,)), torch.randn(3000, 301), torch.randn(50, 301)
    found = []
    for device in ("cpu", "cuda", "cuda"):
        weight = torch.zeros(50, 301, device=device, requires_grad=True)
        place = weight.grad = before.clone().to(device)
        ops.embedding(indices.to(device), weight, 7).backward(dy.to(device))
        assert weight.grad is place
        found.append(place.cpu())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[1], found[2])


@on_gpu
def test_dropout_has_the_bits_of_the_processor() -> None:
    x = torch.randn(1003)
    assert torch.equal(ops.dropout(x.cuda(), 0.3, 11, 2, 5).cpu(), ops.dropout(x, 0.3, 11, 2, 5))
