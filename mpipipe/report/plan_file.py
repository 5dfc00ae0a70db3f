"""plan.json: a plan that a person can read, edit and give back with --plan.

What is decided comes first, a line per key; of the costs, each group is one line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mpipipe.errors import PlanError
from mpipipe.values import Plan, from_json, to_json


def plan_text(plan: Plan) -> str:
    """JSON, such that `from_json(Plan, text) == plan`."""
    return _lines(json.loads(to_json(plan, None)), "") + "\n"


def _lines(value: Any, indent: str) -> str:
    inner = indent + "  "
    if isinstance(value, dict) and (not indent or any(isinstance(v, dict | list) for v in value.values())):
        parts = [f"{json.dumps(key)}: {_lines(v, inner)}" for key, v in value.items()]
    elif isinstance(value, dict) and indent == "  ":
        parts = [f"{json.dumps(key)}: {json.dumps(v)}" for key, v in value.items()]
    elif isinstance(value, list) and any(isinstance(v, dict | str) for v in value):
        parts = [json.dumps(v, ensure_ascii=False) for v in value]
    else:
        return json.dumps(value, ensure_ascii=False)
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}{closing}"


def read_plan(path: str | Path) -> Plan:
    """Raises PlanError that names the file, the place, what stands there and what is expected."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: cannot be read ({error}); name a plan.json") from error
    try:
        return from_json(Plan, text)
    except ValidationError as error:
        if _is_curve(text):
            raise PlanError(
                f"{path}: this is a curve of several levels of ranks, not a plan; plan for one of them, "
                "python -m mpipipe plan config.yaml --ranks N -o plan.json"
            ) from error
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise PlanError(f"{path}: {_complaint(place, first)}") from error


def _is_curve(text: str) -> bool:
    """Whether `plan --ranks 1..16 -o` has written it."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and {"levels", "knee"} <= value.keys()


def _complaint(place: str, detail: Any) -> str:
    kind = detail["type"]
    if kind == "json_invalid":
        return f"is not JSON: {detail['ctx']['error']}; mend it, or plan again"
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{place} is not a key of a plan; remove it, or write it as `python -m mpipipe plan -o` does"
    if kind in ("missing", "missing_argument"):
        return f"{place} is missing; write it, or plan again"
    if kind == "greater_than_equal":
        return f"{place} = {detail['input']!r}; must be at least {detail['ctx']['ge']}"
    return f"{place} = {detail['input']!r}; {detail['msg'][0].lower()}{detail['msg'][1:]}"
