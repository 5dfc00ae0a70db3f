"""The model as its author wrote it, without its weights.

The factory runs once under fake tensors while a tape records every operator of the initialisation.
Nothing is allocated, so a model of any size is captured and planned on a laptop; later each rank
replays the slice of the tape that leads to its own parameters, and only that.

    factory() --fake--> module + tape          (every rank, no memory)
                          |
                          '-- materialise(["blocks.3.mlp.weight", ...])  (own stage only)

Invariant: a parameter's first bits are a function of (seed, canonical name), never of the cut or
of what else is built. Each random operator of the tape draws from a generator of its own, seeded
by the first parameter (in canonical order) that depends on it and its ordinal there.
"""

from __future__ import annotations

import hashlib
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from mpipipe.errors import CaptureError

# torch's tracer has process-wide state and, while it runs, turns oneDNN off for the whole process: one
# thread traces at a time, and none computes meanwhile (ranks are threads in the in-process carrier)
TRACING = threading.RLock()
_DEFAULT_GENERATOR = threading.Lock()  # only for operators that take no generator of their own


def _storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_flatten(tree)[0] if isinstance(x, torch.Tensor)]


def user_frame(error: Exception) -> str:
    """The innermost line of the traceback that is neither torch's, Python's nor ours."""
    ours, python = str(Path(__file__).parent), sysconfig.get_path("stdlib")
    user = [
        f for f in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in f.filename and not f.filename.startswith((ours, python, "<"))
    ]  # fmt: skip
    return f'File "{user[-1].filename}", line {user[-1].lineno}: {user[-1].line}' if user else "the model"


class _Tape(TorchDispatchMode):
    """Records (operator, args, kwargs, out). Outputs stay alive, so storage addresses are unique."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _tensors(out):
            self.entries.append((func, args, dict(kwargs or {}), out))
        return out


class ModelSource:
    """A model under fake tensors, with the recipe of its weights.

    params, buffers  canonical name -> fake tensor, in order of registration
    alias            every name of a parameter or buffer -> its canonical name
    """

    def __init__(self, factory: Callable[[], nn.Module], seed: int) -> None:
        self.seed = seed
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        tape = _Tape()
        try:
            with TRACING, self.fake_mode, tape:
                self.module = factory()
        except DataDependentOutputException as error:
            raise CaptureError(
                f"{user_frame(error)}\n  reads the values of a tensor while the model is made, and weights "
                "have none yet; draw them without a look at the result (instead of nn.init.trunc_normal_: "
                "normal_ and clamp_)"
            ) from error
        if not isinstance(self.module, nn.Module):
            raise CaptureError(
                f"the model factory returned {type(self.module).__name__}, not a torch.nn.Module; "
                "return the module itself"
            )
        self._tape = tape.entries
        self._writers: dict[int, list[int]] = {}
        for i, (_, _, _, out) in enumerate(self._tape):
            for t in _tensors(out):
                self._writers.setdefault(_storage(t), []).append(i)
        self.params = dict(self.module.named_parameters())
        self.buffers = dict(self.module.named_buffers())
        canonical = {id(t): n for n, t in [*self.params.items(), *self.buffers.items()]}
        self.alias = {
            name: canonical[id(t)]
            for name, t in [
                *self.module.named_parameters(remove_duplicate=False),
                *self.module.named_buffers(remove_duplicate=False),
            ]
        }
        self._seed_of: dict[int, int] | None = None

    def tensor(self, name: str) -> torch.Tensor:
        """The fake parameter or buffer of a canonical name."""
        return self.params[name] if name in self.params else self.buffers[name]

    def _slice(self, name: str) -> list[int]:
        """Indices of the tape entries that lead to one tensor, ascending."""
        todo, storages, keep = [_storage(self.tensor(name))], set(), set()
        while todo:
            storage = todo.pop()
            if storage in storages:
                continue
            storages.add(storage)
            for i in self._writers.get(storage, ()):
                if i not in keep:
                    keep.add(i)
                    _, args, kwargs, out = self._tape[i]
                    todo += [_storage(t) for t in _tensors((args, kwargs, out))]
        return sorted(keep)

    def _seeds(self) -> dict[int, int]:
        """Tape index of each random operator -> the seed of its generator."""
        if self._seed_of is None:
            self._seed_of = {}
            for name in [*self.params, *self.buffers]:
                draws = [i for i in self._slice(name) if _is_random(self._tape[i][0])]
                for ordinal, i in enumerate(draws):
                    key = hashlib.blake2b(f"{self.seed}/{name}/{ordinal}".encode(), digest_size=8)
                    self._seed_of.setdefault(i, int.from_bytes(key.digest(), "little") >> 1)
        return self._seed_of

    @torch.no_grad()
    def materialise(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Real, initialised tensors of the named parameters and buffers, and of nothing else."""
        out: dict[str, torch.Tensor] = {}
        for name in names:
            fake = self.tensor(name)
            if not isinstance(fake, FakeTensor):  # made outside torch's dispatcher: already real
                out[name] = fake.detach().clone()
                continue
            with TRACING:  # it computes, and reads fake tensors that ranks in one process may share
                real = self._replay(self._slice(name), fake)
            out[name] = real if real.is_contiguous() else real.contiguous()
        return out

    def _replay(self, entries: list[int], target: torch.Tensor) -> torch.Tensor:
        storages: dict[int, torch.UntypedStorage] = {}

        def real(x: Any) -> Any:
            if not isinstance(x, FakeTensor):
                return x
            storage = storages.get(_storage(x))
            if storage is None:
                raise CaptureError(
                    "the initialisation reads a tensor that was made outside of the model's factory; "
                    "make it inside the factory"
                )
            base = torch.empty(0, dtype=x.dtype)
            return base.set_(storage, x.storage_offset(), x.shape, x.stride())

        for i in entries:
            func, args, kwargs, out = self._tape[i]
            args, kwargs = tree_map(real, args), tree_map(real, kwargs)
            result = (
                _seeded(func, args, kwargs, self._seeds()[i]) if _is_random(func) else func(*args, **kwargs)
            )
            for fake, value in zip(_tensors(out), _tensors(result), strict=True):
                storages[_storage(fake)] = value.untyped_storage()
        return real(target.detach())


def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _seeded(func: Any, args: Any, kwargs: Any, seed: int) -> Any:
    if any(a.name == "generator" for a in func._schema.arguments):
        return func(*args, **{**kwargs, "generator": torch.Generator().manual_seed(seed)})
    with _DEFAULT_GENERATOR, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return func(*args, **kwargs)
