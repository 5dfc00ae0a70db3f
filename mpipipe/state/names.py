"""Do the tensors on disk fit the model? One comparison for every kind of checkpoint.

found (on disk)  vs  wanted (of the model)  ->  nothing, or one error that lists what is missing,
                                                what is too much and what has another shape
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpipipe.errors import CheckpointError
from mpipipe.values import TensorSpec

LISTED = 10  # names per kind of misfit; the rest is counted


def compare_names(
    found: Mapping[str, TensorSpec], wanted: Mapping[str, TensorSpec], where: str, dtypes: bool = False
) -> None:
    """Raises CheckpointError, `where` first, unless `found` has the names and shapes of `wanted`, and
    its dtypes too when `dtypes` is set (otherwise values are converted as they are read)."""

    def text(spec: TensorSpec) -> str:
        return f"{list(spec.shape)} {spec.dtype}" if dtypes else str(list(spec.shape))

    missing = [f"{n} {text(s)}" for n, s in wanted.items() if n not in found]
    extra = [f"{n} {text(s)}" for n, s in found.items() if n not in wanted]
    both = [(n, found[n], s) for n, s in wanted.items() if n in found]
    other = [f"{n}: {text(f)} on disk, {text(s)} in the model" for n, f, s in both if text(f) != text(s)]
    listed = [
        *_listed("missing on disk", missing),
        *_listed("unknown to the model", extra),
        *_listed("of another shape" + " or dtype" * dtypes, other),
    ]
    if listed:
        lines = "\n".join(listed)
        raise CheckpointError(
            f"{where}: does not fit the model\n{lines}\n  load it into the model that it was saved from, or "
            "change the model's settings to these shapes"
        )


def _listed(what: str, lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    rest = [f"    and {len(lines) - LISTED} more"] if len(lines) > LISTED else []
    return [f"  {len(lines)} {what}:", *(f"    {line}" for line in lines[:LISTED]), *rest]
