"""A source of files to documents, in one fixed order, with what was left out counted."""

import fnmatch
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from baltoro.data.config import FilesConfig
from baltoro.data.document import Document
from baltoro.data.readers import is_caption, kind, read_file


class AbsentSource(ValueError):
    """A source of which nothing is on this machine."""


def paths(source: FilesConfig) -> list[Path]:
    """Its files, sorted. Links are not followed, so that nothing is read twice.

    Raises `AbsentSource` naming the source if no root exists or no file in it matches, and
    `ValueError` for a root that may not be read.
    """
    present = [root for root in source.roots if root.exists()]
    if not present:
        raise AbsentSource(f"source {source.name!r}: none of {_listed(source.roots)} exists")
    found = sorted({path for root in present for path in _walk(root, source)})
    if not found:
        raise AbsentSource(
            f"source {source.name!r}: {_listed(present)} holds no file with "
            f"{' or '.join(source.suffixes)}"
        )
    return found


def read(source: FilesConfig, dropped: Counter[str]) -> Iterator[Document]:
    """Its documents; see `paths` for the errors and `read_file` for `dropped`."""
    for path in paths(source):
        yield from read_file(path, str(path), dropped, source.has_titles_in_names)


def _walk(root: Path, source: FilesConfig) -> Iterator[Path]:
    if root.is_file():
        yield root
        return

    def refuse(error: OSError) -> None:
        raise ValueError(f"source {source.name!r}: {error.filename} cannot be read") from error

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = sorted(name for name in folders if not _is_excluded(name, source))
        for name in names:
            path = Path(folder, name)
            if (
                kind(path) in source.suffixes
                and not _is_excluded(name, source)
                and not path.is_symlink()
                and not is_caption(path)
            ):
                yield path


def _is_excluded(name: str, source: FilesConfig) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in source.excludes)


def _listed(roots: tuple[Path, ...] | list[Path]) -> str:
    return ", ".join(map(str, roots))
