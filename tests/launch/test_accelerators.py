"""Two real ranks, each on an accelerator of its own: the weights are those that the processor gives, bit for
bit, as it computes every operator of the emulated device."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import emulated_device
import pytest

LACKING = emulated_device.missing()
pytestmark = [
    pytest.mark.full,
    pytest.mark.jobs,
    pytest.mark.skipif(LACKING is not None, reason=f"the emulated device cannot be built: {LACKING}"),
]

TRAIN = Path(__file__).resolve().parents[1] / "emulated" / "train.py"
GPT = "{name: gpt, layers: 4, d_model: 64, heads: 4, context: 32, dropout: 0.1}"
RESNET = "{name: resnet, size: 32, blocks: [1, 1, 1], widths: [8, 16, 16]}"
Launch = Callable[..., "subprocess.CompletedProcess[str]"]


def trained(launch: Launch, folder: Path, model: str, device: str, *settings: str, n: int = 2) -> str:
    """The weights after three steps, as a hash."""
    folder.mkdir()
    config = folder / "config.yaml"
    config.write_text(
        f"model: {model}\ndata: {{name: synthetic}}\ntrain: {{batch: 8, steps: 3}}\nsample: {{length: 0}}\n"
        "pipeline: {micro_batches: 4, cost_cache: false}\n"
    )
    run = folder / "run"
    words = (str(config), f"run.dir={run}", f"pipeline.device={device}", *settings)
    done = launch(n, str(TRAIN), *words, timeout_s=280.0)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(json.loads((run / "summary.json").read_text())["weights_sha256"])


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (GPT, ("pipeline.schedule=zb-v", "pipeline.recompute=selective")),
        (GPT, ("pipeline.schedule=1f1b", "pipeline.recompute=full", "train.precision=bf16")),
        (GPT, ("pipeline.replicas=2", "pipeline.blocks=2")),
        (RESNET, ()),
        ("{name: unet, size: 32, width: 8}", ()),
        ("{name: encoder_decoder}", ()),
    ],
)
def test_training_on_accelerators_has_the_bits_of_the_processor(
    launch: Launch, tmp_path: Path, model: str, settings: tuple[str, ...]
) -> None:
    there = trained(launch, tmp_path / "there", model, "auto", *settings)
    assert there == trained(launch, tmp_path / "here", model, "cpu", *settings)


def test_fast_bits_do_not_depend_on_the_number_of_accelerators(launch: Launch, tmp_path: Path) -> None:
    one, two = (trained(launch, tmp_path / str(n), GPT, "emulated", "train.bits=fast", n=n) for n in (1, 2))
    assert one == two


def test_a_run_is_resumed_from_accelerators_on_processors(launch: Launch, tmp_path: Path) -> None:
    """Which decides bits, so it wants to be asked for; on an emulated device it changes none."""
    trained(launch, tmp_path / "run", GPT, "auto", "train.steps=2")
    run, config = tmp_path / "run" / "run", tmp_path / "run" / "config.yaml"
    words = (str(config), f"run.dir={run}", "train.steps=4", "--resume")
    refused = launch(2, str(TRAIN), *words, "pipeline.device=cpu", timeout_s=280.0)
    assert refused.returncode != 0
    assert "an emulated accelerator" in refused.stderr
    assert "--new-numerics" in refused.stderr
    done = launch(1, str(TRAIN), *words, "pipeline.device=cpu", "--new-numerics", timeout_s=280.0)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((run / "summary.json").read_text())["weights_sha256"]
    assert found == trained(launch, tmp_path / "whole", GPT, "cpu", "train.steps=4")
