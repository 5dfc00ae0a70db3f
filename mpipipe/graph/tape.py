"""What happens while a model is made, operator by operator, and any part of it done again for real.

    factory() under fake tensors --record--> entries --slice(one tensor)--> replay --> its values

An entry is part of a tensor's slice when it wrote the tensor's memory, or that of something it was
made from; nothing else is computed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from mpipipe.errors import CaptureError
from mpipipe.ops.generators import seeded

# The one initialiser of torch whose code looks at what it drew (it draws again what falls outside). The
# name is that of its body, which is found at each call: `from torch.nn.init import trunc_normal_` works.
_LOOKS_AT_DRAWS = "_no_grad_trunc_normal_"


class Tape(TorchDispatchMode):
    """Records (operator, args, kwargs, out). Outputs stay alive, so storage addresses are unique."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self._writers: dict[int, list[int]] = {}

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        for t in tensors(out):
            self._writers.setdefault(storage_id(t), []).append(len(self.entries))
        self.entries.append((func, args, kwargs, out))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            out = func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default or self.draws(args[0]):
                raise
            with unset_fake_temporarily(), torch.no_grad():  # nothing random in it: its value is known
                return self.replay(args[0], {}).item()
        if tensors(out):
            self.record(func, tuple(args), dict(kwargs or {}), out)
        return out

    @contextmanager
    def whole_initialisers(self) -> Iterator[None]:
        """Makes an initialiser that looks at its draws one random operator of the tape."""
        body = getattr(nn.init, _LOOKS_AT_DRAWS)

        def recorded(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not isinstance(tensor, FakeTensor):
                return body(tensor, *args, **kwargs)
            self.record(body, (tensor, *args), kwargs, tensor)
            return tensor

        setattr(nn.init, _LOOKS_AT_DRAWS, recorded)
        try:
            yield
        finally:
            setattr(nn.init, _LOOKS_AT_DRAWS, body)

    def wrote(self, t: Tensor) -> bool:
        return storage_id(t) in self._writers

    def slice(self, target: Tensor) -> list[int]:
        """Indices of the entries that lead to one tensor, ascending."""
        todo, storages, keep = [storage_id(target)], set(), set()
        while todo:
            storage = todo.pop()
            if storage in storages:
                continue
            storages.add(storage)
            for i in self._writers.get(storage, ()):
                if i not in keep:
                    keep.add(i)
                    _, args, kwargs, out = self.entries[i]
                    todo += [storage_id(t) for t in tensors((args, kwargs, out))]
        return sorted(keep)

    def draws(self, target: Tensor) -> list[int]:
        """The random entries among them."""
        return [i for i in self.slice(target) if _is_random(self.entries[i][0])]

    def replay(self, target: Tensor, seeds: dict[int, int]) -> Tensor:
        """The real tensor. seeds: index of a random entry -> seed of its generator."""
        storages: dict[int, torch.UntypedStorage] = {}
        constants: dict[int, Tensor] = {}

        def real(x: Any) -> Any:
            if not isinstance(x, FakeTensor):
                if isinstance(x, Tensor):  # a constant such as tensor(0): what is replayed may write to it
                    return constants.setdefault(id(x), x.clone())
                return x
            storage = storages.get(storage_id(x))
            if storage is None:
                raise CaptureError(
                    "a weight begins from a tensor whose values are not known, as torch.load has none inside "
                    "the function that makes the model; load the file before it and copy from that, give "
                    "the model itself, or give its values as `initial`"
                )
            base = torch.empty(0, dtype=x.dtype)
            return base.set_(storage, x.storage_offset(), x.shape, x.stride())

        for i in self.slice(target):
            func, args, kwargs, out = self.entries[i]
            args, kwargs = tree_map(real, args), tree_map(real, kwargs)
            result = _seeded(func, args, kwargs, seeds[i]) if _is_random(func) else func(*args, **kwargs)
            for fake, value in zip(tensors(out), tensors(result), strict=True):
                storages[storage_id(fake)] = value.untyped_storage()
        return real(target.detach())


def _is_random(func: Any) -> bool:
    return not isinstance(func, OpOverload) or torch.Tag.nondeterministic_seeded in func.tags


def _seeded(func: Any, args: Any, kwargs: Any, seed: int) -> Any:
    known = isinstance(func, OpOverload)
    names = [a.name for a in func._schema.arguments] if known else inspect.signature(func).parameters
    if "generator" in names:
        return func(*args, **{**kwargs, "generator": torch.Generator().manual_seed(seed)})
    with seeded(seed):
        return func(*args, **kwargs)


def storage_id(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_flatten(tree)[0] if isinstance(x, Tensor)]
