"""A folder in the Hugging Face layout, as it lies on this machine; nothing is ever fetched.

config.json                                the model
model.safetensors                          its weights in one file, or
model.safetensors.index.json + shards      in several
generation_config.json, tokenizer files    go along with every checkpoint of the run
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mpipipe.errors import CheckpointError, ConfigError
from mpipipe.state.checkpoint import index_name, read_index
from mpipipe.state.files import kind_of, write_text, write_whole
from mpipipe.state.shards import Shard
from mpipipe.values import TensorSpec

CONFIG, SINGLE = "config.json", "model.safetensors"
_COMPANIONS = (
    *("generation_config.json", "preprocessor_config.json", "processor_config.json", "chat_template.jinja"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model"),
)
_PIECE_BYTES = 8 << 20  # read at once where values are converted or compared


class Weights:
    """The tensors of a folder. Each rank reads those that it owns, straight into their place.

    specs: name on disk -> shape and dtype. Raises CheckpointError, here and below.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = dict.fromkeys(read_index(folder).values()) if (folder / index_name()).is_file() else [SINGLE]
        self._shard_of: dict[str, Shard] = {}
        for file in files:
            try:
                shard = Shard(folder / file)
            except (OSError, ValueError) as error:
                raise _unread(folder / file, error) from error
            self._shard_of.update(dict.fromkeys(shard.specs, shard))
        self.specs: dict[str, TensorSpec] = {name: s.specs[name] for name, s in self._shard_of.items()}

    def read(self, name: str, out: Tensor) -> None:
        """Fills `out` with the values of `name`, which has its shape. Another floating-point type is
        converted, 8 MiB at a time: bfloat16 to float32 is exact, float32 to bfloat16 rounds."""
        shard, dtype = self._shard_of[name], getattr(torch, self.specs[name].dtype)
        if dtype == out.dtype or not (dtype.is_floating_point and out.is_floating_point()):
            try:
                return shard.read(name, out)
            except OSError as error:
                raise _unread(shard.path, error) from error
        for part, piece in self._pieces(name, out):
            part.copy_(piece)

    def holds(self, name: str, values: Tensor) -> bool:
        """Whether `name` has this shape and these values, its own converted to their dtype."""
        if self.specs[name].shape != values.shape:
            return False
        return all(
            torch.equal(part, piece.to(part.device, part.dtype)) for part, piece in self._pieces(name, values)
        )

    def _pieces(self, name: str, of: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """8 MiB at a time: part of a contiguous tensor, and what is on disk for it until the next is read."""
        shard, dtype = self._shard_of[name], getattr(torch, self.specs[name].dtype)
        flat = of.detach().view(-1)
        buffer = torch.empty(min(flat.numel(), _PIECE_BYTES // dtype.itemsize), dtype=dtype)
        for first in range(0, flat.numel(), buffer.numel() or 1):
            part = flat[first : first + buffer.numel()]
            piece = buffer[: part.numel()]
            try:
                shard.read_part(name, first, piece)
            except OSError as error:
                raise _unread(shard.path, error) from error
            yield part, piece


def _unread(path: Path, error: Exception) -> CheckpointError:
    kind = kind_of(error)
    mend = "the file is damaged, get it again" if kind == "error" else "start again"
    return CheckpointError(f"{path}: cannot be read ({error}); {mend}", kind=kind)


@dataclass(frozen=True)
class Pretrained:
    """config: the file that describes the model; weights: None where it starts from random ones;
    companions: files that are copied beside every checkpoint."""

    config: Path
    weights: Weights | None
    companions: tuple[Path, ...]


def find(path: str | Path) -> Pretrained:
    """What lies at `path`: the file config.json alone (random weights), or a folder with config.json and
    safetensors (its weights). Raises ConfigError or CheckpointError."""
    path = Path(path)
    if path.is_file():
        return Pretrained(path, None, ())
    if not path.is_dir():
        raise ConfigError(
            f"hf:{path}: there is no such file or folder on this machine, and nothing is fetched from "
            "elsewhere; name a config.json, or a folder with config.json and *.safetensors"
        )
    if not (path / CONFIG).is_file():
        raise ConfigError(
            f"hf:{path}: the folder has no {CONFIG}; name the folder that `save_pretrained` wrote"
        )
    if not any((path / name).is_file() for name in (SINGLE, index_name())):
        raise ConfigError(
            f"hf:{path}: the folder has neither {SINGLE} nor {index_name()}; save its weights as safetensors "
            f"there, or name {path / CONFIG} itself to start from random ones"
        )
    companions = tuple(path / name for name in _COMPANIONS if (path / name).is_file())
    return Pretrained(path / CONFIG, Weights(path), companions)


def write_files(folder: str | Path, texts: Mapping[str, str], copies: Iterable[Path]) -> list[str]:
    """Writes `texts` (file name -> content) and copies files into a folder, each of them whole; their names.
    Raises CheckpointError."""
    folder, copies = Path(folder), list(copies)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for source in copies:
            content = source.read_bytes()
            write_whole(folder / source.name, lambda partial, content=content: partial.write_bytes(content))  # type: ignore[misc]
        for name, text in texts.items():
            write_text(folder / name, text)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or folder}: cannot be written or read ({error})", kind=kind_of(error)
        ) from error
    return sorted({*texts, *(source.name for source in copies)})
