"""The border: what is accepted, what is refused, and what the refusal says."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from mpipipe.config import Config, load, parse, to_yaml
from mpipipe.config.read import _ELSEWHERE
from mpipipe.config.sections import GptConfig, HfConfig, MlpConfig, SyntheticConfig
from mpipipe.errors import ConfigError
from mpipipe.runtime.feed import split_evenly

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(path for path in FOLDER.glob("*.yaml") if path.stem != "cluster")  # which is no run
MLP = "model: {name: mlp}\ndata: {name: synthetic}\n"


def message(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text, "job.yaml", overrides)
    return str(caught.value)


def test_every_default_constructs() -> None:
    assert parse("") == Config()
    assert isinstance(parse("model: {layers: 2}").model, GptConfig)
    assert isinstance(parse(MLP).model, MlpConfig)
    assert isinstance(parse(MLP).data, SyntheticConfig)
    assert parse("train:\n") == Config()
    assert parse("model: llama") == parse("model: {name: llama}")
    assert parse("model: my.models:Net\ndata: my.data:load").model.args == {}
    assert isinstance(parse("model: hf:folder\ndata: synthetic").model, HfConfig)


@pytest.mark.parametrize("text", ["", MLP, "train: {lr: 3e-4, clip: null}\npipeline: {threads: auto}\n"])
def test_written_and_read_again(text: str) -> None:
    config = parse(text)
    assert parse(to_yaml(config)) == config


@pytest.mark.parametrize(
    "text",
    ["1e5", "12e45", ".5", "0o17", "010", "1:30", "0x1F", "2026-11-26", "yes", "null", "~", "1_0", "<<"],
)
def test_text_that_looks_like_something_else_is_text_again_when_it_was_written(text: str) -> None:
    config = parse(f'run: {{name: "{text}"}}')
    written = to_yaml(config)
    assert parse(written) == config
    assert yaml.safe_load(written)["run"]["name"] == text, "for other programs, too"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_examples_are_valid_and_survive_writing(path: Path) -> None:
    config = load(path)
    assert parse(to_yaml(config)) == config


def test_the_main_examples_exist() -> None:
    assert {"gpt.yaml", "gpt10m.yaml", "gpt85m.yaml", "mlp.yaml"} <= {path.name for path in EXAMPLES}


def test_it_cannot_be_changed_afterwards() -> None:
    with pytest.raises(ValidationError):
        parse("").train.steps = 3


def test_numbers_without_a_dot_are_numbers() -> None:
    assert parse("train: {lr: 3e-4}").train.lr == 3e-4
    assert parse("", overrides=["train.lr=1E-2"]).train.lr == 1e-2
    assert parse("train: {lr: 1}").train.lr == 1.0
    assert parse("train: {lr: .5, steps: 1_000}").train.steps == 1000
    assert parse("run: {name: 2026-11-26}").run.name == "2026-11-26"


def test_overrides_win_and_leave_the_rest() -> None:
    config = parse(
        "train: {steps: 5, batch: 32}", overrides=["train.steps=7", "run.name=x", "train.clip=null"]
    )
    assert (config.train.steps, config.train.batch, config.run.name, config.train.clip) == (7, 32, "x", None)
    assert parse(
        "", overrides=["model.name=mlp", "model.hidden=[3, 4]", "data.name=synthetic"]
    ).model == MlpConfig(hidden=(3, 4))


@pytest.mark.parametrize(
    "path", ["/scratch/Project #3/x", "/a: b/x", "#3", "@x", "- x", "it's", 'a "b"', "/a, b/[c]"]
)
def test_paths_on_the_command_line_are_text_as_it_stands(path: str) -> None:
    config = parse("", overrides=[f"run.dir={path}", f"data.path={path}"])
    assert (config.run.dir, config.data.path) == (path, path)  # type: ignore[union-attr]
    assert parse("data: digits", overrides=[f"model.name=hf:{path}"]).model.name == f"hf:{path}"
    assert parse(to_yaml(config)) == config


def test_paths_may_begin_at_home_and_hold_variables_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    config = parse("data: {path: ~/a.txt}\nrun: {dir: $SCRATCH/x}")
    assert (config.data.path, config.run.dir) == ("/home/me/a.txt", "/scratch/me/x")  # type: ignore[union-attr]
    assert parse("", overrides=["run.dir=${SCRATCH}/~/#1"]).run.dir == "/scratch/me/~/#1"
    assert parse("model: {name: 'hf:$SCRATCH/gpt2'}").model.name == "hf:/scratch/me/gpt2"
    assert "dir: /scratch/me/x\n" in to_yaml(config), "as the environment was"
    monkeypatch.delenv("SCRATCH")
    said = message("", "run.dir=$SCRATCH/x")
    assert "run.dir = '$SCRATCH/x' (str); expected a path whose variables are set, not $SCRATCH" in said
    said = message("", "run.dir=~no.body/x")
    assert "expected a path: ~no.body is the home of nobody; ./~no.body is a file or folder here" in said


@pytest.mark.parametrize(
    ("given", "meant"), [("null", None), ("'null'", "null"), ('"7"', "7"), (" a b ", "a b"), ("", None)]
)
def test_other_text_on_the_command_line_is_yaml(given: str, meant: str | None) -> None:
    assert parse("", overrides=[f"run.name={given}"]).run.name == meant
    assert "run.name = 7 (int)" in message("", "run.name=7")


@pytest.mark.parametrize(("given", "meant"), [("24 GiB", 24 << 30), ("1.5kB", 1500), ("4e7", 40_000_000)])
def test_bytes_may_be_given_as_a_size(given: str, meant: int) -> None:
    assert parse(f"pipeline: {{memory_bytes: {given}}}").pipeline.memory_bytes == meant
    assert parse("", overrides=[f"pipeline.memory_bytes={given}"]).pipeline.memory_bytes == meant


@pytest.mark.parametrize(
    ("text", "overrides", "parts"),
    [
        ("train:\n  step: 5\n", [], ["job.yaml, line 2", "'train.step'", "'train.steps'"]),
        ("modle: {}", [], ["line 1", "'modle'", "'model'"]),
        ("model:\n  d_modle: 3\n", [], ["line 2", "'model.d_modle'", "'model.d_model'"]),
        ("train: {epochs: 3}", [], ["'train.epochs' is not a key; did you mean 'train.steps'?"]),
        ("model:\n  n_embd: 3\n", [], ["line 2", "did you mean 'model.d_model'?"]),
        ("train: {micro_batches: 3}", [], ["'train.micro_batches'", "'pipeline.micro_batches'"]),
        (
            "model: {name: mlp, layers: 3}",
            ["data.name=synthetic"],
            ["'model.layers'", "valid here: name, inputs"],
        ),
        (
            "data: {samples: 3}",
            [],
            [
                "'data.samples' is not a key of data.name = text (valid here: name, path, val_fraction)",
                ", but of synthetic: remove it, or set data.name to synthetic",
            ],
        ),
        (
            "data:\n  name: synthetic\n  samples: 3",
            ["data.name=mine:pairs"],
            [
                "line 3: 'data.samples' is not a key of data.name = mine:pairs (valid here: name, args)",
                ", but of synthetic: remove it, or replace the whole section: data='{name: mine:pairs}'",
            ],
        ),
        ("", ["model.hidden=4"], ["of model.name = gpt", "set model.name to lstm or mlp or vgg"]),
        ("train:\n\n  steps: many\n", [], ["line 3", "train.steps = 'many' (str)", "integer"]),
        ("train: {steps: 010}", [], ["train.steps = '010' (str)", "integer"]),
        ("train: {steps: 1:40}", [], ["train.steps = '1:40' (str)", "integer"]),
        ("", ["run.time_limit=1:30:00"], ["= '1:30:00' (str); expected minutes as a number, such as 90"]),
        ("train: {steps: 3.0}", [], ["train.steps = 3.0 (float)", "integer; write 3"]),
        ("train: {steps: 1e3}", [], ["train.steps = 1000.0 (float)", "; write 1000"]),
        ("train: {lr: '3e-4'}", [], ["train.lr = '3e-4' (str)", "number; write 3e-4, without quotes"]),
        ("train: {steps: '1e3'}", [], ["train.steps = '1e3' (str)", "; write 1000"]),
        ("train: {steps: '7'}", ["train.lr=x"], ["; write 7, without quotes", "train.lr = 'x' (str)"]),
        ("train: {steps: true}", [], ["train.steps = True (bool)", "integer"]),
        ("train: {lr: .nan}", [], ["train.lr = nan", "finite"]),
        ("train: {betas: [0.9, 2]}", [], ["train.betas.1 = 2", "less than 1"]),
        ("train: {betas: [0.9]}", [], ["train.betas", "one value more"]),
        ("train: 5", [], ["train = 5 (int)", "keys with values"]),
        ("train: {1: 5}", [], ["train.1", "text"]),
        ("model: {name: gtp}", [], ["model.name = 'gtp'", "'gpt', 'llama'", "'hf:path'"]),
        ("pipeline: {schedule: zbv}", [], ["= 'zbv' (str)", "(name.csv); did you mean 'zb-v'?"]),
        ("pipeline: {schedule: 1F1B}", [], ["or package.module:name or a file", "did you mean '1f1b'?"]),
        ("model: 7", [], ["model = 7 (int)", "keys with values"]),
        ("model: a b:c", [], ["model = 'a b:c' (str)", "package.module:name"]),
        ("model: resnet", [], ["model.name = resnet", "data.name = text", "images or digits or synthetic"]),
        ("model: {name: llama, kv_heads: 3}", [], ["model.heads = 4", "model.kv_heads = 3"]),
        ("data: tokens", [], ["data lacks the key 'path'"]),
        (
            "data:\n  name: mixture\n  sources: [text, {name: tokens, pth: b}]\n  weights: [1, 1]",
            [],
            ["line 3: data.sources.1 lacks", "did you mean 'data.sources.1.path'", "val_path"],
        ),
        ("data: {name: mixture, sources: [text], weights: [1, 2]}", [], ["1 entries and data.weights 2"]),
        ("", ["pipeline.memory_bytes=24 gb"], ["= '24 gb' (str); expected bytes, or a size such as 24 GiB"]),
        ("pipeline: {memory_bytes: 0 GiB}", [], ["pipeline.memory_bytes = 0 (int)", "equal to 1"]),
        ("pipeline: {memory_bytes: 1.5}", [], ["pipeline.memory_bytes = 1.5 (float)", "integer"]),
        ("pipeline: {threads: all}", [], ["pipeline.threads = 'all'", "integer or 'auto'"]),
        ("pipeline: {schedule: 2f2b}", [], ["pipeline.schedule = '2f2b'", "'interleaved-planned' or 'auto'"]),
        ("train: {steps: 5}", ["train.lr=-1"], ["override 'train.lr=-1'", "train.lr = -1", "greater than 0"]),
        ("", ["train.steps.x=1"], ["override 'train.steps.x=1'", "train.steps = {'x': 1}"]),
        ("train: {steps: 5}", ["train.steps.x=1"], ["override 'train.steps.x=1'", "'steps' is 5"]),
        ("", ["train.steps"], ["override 'train.steps'", "section.key=value"]),
        ("a: [", [], ["job.yaml", "not valid YAML", 'in "job.yaml", line 1']),
        ("", ["model.hidden=["], ["in \"override 'model.hidden=['\", line 1"]),
        ("train: {lr: 1, lr: 2}", [], ["'lr' occurs twice", "line 1"]),
        ("? [1, 2]\n: 3", [], ["not valid YAML", "unhashable"]),
        ("- 1", [], ["job.yaml", "list", "sections"]),
    ],
)
def test_messages_name_the_place_the_value_and_what_is_expected(
    text: str, overrides: list[str], parts: list[str]
) -> None:
    said = message(text, *overrides)
    assert all(part in said for part in parts), said


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["model.d_model=100", "model.heads=3"], ["100", "3"]),
        (["model.name=mlp"], ["model.name = mlp", "synthetic"]),
        (["train.batch=4"], ["train.batch = 4", "8"]),
        (
            ["pipeline.blocks=3"],
            ["blocks = 3 does not divide", "micro_batches = 8; set the one to 2 or 4, or the other to a "],
        ),
        (["pipeline.blocks=16"], ["set the one to 8, or the other to a multiple of 16"]),
        (["pipeline.blocks=4", "pipeline.reduce=fast"], ["adds up in no blocks", "blocks = 4"]),
        (["pipeline.max_ranks=8"], ["max_ranks = 8", "pipeline.blocks = 1; set it to auto"]),
        (["train.save_every=10", "train.keep_every=25"], ["keep_every = 25", "save_every = 10"]),
        (["train.keep_every=25"], ["keep_every = 25", "save_every = 0"]),
    ],
)
def test_values_that_do_not_fit_each_other(overrides: list[str], parts: list[str]) -> None:
    said = message("", *overrides)
    assert all(part in said for part in parts), said


def test_every_batch_divides_into_micro_batches_of_a_sample_or_more() -> None:
    for batch in range(1, 40):
        for parts in range(1, 12):
            settings = [f"train.batch={batch}", f"pipeline.micro_batches={parts}"]
            assert _accepts(settings) == (batch >= parts), settings
            if batch >= parts:
                sizes = [stop - start for start, stop in split_evenly(batch, parts)]
                assert (sum(sizes), len(sizes)) == (batch, parts)
                assert sizes[0] == max(sizes) == parse("", overrides=settings).micro_batch
                assert sizes[-1] >= sizes[0] - 1 > -1


def _accepts(overrides: list[str]) -> bool:
    try:
        parse("", overrides=overrides)
    except ConfigError:
        return False
    return True


def test_a_section_may_be_replaced_as_a_message_says() -> None:
    text = "data: {name: synthetic, samples: 3}"
    config = parse(text, overrides=["data={name: text}", "data.path=x"])
    assert config == parse("data: {name: text, path: x}")


def test_of_a_list_with_wrong_items_these_are_named() -> None:
    said = message("pipeline: {replicas: [3, 0]}")
    assert "pipeline.replicas.1 = 0 (int); expected greater than or equal to 1" in said
    assert "[3, 0]" not in said
    assert "or a list of at least one or" in message("pipeline: {replicas: []}")


def test_two_wrong_keys_are_both_named() -> None:
    said = message("train: {stepz: 1}\nevil: {}\n")
    assert "train.stepz" in said
    assert "evil" in said


def test_a_file_that_is_no_text_is_named_with_the_byte(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes("run: {name: café}".encode("latin-1"))
    with pytest.raises(
        ConfigError, match=r"latin.yaml: is not UTF-8 text \(byte 0xe9 at 15\); save it as UTF-8"
    ):
        load(tmp_path / "latin.yaml")
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory\)"):
        load(tmp_path)


def test_other_programs_names_lead_to_keys() -> None:
    for name, key in _ELSEWHERE.items():
        section, field = key.split(".")
        said = message("", f"{section}.{name}=1", *(["data.name=text"] if section == "model" else []))
        assert f"did you mean '{key}'?" in said
        assert field in vars(getattr(Config(), section))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(("word", "on"), [("off", False), ("false", False), ("on", True), ("true", True)])
def test_kernels_may_be_a_switch(word: str, on: bool) -> None:
    written, given = parse(f"kernels: {word}").kernels, parse("", overrides=[f"kernels={word}"]).kernels
    assert written == given
    assert (written.compiled, written.gemm) == (on, "auto")
    assert parse("kernels: {gemm: mkl}", overrides=[f"kernels={word}"]).kernels.gemm == "mkl"
    both = parse(f"kernels: {word}", overrides=["kernels.gemm=mkl"])
    assert (both.kernels.compiled, both.kernels.gemm) == (on, "mkl")
    assert parse(to_yaml(both)) == both


def test_bits_of_the_kernels_are_refused_without_them() -> None:
    said = message("train: {bits: fast}", "kernels=off")
    assert "kernels = off, and train.bits = fast" in said
    assert "set train.bits to torch" in said
    assert parse("kernels: on\ntrain: {bits: fast}").train.bits == "fast"
    assert "kernels = 3 (int); expected on, off or keys with values" in message("kernels: 3")
