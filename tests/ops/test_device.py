"""Where a rank computes. This torch has no accelerator, so one is made up where one is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from mpipipe.errors import ConfigError
from mpipipe.ops import device


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)


def test_without_an_accelerator_all_is_on_the_processor_and_nothing_is_idle() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    assert device.find("auto", 3) == device.find("cpu") == torch.device("cpu")
    assert device.seen() == ""
    assert device.idle() is None
    assert device.on_host()


def test_a_device_that_is_not_there_is_refused_with_what_torch_sees_and_what_to_do() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    with pytest.raises(
        ConfigError,
        match=r"^pipeline.device = cuda: torch .* sees no such device here, but cpu alone; .*"
        r"pipeline.device=cpu$",
    ):
        device.find("cuda")


@pytest.mark.usefixtures("four")
def test_ranks_of_a_node_take_its_accelerators_in_turn() -> None:
    found = [device.find(wish, rank) for wish in ("auto", "cuda") for rank in range(5)]
    assert [f.index for f in found] == [0, 1, 2, 3, 0] * 2
    assert device.find("cpu", 2) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"pipeline.device = xpu: .* but cuda and cpu; "):
        device.find("xpu")


@pytest.mark.slow
def test_fp32_on_a_gpu_is_never_less_and_attention_has_one_order_of_sums() -> None:
    """In a process of its own: the switches belong to it."""
    code = (
        "import torch; from mpipipe.ops import device; b = torch.backends\n"
        "torch.set_float32_matmul_precision('high'); b.cudnn.benchmark = True\n"
        "device._same_sums_on_cuda()\n"
        "print(torch.get_float32_matmul_precision(), b.cudnn.allow_tf32, b.cudnn.conv.fp32_precision,\n"
        "b.cudnn.rnn.fp32_precision, b.cudnn.benchmark, b.cuda.math_sdp_enabled(),\n"
        "b.cuda.flash_sdp_enabled(), b.cuda.mem_efficient_sdp_enabled(), b.cuda.cudnn_sdp_enabled())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    fp32 = ["highest", "False", "ieee", "ieee"]  # torch refuses to read the second in some states
    assert done.stdout.split() == [*fp32, "False", "True", "False", "False", "False"], done.stderr
