"""The examples: short runs of each on two ranks, and the digits to the accuracy that their head promises."""

from __future__ import annotations

import json
import math
import runpy
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from alone import train_alone

from mpipipe.state.checkpoint import load

Launch = Callable[..., Any]
REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
BENCHMARKS = {"gpt10m", "gpt85m", "vgg"}  # too large for a test: `make bench` runs them
OTHERS = {"pretrain", "finetune", "own_model", "llama-70b", "cluster"}  # have tests of their own
SHORT = ("train.steps=10", "train.warmup=2", "eval.every=0", "eval.batches=1", "sample.length=0")

digits = pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn: mpipipe[digits]")
hf = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers: mpipipe[transformers]")
# gpt: the README's commands run it each time (tests/docs); digits: python_api.py learns them each time;
# unet: its model is trained in tests/mpi
MARKS = {"digits": (digits, pytest.mark.full), "gpt": (pytest.mark.full,), "unet": (pytest.mark.full,)}


def train(launch: Launch, ranks: int, example: str, folder: Path, *overrides: str) -> dict[str, Any]:
    """The summary of a run in `folder`; started from the repository's root, as the heads say."""
    config = EXAMPLES / f"{example}.yaml"
    job = launch(ranks, "-m", "mpipipe.train", config, f"run.dir={folder}", *overrides, timeout_s=180)
    assert job.returncode == 0, job.stderr
    return dict(json.loads((folder / "summary.json").read_text()))


def first_loss(folder: Path) -> float:
    return float(json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["loss"])


SINGLE = sorted({path.stem for path in EXAMPLES.glob("*.yaml")} - BENCHMARKS - OTHERS)


@pytest.mark.jobs
@pytest.mark.parametrize("example", [pytest.param(e, marks=MARKS.get(e, ())) for e in SINGLE])
def test_an_example_learns(launch: Launch, tmp_path: Path, example: str) -> None:
    steps = 100 if example == "mlp" else 10  # the perceptron learns slowly, in steps of milliseconds
    summary = train(launch, 2, example, tmp_path, *SHORT, f"train.steps={steps}")
    assert summary["steps"] == steps
    assert summary["final_loss"] < first_loss(tmp_path)
    assert math.isfinite(summary["val_loss"])


@hf
@pytest.mark.jobs
@pytest.mark.full  # tests/models/test_hf.py opens and freezes such models each time
def test_what_was_pretrained_is_fine_tuned_and_opens_in_transformers(launch: Launch, tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    small = (*SHORT, "train.steps=2", "train.warmup=1", "train.batch=4", "pipeline.micro_batches=2")
    train(launch, 2, "pretrain", before, *small)
    train(launch, 2, "finetune", after, *small, f"model.name=hf:{before}/checkpoint")
    old, new = load(before / "checkpoint"), load(after / "checkpoint")
    frozen = {name for name in old if ".wpe." in name or ".h.0." in name}
    assert len(frozen) == 13  # the positions; two norms and four linear layers, weight and bias each
    assert {name for name in old if torch.equal(old[name], new[name])} == frozen

    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(after / "checkpoint", output_loading_info=True)
    assert not any(info.values()), info
    named = dict(model.named_parameters())
    assert all(torch.equal(named[name], new[name]) for name in named)


@digits
@pytest.mark.jobs
def test_the_python_interface_twice_in_one_folder(launch: Launch, tmp_path: Path) -> None:
    said = []
    for ranks in (2, 1):
        job = launch(ranks, EXAMPLES / "python_api.py", cwd=tmp_path)
        assert job.returncode == 0, job.stderr
        lines = [line for line in job.stdout.splitlines() if not line.startswith("plan: ")]
        said.append([line.partition("  seconds")[0] for line in lines])
    assert said[0] == said[1]
    accuracy = next(line for line in said[0] if line.startswith("test accuracy"))
    assert float(accuracy.split()[-1]) >= 0.97
    assert said[0][-1].startswith("step  80")


@digits
@pytest.mark.jobs
@pytest.mark.full
def test_the_digits_are_learned_with_the_same_bits_on_one_rank_and_two(
    launch: Launch, tmp_path: Path
) -> None:
    one, two = (train(launch, ranks, "digits", tmp_path / str(ranks)) for ranks in (1, 2))
    assert two["metrics"]["accuracy"] >= 0.97
    assert (one["weights_sha256"], one["metrics"]) == (two["weights_sha256"], two["metrics"])


@pytest.mark.jobs
def test_code_of_one_s_own_learns_and_its_schedule_changes_no_bits(launch: Launch, tmp_path: Path) -> None:
    ours = train(launch, 2, "own_model", tmp_path / "ours", *SHORT)
    plain = train_alone(
        REPOSITORY, f"run.dir={tmp_path / 'plain'}", *SHORT, "pipeline.schedule=gpipe",
        config="examples/own_model.yaml",
    )  # fmt: skip
    assert ours["final_loss"] < first_loss(tmp_path / "ours")
    assert ours["plan_hash"] != plain.plan_hash
    assert ours["weights_sha256"] == plain.weights_sha256


def test_a_schedule_of_one_s_own_is_as_drawn() -> None:
    module = runpy.run_path(str(EXAMPLES / "own_schedule.py"))
    drawn = [line.split(maxsplit=2)[2] for line in module["__doc__"].splitlines() if "rank " in line]
    assert module["order"](len(drawn), 6) == drawn
