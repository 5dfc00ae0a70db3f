"""Two runs side by side: what was different, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

import yaml

from mpipipe.report.progress import MIB, number
from mpipipe.report.run import RunData
from mpipipe.report.table import text_table
from mpipipe.values import Report

_ABSENT = "-"
_LONG = 200  # letters of a list: of a longer one only the place where two part is said
_SHOWN = 40  # letters of a part
_BEFORE = 10  # of these, letters that are still the same
_OF_THE_BITS = ("model.", "data.", "train.", "kernels.", "numerics.")  # keys that decide losses and weights
_NOT_OF_THE_BITS = ("train.save_every", "train.keep")


def compare(a: RunData, b: RunData, width: int = 100) -> str:
    """Text: settings that differ, whether the weights do, losses at equal steps, figures and their ratio."""
    names = ("", f"a: {a.name}", f"b: {b.name}")
    parts = [f"note: {run.name}: {note}" for run in (a, b) for note in run.notes]
    settings = list(_differences(_settings(a), _settings(b)))
    different = text_table(names, settings, width, range(3), wrapped=range(3)) if settings else "  nothing"
    parts += ["what was different:", different, ""]
    parts += _weights(a.report, b.report)
    parts += [_losses(a, b, "loss", "training loss"), _losses(a, b, "val_loss", "validation loss")]
    if _may_not_differ(settings) and _parted(_by_step(a, "loss"), _by_step(b, "loss")):
        parts.append(
            "All that should decide the losses is equal (model, data, training, numerics), and they are not: "
            "other code or files, or a defect"
        )
    if a.report is not None and b.report is not None:
        parts += ["", text_table((*names, "b / a"), list(_figures(a.report, b.report)), width)]
    return "\n".join(parts) + "\n"


# -- settings ---------------------------------------------------------------------------------


def _settings(run: RunData) -> dict[str, Any]:
    """Every key of the config, the numerics and the layout, by dotted name; `run.dir` is in the headings."""
    found: dict[str, Any] = {}
    try:
        found |= _flat("", yaml.safe_load(run.config))
    except yaml.YAMLError as error:
        found["config"] = f"no YAML: {error}"
    if run.plan is not None:
        found |= _flat("numerics", asdict(run.plan.numerics)) | _flat("layout", asdict(run.plan.layout))
    found.pop("run.dir", None)
    return found


def _flat(prefix: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        join = {f"{prefix}.{key}" if prefix else str(key): inner for key, inner in value.items()}
        return {k: v for key, inner in join.items() for k, v in _flat(key, inner).items()}
    return {prefix: value}


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for key in dict.fromkeys([*a, *b]):
        pair = a.get(key, _ABSENT), b.get(key, _ABSENT)
        mine, theirs = ("null" if value is None else str(value) for value in pair)
        if mine == theirs:
            continue
        if max(len(mine), len(theirs)) > _LONG and any(isinstance(value, list | tuple) for value in pair):
            lists = [[] if value in (None, _ABSENT) else value for value in pair]
            both = all(isinstance(value, list | tuple) for value in lists)  # else one is a word, or a number
            mine, theirs = _first(*lists) if both else _excerpts(mine, theirs)
        yield key, mine, theirs


def _first(a: Sequence[Any], b: Sequence[Any]) -> tuple[str, str]:
    """Of two lists: how many parts differ, and what is where they first do, as "[rank][action]: 0F3" of the
    orders "0F0,0F1,...", each of which is a list of its own."""
    texts = list(zip_longest(map(repr, a), map(repr, b)))  # as 0 and 0.0 are equal, and settings that differ
    differ = [i for i, (mine, theirs) in enumerate(texts) if mine != theirs]
    if not differ:
        return f"a {type(a).__name__}", f"a {type(b).__name__}"
    first = differ[0]
    place, pair = f"[{first}]", texts[first]
    parts = [parts[first] for parts in (a, b) if first < len(parts)]
    if len(parts) == 1:  # the other list is shorter
        pair = (str(parts[0]), None) if pair[1] is None else (None, str(parts[0]))
    elif all(isinstance(part, str) for part in parts):
        words = list(zip_longest(*(part.split(",") for part in parts)))
        at = next(i for i, (mine, theirs) in enumerate(words) if mine != theirs)
        place, pair = f"{place}[{at}]", words[at]
    mine, theirs = _excerpts(*pair)
    where = f"{len(differ)} of {len(texts)} differ, first {place}: "
    return where + mine, where + theirs


def _excerpts(a: str | None, b: str | None) -> tuple[str, str]:
    """Of two texts what is shown: of long ones from a little before the place where they part."""
    begin = 0
    if a and b and max(len(a), len(b)) > _SHOWN:
        parted = (at for at, (mine, theirs) in enumerate(zip_longest(a, b)) if mine != theirs)
        begin = max(0, next(parted, 0) - _BEFORE)
    return _excerpt(a, begin), _excerpt(b, begin)


def _excerpt(text: str | None, begin: int) -> str:
    if text is None:
        return _ABSENT
    end = begin + _SHOWN
    return f"{'…' if begin else ''}{text[begin:end]}{'…' if len(text) > end else ''}"


def _may_not_differ(settings: Sequence[tuple[str, str, str]]) -> bool:
    """Nothing among these settings explains other losses."""
    return not any(key.startswith(_OF_THE_BITS) and key not in _NOT_OF_THE_BITS for key, _, _ in settings)


# -- results ----------------------------------------------------------------------------------


def _weights(a: Report | None, b: Report | None) -> list[str]:
    if a is None or b is None:
        return ["weights: not known, as not both runs have a summary"]
    if a.weights_sha256 == b.weights_sha256:
        return [f"weights: the same to the bit, {a.weights_sha256}"]
    after = f" (after {a.steps} and {b.steps} steps)" if a.steps != b.steps else ""
    return [f"weights: different{after}", f"  a {a.weights_sha256}", f"  b {b.weights_sha256}"]


def _losses(a: RunData, b: RunData, key: str, name: str) -> str:
    """At equal steps: where they part, and how far they get from each other."""
    mine, theirs = _by_step(a, key), _by_step(b, key)
    common, parted = mine.keys() & theirs.keys(), _parted(mine, theirs)
    if not common:
        return f"{name}: no step in common"
    if not parted:
        return f"{name}: the same to the bit at all {len(common)} common steps"
    first, far = parted[0], max(parted, key=lambda step: abs(mine[step] - theirs[step]))
    return (
        f"{name}: differs from step {first} on ({mine[first]} and {theirs[first]}), at {len(parted)} of "
        f"{len(common)} common steps; most at step {far}: by {number(abs(mine[far] - theirs[far]))}"
    )


def _parted(mine: Mapping[int, float], theirs: Mapping[int, float]) -> list[int]:
    """The steps at which they differ, ascending."""
    return sorted(step for step in mine.keys() & theirs.keys() if not _same(mine[step], theirs[step]))


def _same(a: float, b: float) -> bool:
    return a == b or (a != a and b != b)  # NaN is no number, and the same one


def _by_step(run: RunData, key: str) -> dict[int, float]:
    return {line["step"]: line[key] for line in run.metrics if "step" in line and key in line}


def _figures(a: Report, b: Report) -> Iterator[tuple[str, ...]]:
    yield _row("step, ms", a.step_s * 1e3, b.step_s * 1e3)
    yield _row("predicted, ms", a.predicted_step_s * 1e3, b.predicted_step_s * 1e3)
    yield _row(f"{a.unit}/s, mean", a.per_s, b.per_s)
    yield _row("bubble", a.bubble, b.bubble)
    yield _row("steps", a.steps, b.steps)
    yield _row("last training loss", a.final_loss, b.final_loss)
    yield _row("validation loss", a.val_loss, b.val_loss)
    for name in dict.fromkeys([*a.metrics, *b.metrics]):
        yield _row(f"validation {name}", a.metrics.get(name), b.metrics.get(name))
    for rank in range(max(len(a.peak_bytes), len(b.peak_bytes))):
        mine, theirs = (r.peak_bytes[rank] / MIB if rank < len(r.peak_bytes) else None for r in (a, b))
        yield _row(f"peak memory, MiB, rank {rank}", mine, theirs)


def _row(name: str, a: float | None, b: float | None) -> tuple[str, ...]:
    texts = (_ABSENT if value is None else number(value) for value in (a, b))
    return (name, *texts, f"{b / a:.3f}" if a and b is not None else _ABSENT)
