"""Which tensors on disk make which parameter, by the library's own table of names.

    h.0.attn.c_attn.weight                          -> transformer.h.0.attn.c_attn.weight      (renamed)
    ...experts.{0..7}.w1.weight, ...w3.weight       -> ...experts.gate_up_proj                 (converted)

A parameter that is only renamed is read straight into its place. One that is converted is put
together in memory first; others are not touched.
"""

from __future__ import annotations

import copy
import fnmatch
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mpipipe.errors import CheckpointError
from mpipipe.graph.program import spec
from mpipipe.state.names import compare_names
from mpipipe.state.pretrained import Weights
from mpipipe.values import TensorSpec


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


class Mapped:
    """The weights of a folder under the names of a model.

    model: on the meta device; fresh: patterns of names that are not read, on disk or not.
    Raises CheckpointError, with all names, where the folder does not fit the model.
    """

    def __init__(self, weights: Weights, model: Any, fresh: Sequence[str]) -> None:
        self._weights, self._model = weights, model
        self._direct: dict[str, str] = {}  # name -> name on disk
        self._converted: dict[str, Callable[[Callable[[str], Tensor]], dict[str, Tensor]]] = {}
        self._sort_out()
        shapes = {name: self._weights.specs[key] for name, key in self._direct.items()}
        for name, convert in self._converted.items():
            shapes[name] = spec(convert(self._empty)[name])
        wanted, alias = _wanted(model)
        self._check(shapes, wanted, alias, fresh)
        known = model.state_dict().keys()
        self.names: Collection[str] = [n for n in shapes if n in known and not matches(n, fresh)]
        together: dict[str, list[str]] = {}  # of one parameter, and each a tensor on disk
        for name in (n for n in self.names if n in self._direct):
            together.setdefault(alias[name], []).append(name)
        self._together = {name: names for names in together.values() for name in names}

    def read(self, name: str, out: Tensor) -> None:
        """Fills `out` with the values of one of `names`. Raises CheckpointError, also where another name of
        the same parameter has other values on disk."""
        if name not in self._direct:
            out.copy_(self._converted[name](self._load)[name])
            return
        self._weights.read(self._direct[name], out)
        for other in self._together[name]:
            if other != name and not self._weights.holds(self._direct[other], out):
                raise CheckpointError(
                    f"{self._weights.folder}: {self._direct[name]} and {self._direct[other]} have different "
                    "values on disk, but are one parameter of the model; set tie_word_embeddings: false in "
                    "its config.json, which makes them two"
                )

    def _sort_out(self) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        table = get_model_conversion_mapping(self._model)
        renamings = [t for t in table if isinstance(t, WeightRenaming)]
        converters = [t for t in table if isinstance(t, WeightConverter)]
        of_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        prefix, state = self._model.base_model_prefix, self._model.state_dict()
        parts: dict[str, list[tuple[str, str]]] = {}  # name -> (pattern, name on disk) of what it is made of
        for key in sorted(self._weights.specs, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, state)
            if name not in state and key in state:
                name, pattern = key, None
            if pattern is None:
                self._direct[name] = key
            else:
                parts.setdefault(name, []).append((pattern, key))
        for name, made_of in parts.items():
            convert = partial(self._convert, of_pattern[made_of[0][0]], name, made_of)
            self._converted.update(dict.fromkeys(convert(self._empty), convert))

    def _convert(
        self, converter: Any, name: str, parts: list[tuple[str, str]], load: Callable[[str], Tensor]
    ) -> dict[str, Tensor]:
        converter = copy.deepcopy(converter)
        for pattern, key in parts:
            converter.collected_tensors[pattern].append(partial(load, key))
        made = converter.convert(name, model=self._model, config=self._model.config)
        return {n: t[0] if isinstance(t, list) else t for n, t in made.items()}

    def _empty(self, key: str) -> Tensor:
        spec = self._weights.specs[key]
        return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")

    def _load(self, key: str) -> Tensor:
        spec = self._weights.specs[key]
        out = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        self._weights.read(key, out)
        return out

    def _check(
        self, shapes: Mapping[str, TensorSpec], wanted: Mapping[str, TensorSpec], alias: Mapping[str, str],
        fresh: Sequence[str],
    ) -> None:  # fmt: skip
        found = {alias.get(name, name): spec for name, spec in shapes.items() if not matches(name, fresh)}
        absent = _ignored(self._model, "_keys_to_ignore_on_load_missing")
        surplus = _ignored(self._model, "_keys_to_ignore_on_load_unexpected")
        wanted = {n: s for n, s in wanted.items() if n in found or not (matches(n, fresh) or absent(n))}
        try:
            compare_names(
                {n: s for n, s in found.items() if n in wanted or not surplus(n)},
                wanted,
                str(self._weights.folder),
            )
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}\n  what is to start from random values, such as a new head, goes into model.fresh "
                'by pattern, for example ["classifier.*"]'
            ) from error


def _wanted(model: nn.Module) -> tuple[dict[str, TensorSpec], dict[str, str]]:
    """Shape of each parameter and persistent buffer under its first name; and all names -> the first."""
    first: dict[int, str] = {}
    wanted, alias = {}, {}
    for name, t in model.state_dict(keep_vars=True).items():
        alias[name] = first.setdefault(id(t), name)
        wanted[alias[name]] = spec(t)
    return wanted, alias


def _ignored(model: Any, attribute: str) -> Callable[[str], bool]:
    patterns = [re.compile(p) for p in getattr(model, attribute, None) or ()]
    return lambda name: any(p.search(name) for p in patterns)
