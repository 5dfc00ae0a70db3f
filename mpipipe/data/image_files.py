"""Images with labels from files: npz, IDX as MNIST ships it (LeCun et al. 1998), scikit-learn's digits."""

from __future__ import annotations

import gzip
import pickle
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpipipe.data.base import draws
from mpipipe.data.extras import optional
from mpipipe.errors import DataError
from mpipipe.state.files import kind_of

_IDX = {"train": ("train-images", "train-labels"), "val": ("t10k-images", "t10k-labels")}
_IDX_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


class Labelled(NamedTuple):
    """Images and their labels, as they stand in a file."""

    x: NDArray[Any]  # (N, H, W), (N, H, W, C) or (N, C, H, W)
    y: NDArray[Any]  # (N,) or (N, 1), integers
    where: str  # what messages call it


def read_images(path: Path, val_fraction: float) -> tuple[Labelled, Labelled]:
    """For training and for validation. path: an npz with x_train, y_train, x_test and y_test, or with x
    and y, of which `val_fraction` is set aside; or a folder with MNIST's four files, gzipped or not.
    Raises DataError."""
    try:
        return _read_idx_folder(path) if path.is_dir() else _read_npz(path, val_fraction)
    except (OSError, EOFError, ValueError, zlib.error, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}); give an npz with x_train, y_train, x_test and y_test or with "
            "x and y, or a folder with the four files of MNIST",
            kind=kind_of(error),
        ) from error


def read_digits(val_fraction: float) -> tuple[Labelled, Labelled]:
    """1797 handwritten digits of 8 x 8 pixels (Alpaydin & Kaynak 1998). Raises DataError when
    scikit-learn is not installed."""
    x, y = optional("sklearn.datasets", "digits").load_digits(return_X_y=True)
    return set_aside(Labelled(x.reshape(-1, 8, 8).astype(np.uint8), y, "digits"), val_fraction)


def set_aside(whole: Labelled, val_fraction: float) -> tuple[Labelled, Labelled]:
    """Training and validation samples, chosen at random once for all seeds: files are often sorted by
    class. Raises DataError when one of them would be empty."""
    n = len(whole.x)
    n_val = round(n * val_fraction)
    if not 0 < n_val < n:
        raise DataError(
            f"{whole.where}: data.val_fraction = {val_fraction} of {n} images leaves {n - n_val} for "
            f"training and {n_val} for validation; give more images or another fraction"
        )
    order = np.argsort(draws(0, "set aside", 0, 0, n), kind="stable")
    parts = (np.sort(order[n_val:]), np.sort(order[:n_val]))
    y = labels(whole)
    train, val = (Labelled(whole.x[part], y[part], whole.where) for part in parts)
    return train, val


def labels(data: Labelled) -> NDArray[Any]:
    """One integer for each image, (N,). Raises DataError."""
    if data.y.size != len(data.x) or data.y.dtype.kind not in "ui":
        raise DataError(
            f"{data.where}: {len(data.x)} images, labels of shape {data.y.shape} and dtype {data.y.dtype}; "
            "expected one integer per image"
        )
    return data.y.reshape(-1)


def _finite(data: Labelled) -> Labelled:
    """Itself. Raises DataError at the first image that is not finite: the mean of all would not be."""
    x = data.x if data.x.dtype.kind == "f" and data.x.ndim else ()
    for i, image in enumerate(x):
        if not np.isfinite(image).all():
            raise DataError(
                f"{data.where}: image {i} holds infinity or what is not a number; mend it, or leave it out"
            )
    return data


def one_size(images: Sequence[NDArray[Any]], where: str) -> NDArray[Any]:
    """Images one by one as one array. Raises DataError at the first that has another size."""
    arrays = [np.asarray(image) for image in images]
    for i, image in enumerate(arrays):
        if image.shape != arrays[0].shape:
            raise DataError(
                f"{where}: image {i} has shape {image.shape}, image 0 has {arrays[0].shape}; resize or crop "
                "them to one size and save them as one array"
            )
    return np.stack(arrays)


# -- npz ---------------------------------------------------------------------------------------


def _read_npz(path: Path, val_fraction: float) -> tuple[Labelled, Labelled]:
    with zipfile.ZipFile(path) as archive:
        members = {name.removesuffix(".npy"): name for name in archive.namelist()}

        def read(x: str, y: str) -> Labelled:
            with archive.open(members[x]) as images, archive.open(members[y]) as labels:
                where = f"{path}: {x}"
                return _finite(Labelled(_read_npy(images, where), _read_npy(labels, f"{path}: {y}"), where))

        if {"x_train", "y_train", "x_test", "y_test"} <= members.keys():
            return read("x_train", "y_train"), read("x_test", "y_test")
        if {"x", "y"} <= members.keys():
            return set_aside(read("x", "y"), val_fraction)
    raise DataError(
        f"{path}: holds {', '.join(members) or 'nothing'}; expected x_train, y_train, x_test and y_test, or "
        "x and y"
    )


def _read_npy(file: IO[bytes], where: str) -> NDArray[Any]:
    """As `np.load`, and arrays of arrays as well, which is how images of mixed sizes get into a file."""
    version = np.lib.format.read_magic(file)
    header: Mapping[tuple[int, int], Any] = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in header:  # 3.0 came with names of fields beyond ASCII
        raise DataError(
            f"{where}: is written in version {version[0]}.{version[1]} of the npy format, for records with "
            "named fields; save a plain array of numbers"
        )
    shape, fortran, dtype = header[version](file)
    if dtype.hasobject:
        return one_size(_Arrays(file).load(), where)
    flat = np.frombuffer(file.read(), dtype)
    return flat.reshape(shape, order="F" if fortran else "C")


class _Arrays(pickle.Unpickler):
    """Of what a pickle can do, only to make numpy arrays: a data file must not run code."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("numpy") and name in ("_reconstruct", "ndarray", "dtype", "scalar"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds a {module}.{name}, which is not an array")


# -- IDX ---------------------------------------------------------------------------------------


def _read_idx_folder(folder: Path) -> tuple[Labelled, Labelled]:
    def read(split: str) -> Labelled:
        images, labels = (_idx_file(folder, name) for name in _IDX[split])
        return _finite(Labelled(_read_idx(images), _read_idx(labels), str(images)))

    return read("train"), read("val")


def _idx_file(folder: Path, name: str) -> Path:
    """As downloaded, "train-images-idx3-ubyte.gz", or as some tools unpack it, "train-images.idx3-ubyte"."""
    found = sorted(folder.glob(f"{name}[.-]idx*"))
    if not found:
        raise DataError(f"{folder}: has no {name}-idx*-ubyte or .gz; put the four files of MNIST there")
    return found[0]


def _read_idx(path: Path) -> NDArray[Any]:
    """Two zero bytes, dtype, number of dimensions, each as a big-endian uint32, the values."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _IDX_DTYPES or len(raw) < 4 + 4 * raw[3]:
        raise DataError(f"{path}: starts with {raw[:4]!r}; an IDX file starts with 0, 0, a type and a rank")
    shape = tuple(np.frombuffer(raw, ">u4", raw[3], 4).tolist())
    dtype = np.dtype(_IDX_DTYPES[raw[2]])
    values, wanted = len(raw) - 4 - 4 * raw[3], int(np.prod(shape)) * dtype.itemsize
    if values != wanted:
        raise DataError(f"{path}: {values} bytes of values, its shape {shape} needs {wanted}; copy it again")
    return np.frombuffer(raw, dtype, offset=4 + 4 * raw[3]).reshape(shape).astype(dtype.newbyteorder("="))
