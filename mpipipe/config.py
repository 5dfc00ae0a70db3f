"""The configuration: YAML in, one frozen `Config` out, checked once at the border.

Invariants
  1. Every default constructs; `parse(to_yaml(config)) == config`.
  2. An unknown key, a wrong type and two values that do not fit are each one `ConfigError` that
     names the file, the line, the key, what stands there and what should.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Strict,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from mpipipe.errors import ConfigError

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0.0)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    """Base of all sections: no unknown keys, no silent conversions, no changes afterwards."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class GptConfig(Section):
    name: Literal["gpt"] = "gpt"
    vocab: Positive | None = None  # number of token ids; null = what the data needs
    layers: Positive = 4  # transformer blocks
    d_model: Positive = 256  # width of the residual stream; a multiple of heads
    heads: Positive = 4  # attention heads; 32 to 64 channels each is good
    context: Positive = 128  # tokens per sample
    tied: bool = True  # the head uses the token embedding's weight
    dropout: Share = 0.0  # share of activations dropped in training; 0 for short runs


class MlpConfig(Section):
    name: Literal["mlp"] = "mlp"
    inputs: Positive = 32  # features per sample
    hidden: Annotated[tuple[Positive, ...], Strict(False)] = (64, 64)  # width of each hidden layer
    classes: Annotated[int, Field(ge=2)] = 10  # number of labels
    dropout: Share = 0.0  # share of activations dropped in training


class TextConfig(Section):
    name: Literal["text"] = "text"
    path: str | None = None  # file or folder; null = the Python standard library's source
    val_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05  # share kept for validation


class SyntheticConfig(Section):
    name: Literal["synthetic"] = "synthetic"
    samples: Positive = 4096  # size of an mlp's training set; a gpt's is endless


class TrainConfig(Section):
    steps: Positive = 200  # optimizer steps
    batch: Positive = 16  # samples per step, over all micro-batches
    optimizer: Literal["adamw", "sgd"] = "adamw"  # sgd keeps less state, adamw needs less tuning
    lr: Above0 = 3e-4  # highest learning rate; adamw 3e-4 to 3e-3, sgd 1e-2 to 1e-1
    betas: Annotated[tuple[Share, Share], Strict(False)] = (0.9, 0.95)  # decays of adamw's two means
    eps: Above0 = 1e-8  # adamw's guard against division by zero
    momentum: Share = 0.9  # sgd's; 0 = none
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1  # adamw: per unit of lr; sgd: in the gradient
    warmup: Count = 20  # steps from rate 0 to lr; a tenth of steps is good
    min_lr_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1  # last rate / lr, reached by a cosine
    clip: Above0 | None = 1.0  # largest gradient norm; null = no limit
    precision: Literal["fp32", "bf16"] = "fp32"  # of the matrix products
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0  # of weights, data order and dropout


class EvalConfig(Section):
    every: Count = 50  # steps between evaluations; 0 = at the end only
    batches: Positive = 8  # batches per evaluation
    batch: Positive | None = None  # samples per evaluation batch; null = train.batch


class PipelineConfig(Section):
    schedule: Literal["1f1b", "gpipe"] = "1f1b"  # 1f1b holds fewer activations
    micro_batches: Positive = 8  # parts of a batch; 4 per stage or more keeps ranks busy
    blocks: Positive = 1  # equal accumulation blocks; 1 = plain order of additions
    tied: Literal["per_use", "eager"] = "per_use"  # tied gradients merge once per step, or micro-batch
    threads: Positive | Literal["auto"] = 1  # per rank; auto = cores of the node / its ranks
    receive_window: Positive = 4  # receives posted ahead per rank
    memory_bytes: Positive | None = None  # limit per rank; null = its share of the node


class KernelsConfig(Section):
    gemm: Literal["mkl", "onednn"] = "mkl"  # library of fp32 matrix products; changes bits


class RunConfig(Section):
    dir: str | None = None  # run folder; null = runs/<UTC time>-<name>
    name: str | None = None  # short name of the run; null = the model's
    log_every: Positive = 10  # steps between lines of the log


class SampleConfig(Section):
    length: Count = 200  # tokens written at the end; 0 = none
    temperature: Annotated[float, Field(ge=0.0)] = 0.8  # 0 = the likeliest token each time
    prompt: Annotated[str, Field(min_length=1)] = "\n"  # what the sample starts from


def _named(default: str) -> Discriminator:
    """Chooses a section's kind by its `name`; `default` has the say about all else."""
    return Discriminator(lambda v: v.get("name", default) if isinstance(v, dict) else _name_of(v, default))


def _name_of(section: object, default: str) -> object:
    return getattr(section, "name", default)


ModelConfig = Annotated[Annotated[GptConfig, Tag("gpt")] | Annotated[MlpConfig, Tag("mlp")], _named("gpt")]
DataConfig = Annotated[
    Annotated[TextConfig, Tag("text")] | Annotated[SyntheticConfig, Tag("synthetic")], _named("text")
]


class Config(Section):
    model: ModelConfig = GptConfig()
    data: DataConfig = TextConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    pipeline: PipelineConfig = PipelineConfig()
    kernels: KernelsConfig = KernelsConfig()
    run: RunConfig = RunConfig()
    sample: SampleConfig = SampleConfig()

    @property
    def micro_batch(self) -> int:
        """Samples per training micro-batch; where they do not divide, later ones have one less."""
        return math.ceil(self.train.batch / self.pipeline.micro_batches)

    @property
    def eval_batch(self) -> int:
        return self.eval.batch or self.train.batch

    @model_validator(mode="after")
    def _values_fit(self) -> Config:
        for problem in _misfits(self):
            raise ValueError(problem)
        return self


def _misfits(c: Config) -> Iterator[str]:
    """Pairs of values that are each legal and do not go together."""
    m, p = c.model, c.pipeline
    if m.name == "gpt" and m.d_model % m.heads:
        yield f"model.d_model = {m.d_model} is not a multiple of model.heads = {m.heads}; change one"
    if m.name == "mlp" and c.data.name == "text":
        yield "model.name = mlp cannot read data.name = text; set data.name to synthetic"
    if c.train.batch < p.micro_batches:
        yield (
            f"train.batch = {c.train.batch} is smaller than pipeline.micro_batches = {p.micro_batches}; "
            "a micro-batch needs a sample: raise the one or lower the other"
        )
    if p.micro_batches % p.blocks:
        yield f"pipeline.blocks = {p.blocks} does not divide pipeline.micro_batches = {p.micro_batches}"


# -- reading ----------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML whose `3e-4` is a number (YAML 1.1 reads it as text) and whose keys occur once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str | None] = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key in seen and key not in (None, "<<"):
                problem = f"the key '{key}' occurs twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in the YAML file `path`, with `overrides` such as "train.steps=50" applied.
    Raises ConfigError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); name an existing YAML file") from error
    return parse(text, str(path), overrides)


def parse(text: str, source: str = "config", overrides: Sequence[str] = ()) -> Config:
    """As `load`, from the text itself; `source` is what messages call it. Raises ConfigError."""
    raw = _read_yaml(text, source)
    if raw is not None and not isinstance(raw, dict):
        raise ConfigError(f"{source}: holds a {type(raw).__name__}; expected sections such as 'train:'")
    data: dict[str, Any] = raw or {}
    changed = {_override(data, item): item for item in overrides}
    # A section that is written but empty ("train:") means its defaults.
    data = {key: {} if value is None and key in Config.model_fields else value for key, value in data.items()}
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        lines = _lines(text)
        raise ConfigError("\n".join(_messages(error, data, source, lines, changed))) from error


def to_yaml(config: Config) -> str:
    """Every key with its value, such that `parse` gives the same configuration."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # _Loader is a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {error}") from error


def _override(data: dict[str, Any], item: str) -> tuple[str, ...]:
    """Writes "a.b=value" into `data`; the path written."""
    key, equals, value = item.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise ConfigError(f"override '{item}': expected section.key=value, such as train.steps=50")
    place = data
    for part in path[:-1]:
        inner = place.get(part) or {}
        if not isinstance(inner, dict):
            raise ConfigError(f"override '{item}': '{part}' is {inner!r}, which has no keys below it")
        place[part] = place = dict(inner)
    place[path[-1]] = _read_yaml(value, f"override '{item}'")
    return path


# -- messages ---------------------------------------------------------------------------------


def _lines(text: str) -> dict[tuple[str, ...], int]:
    """Line number of each key path of the YAML text."""
    found: dict[tuple[str, ...], int] = {}

    def walk(node: yaml.Node | None, path: tuple[str, ...]) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                found[(*path, str(key.value))] = key.start_mark.line + 1
                walk(value, (*path, str(key.value)))

    walk(yaml.compose(text, _Loader), ())
    return found


def _messages(
    error: ValidationError,
    data: dict[str, Any],
    source: str,
    lines: dict[tuple[str, ...], int],
    changed: dict[tuple[str, ...], str],
) -> Iterator[str]:
    """One message per key; a union's several complaints about one value are joined."""
    by_path: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for detail in error.errors():
        by_path.setdefault(_path(detail, data), []).append(detail)
    for path, details in by_path.items():
        yield f"{_place(path, source, lines, changed)}: {_complaint('.'.join(path), path, details)}"


def _path(detail: ErrorDetails, data: Any) -> tuple[str, ...]:
    """The key path as the user wrote it: pydantic's location without the names of union members."""
    path: list[str] = []
    for part in detail["loc"]:
        in_list = isinstance(data, list) and isinstance(part, int) and part < len(data)
        if in_list or (isinstance(data, dict) and part in data):
            path.append(str(part))
            data = data[part]
    return (*path, "name") if detail["type"] == "union_tag_invalid" else tuple(path)


def _place(
    path: tuple[str, ...], source: str, lines: dict[tuple[str, ...], int], changed: dict[tuple[str, ...], str]
) -> str:
    for written, item in changed.items():
        if written[: len(path)] == path or path[: len(written)] == written:
            return f"override '{item}'" if path else source
    known = [path[:length] for length in range(len(path), 0, -1) if path[:length] in lines]
    return f"{source}, line {lines[known[0]]}" if known else source


_EXPECTED = {
    "model_type": "keys with values",
    "model_attributes_type": "keys with values",
    "tuple_type": "a list",
    "missing": "one value more",
    "too_long": "fewer values",
    "invalid_key": "a key that is text",
}


def _complaint(key: str, path: tuple[str, ...], details: list[ErrorDetails]) -> str:
    first = details[0]
    if first["type"] == "extra_forbidden":
        valid = _valid_keys(first["loc"])
        near = [".".join((*path[:-1], k)) for k in difflib.get_close_matches(path[-1], valid, n=1)]
        other = [f"{s}.{path[-1]}" for s, kind in _sections().items() if path[-1] in kind.model_fields]
        hint = f"did you mean '{(other + near)[0]}'? " if other + near else ""
        return f"'{key}' is not a key; {hint}valid here: {', '.join(valid)}"
    if first["type"] == "union_tag_invalid":
        ctx = first["ctx"]
        return f"{key} = {ctx['tag']!r}; expected one of {ctx['expected_tags']}"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    wanted = " or ".join(_EXPECTED.get(d["type"], d["msg"].removeprefix("Input should be ")) for d in details)
    return f"{key} = {first['input']!r} ({type(first['input']).__name__}); expected {wanted}"


def _sections() -> dict[str, type[BaseModel]]:
    """The sections that have one kind only."""
    kinds = {key: field.annotation for key, field in Config.model_fields.items()}
    return {k: kind for k, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, BaseModel)}


def _valid_keys(loc: tuple[str | int, ...]) -> list[str]:
    """The keys of the section in which the last part of `loc` was not one. A location names the
    member of a union ("model", "gpt", "layer"), so the last name before it decides."""
    if len(loc) == 1:
        return list(Config.model_fields)
    kinds: dict[str, type[BaseModel]] = {"gpt": GptConfig, "mlp": MlpConfig}
    kinds |= {"text": TextConfig, "synthetic": SyntheticConfig, **_sections()}
    return list(kinds[str(loc[-2])].model_fields)
