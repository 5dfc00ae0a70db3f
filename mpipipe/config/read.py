"""From YAML to the frozen `Config`, with one message per wrong key.

Invariants
  1. `parse(to_yaml(config)) == config`.
  2. An unknown key, a wrong type and two values that do not fit are each one `ConfigError` that
     names the file, the line, the key, what stands there and what should.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from mpipipe.config.whole import Config
from mpipipe.errors import ConfigError, did_you_mean, nearest


class _Loader(yaml.SafeLoader):
    """YAML whose numbers are those of YAML 1.2, such as `3e-4`, and whose keys occur once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str | None] = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key in seen and key not in (None, "<<"):
                problem = f"the key '{key}' occurs twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_KEPT = "null", "bool", "merge", "value"  # of YAML 1.1, to which 1:30 and 010 are numbers, and dates no text
_INT = re.compile(r"[-+]?(0|[1-9][\d_]*|0x[\da-fA-F_]+|0b[01_]+)$")
_FLOAT = re.compile(
    r"([-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?|[-+]?\d+[eE][-+]?\d+"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in forms if tag.rpartition(":")[2] in _KEPT]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


class _Dumper(yaml.SafeDumper):
    """Puts text that `_Loader`, or YAML 1.1, would take for something else in quotes."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in the YAML file `path`, with `overrides` such as "train.steps=50" applied.
    Raises ConfigError."""
    return parse(read_text(path), str(path), overrides)


def parse(text: str, source: str = "config", overrides: Sequence[str] = ()) -> Config:
    """As `load`, from the text itself; `source` is what messages call it. Raises ConfigError."""
    data = _spelled_out(read_sections(text, source, "train"))
    changed = {_override(data, item): item for item in overrides}
    # A section that is written but empty ("train:") means its defaults.
    data = {key: {} if value is None and key in Config.model_fields else value for key, value in data.items()}
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        lines = lines_of(text)
        raise ConfigError("\n".join(_messages(error, data, source, lines, changed))) from error


def to_yaml(config: Config) -> str:
    """Every key with its value, such that `parse` gives the same configuration."""
    values = config.model_dump(mode="json")
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_text(path: str | Path, kind: str = "YAML file") -> str:
    """Of a text file. kind: what it should be, for messages. Raises ConfigError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name an existing {kind}") from error
    except UnicodeDecodeError as error:
        byte = f"byte {error.object[error.start]:#x} at {error.start}"
        raise ConfigError(f"{path}: is not UTF-8 text ({byte}); save it as UTF-8") from error


def order_text(path: str | Path, key: str) -> str:
    """Of a file with the order of a schedule, which a key names. Raises ConfigError."""
    return read_text(path, f"CSV file in {key}")


def read_sections(text: str, source: str, such_as: str) -> dict[str, Any]:
    """The keys of a YAML text and what stands below them. Raises ConfigError."""
    raw = read_yaml(text, source)
    if raw is not None and not isinstance(raw, dict):
        raise ConfigError(f"{source}: holds a {type(raw).__name__}; expected sections such as '{such_as}:'")
    return raw or {}


def read_yaml(text: str, source: str) -> Any:
    loader = _Loader(text)  # a SafeLoader
    loader.name = source  # as its messages call the place
    try:
        return loader.get_single_data()
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {error}") from error


def _override(data: dict[str, Any], item: str) -> tuple[str, ...]:
    """Writes "a.b=value" into `data`; the path written."""
    key, equals, text = item.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise ConfigError(f"override '{item}': expected section.key=value, such as train.steps=50")
    value = _value(path[-1], text, f"override '{item}'")
    if isinstance(value, bool) and key.strip() in _SWITCHES:
        path = (*path, _SWITCHES[key.strip()])
    place = data
    for part in path[:-1]:
        inner = place.get(part) or {}
        if not isinstance(inner, dict):
            raise ConfigError(f"override '{item}': '{part}' is {inner!r}, which has no keys below it")
        place[part] = place = dict(inner)
    place[path[-1]] = value
    return path


_TEXTS = ("dir", "path", "val_path", "tokenizer", "name", "prompt")  # keys whose value is text


def _value(key: str, text: str, source: str) -> Any:
    """YAML; but text without quotes as it stands where text is meant: paths may hold ` #` and `: `."""
    plain = text.strip()
    is_text = _tag(plain) not in ("null", "bool", "int", "float")
    if key in _TEXTS and is_text and plain[0] not in "'\"[{":
        return plain
    return read_yaml(text, source)


def _tag(plain: str) -> str:
    """What YAML takes text without quotes for: "int", "str", ..."""
    tag: str = _Loader("").resolve(yaml.ScalarNode, plain, (True, False))  # type: ignore[no-untyped-call]
    return tag.rpartition(":")[2]


_SWITCHES = {"kernels": "compiled"}  # sections that may be a switch, and the key that this means


def _spelled_out(data: dict[str, Any]) -> dict[str, Any]:
    """With `kernels: off` as a section."""
    return {k: {_SWITCHES[k]: v} if k in _SWITCHES and isinstance(v, bool) else v for k, v in data.items()}


# -- messages ---------------------------------------------------------------------------------


def lines_of(text: str) -> dict[tuple[str, ...], int]:
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
    """One message per key; a union's several complaints about one value are joined, and of a list with wrong
    items only these are complained about."""
    by_path: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for detail in error.errors():
        by_path.setdefault(_path(detail, data), []).append(detail)
    for path, details in by_path.items():
        if isinstance(details[0]["input"], list) and any(path == other[:-1] for other in by_path):
            continue
        complaint = _of_another_kind(path, details[0], data, changed)
        complaint = complaint or _complaint(".".join(path), path, details)
        yield f"{_place(path, source, lines, changed, complaint)}: {complaint}"


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
    path: tuple[str, ...], source: str, lines: dict[tuple[str, ...], int],
    changed: dict[tuple[str, ...], str], complaint: str,
) -> str:  # fmt: skip
    if not path:  # several keys that do not go together
        keys = {item: re.escape(item.partition("=")[0].strip()) for item in changed.values()}
        named = [item for item, key in keys.items() if re.search(rf"(?<![\w.]){key}(?!\w)", complaint)]
        return f"{source} with {' '.join(named)}" if named else source
    for written, item in changed.items():
        if written[: len(path)] == path or path[: len(written)] == written:
            return f"override '{item}'"
    return place_of(path, source, lines)


def place_of(path: tuple[str, ...], source: str, lines: dict[tuple[str, ...], int]) -> str:
    """The line of a key, or of the nearest one above it that is written."""
    known = [path[:length] for length in range(len(path), 0, -1) if path[:length] in lines]
    return f"{source}, line {lines[known[0]]}" if known else source


_EXPECTED = {
    "model_type": "keys with values",
    "model_attributes_type": "keys with values",
    "tuple_type": "a list",
    "missing": "one value more",
    "too_long": "fewer values",
    "too_short": "a list of at least one",
    "invalid_key": "a key that is text",
}
_LITERALS = re.compile(r"'([^']+)'")
_FORMS = {r"\.csv$": "a file of actions (name.csv)"}  # of text, by pattern; else `package.module:name`


_ELSEWHERE = {  # what other programs call some of the keys
    "epochs": "train.steps",
    "max_steps": "train.steps",
    "max_iters": "train.steps",
    "learning_rate": "train.lr",
    "batch_size": "train.batch",
    "grad_clip": "train.clip",
    "warmup_steps": "train.warmup",
    "gradient_accumulation_steps": "pipeline.micro_batches",
    "block_size": "model.context",
    "seq_len": "model.context",
    "n_layer": "model.layers",
    "n_head": "model.heads",
    "n_embd": "model.d_model",
}


def _complaint(key: str, path: tuple[str, ...], details: list[ErrorDetails]) -> str:
    first = details[0]
    if first["type"] == "extra_forbidden":
        valid = _valid_keys(first["loc"])
        near, name = nearest(path[-1], valid), path[-1]
        other = [f"{s}.{name}" for s, kind in _sections().items() if name in kind.model_fields]
        here = [".".join((*path[:-1], near))] if near else []
        meant = next(iter([_ELSEWHERE[name]] if name in _ELSEWHERE else other + here), None)
        return f"'{key}' is not a key{did_you_mean(meant)} (valid here: {', '.join(valid)})"
    if first["type"] == "union_tag_invalid":
        ctx = first["ctx"]
        return f"{key} = {ctx['tag']!r}; expected one of {ctx['expected_tags']}"
    if first["type"] == "missing" and isinstance(first["loc"][-1], str):
        return f"{key} lacks the key '{first['loc'][-1]}'; write it below"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    wanted = ("on, off or " if key in _SWITCHES else "") + " or ".join(map(_wanted, details))
    names = [name for d in details if d["type"] == "literal_error" for name in _LITERALS.findall(_wanted(d))]
    meant = did_you_mean(nearest(str(first["input"]).lower(), names))
    said = f"{key} = {first['input']!r} ({type(first['input']).__name__}); expected {wanted}{meant}"
    return said + _written_as(first["input"], {detail["type"] for detail in details})


def _written_as(given: Any, wrong: set[str]) -> str:
    """How to write what was meant. wrong: what pydantic calls it."""
    if isinstance(given, str) and wrong & {"int_type", "float_type"} and _tag(given) in ("int", "float"):
        number = read_yaml(given, "")
        if "float_type" in wrong or isinstance(number, int):
            return f"; write {given}, without quotes"
        given = number
    if isinstance(given, float) and given.is_integer() and wrong & {"int_type", "int_from_float"}:
        return f"; write {int(given)}"
    return ""


def _of_another_kind(
    path: tuple[str, ...], detail: ErrorDetails, data: dict[str, Any], changed: dict[tuple[str, ...], str]
) -> str | None:
    """Of a key that the section has with another name; an override may have changed that alone."""
    section = path[0] if path else ""
    if detail["type"] != "extra_forbidden" or len(path) != 2 or section in _sections():
        return None
    others = [name for name, kind in _kinds(section).items() if path[1] in kind.model_fields]
    if not others:
        return None
    name = data[section].get("name", detail["loc"][1])
    instead = f"set {section}.name to {' or '.join(others)}"
    if (section, "name") in changed:  # and so all else below it is of another kind
        instead = f"replace the whole section: {section}='{{name: {name}}}'"
    return (
        f"'{'.'.join(path)}' is not a key of {section}.name = {name} (valid here: "
        f"{', '.join(_valid_keys(detail['loc']))}), but of {' and '.join(others)}: remove it, or {instead}"
    )


def _wanted(detail: ErrorDetails) -> str:
    if detail["type"] == "string_pattern_mismatch":
        return _FORMS.get(detail["ctx"]["pattern"], "package.module:name")
    return _EXPECTED.get(detail["type"], detail["msg"].removeprefix("Input should be "))


def _sections() -> dict[str, type[BaseModel]]:
    """The sections that have one kind only."""
    kinds = {key: field.annotation for key, field in Config.model_fields.items()}
    return {k: kind for k, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, BaseModel)}


def _valid_keys(loc: tuple[str | int, ...]) -> list[str]:
    """The keys of the section in which the last part of `loc` was not one. A location names the
    member of a union ("model", "gpt", "layer"), so the last name before it decides."""
    if len(loc) == 1:
        return list(Config.model_fields)
    if str(loc[-2]) in _sections():
        return list(_sections()[str(loc[-2])].model_fields)
    return list(_kinds(str(loc[0]))[str(loc[-2])].model_fields)


def _kinds(section: str) -> dict[str, type[BaseModel]]:
    """The kinds of a section that has several, by the tag that a location names."""
    members = [get_args(member) for member in get_args(Config.model_fields[section].annotation)]
    return {tag.tag: kind for kind, tag in members}
