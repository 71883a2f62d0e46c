"""Files that are whole or absent, through an opener that a test may make fail."""

import hashlib
import io
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

OpenFile: TypeAlias = Callable[[Path], BinaryIO]


def create(path: Path) -> BinaryIO:
    """A new file to write to, in place of any that is there."""
    return path.open("wb")


def write_atomically(path: Path, parts: Iterable[bytes | memoryview], open_file: OpenFile) -> None:
    """Replace `path` by `parts` end to end; after a crash the old file is there, or the new one.

    An `OSError`, such as of a full disk, is passed on with the file's name, and nothing is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open_file(partial) as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def npy_bytes(array: np.ndarray) -> memoryview:
    """The bytes of a `.npy` file; equal arrays give equal bytes."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getbuffer()


def read_npy(path: Path, dtype: np.dtype[Any]) -> np.ndarray:
    """An array in a `.npy` file, mapped and not read.

    Raises `ValueError` naming the file if it is missing, cut short or of another type.
    """
    try:
        # An empty array cannot be mapped.
        array = np.load(path, mmap_mode="r" if path.stat().st_size > 256 else None)
    except FileNotFoundError as error:
        raise ValueError(f"{path}: is missing; build the data again") from error
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path}: is cut short or no array; build the data again") from error
    if array.dtype != dtype:
        raise ValueError(f"{path}: holds {array.dtype}, expected {dtype}; build the data again")
    return array


def sha256(parts: Iterable[bytes | memoryview]) -> str:
    """64 hex digits."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """64 hex digits of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
