"""A checkpoint directory on disk: what it holds, and writing one whole or not at all.

Only the safetensors headers are read here, so that a wrong directory or half a download is one
clear line before anything is allocated. No torch: `shards` reads and writes the tensors.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from baltoro.checkpoint.names import INDEX_FILE, SINGLE_FILE

CONFIG_FILE = "config.json"
MAX_HEADER_BYTES = 1 << 30

# Files that belong to a checkpoint beside its configuration and tensors, and travel with it.
COMPANION_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
)


class Stored(NamedTuple):
    """Where a tensor lies and what its header says."""

    file: str
    dtype: str
    shape: tuple[int, ...]


class CheckpointDirectory:
    """A checkpoint directory opened for reading.

    `raw_config` is the parsed config.json and `config_text` its text, `stored` the tensors by name,
    `index` the parsed index (None for a single file), `metadata` that of the first file.
    """

    def __init__(self, path: str | Path) -> None:
        """Reads config.json, the index and every header.

        Raises `FileNotFoundError` if there is no such directory and `ValueError` if it holds no
        checkpoint, or only a part of one.
        """
        self.path = Path(path)
        if not self.path.is_dir():
            raise FileNotFoundError(f"{self.path}: no such directory")
        self.config_text = self.text_of(CONFIG_FILE)
        self.raw_config = self._json(CONFIG_FILE, self.config_text)
        self.index = None
        if (self.path / INDEX_FILE).is_file():
            self.index = self._json(INDEX_FILE, self.text_of(INDEX_FILE))
        self.stored: dict[str, Stored] = {}
        self.metadata: dict[str, str] = {}
        for number, file in enumerate(self._files()):
            tensors, metadata = read_header(self.path / file)
            self.stored |= tensors
            if number == 0:
                self.metadata = metadata
        if self.index is not None:
            self._check_index()

    def companions(self) -> dict[str, bytes]:
        """Tokenizer, preprocessor and code files by name: what `save` carries along."""
        names = [*COMPANION_FILES, *(path.name for path in sorted(self.path.glob("*.py")))]
        paths = [self.path / name for name in names]
        return {path.name: path.read_bytes() for path in paths if path.is_file()}

    def text_of(self, name: str) -> str:
        """A text file of the directory; raises `ValueError` if it is absent or not UTF-8."""
        path = self.path / name
        if not path.is_file():
            raise ValueError(f"{self.path}: no {name}; this is not a checkpoint directory")
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: is not UTF-8 text ({error.reason})") from None

    def _json(self, name: str, text: str) -> dict[str, Any]:
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.path / name}: is not JSON ({error})") from None
        if not isinstance(values, dict):
            raise ValueError(f"{self.path / name}: must hold a JSON object")
        return values

    def _files(self) -> list[str]:
        if self.index is None:
            if (self.path / SINGLE_FILE).is_file():
                return [SINGLE_FILE]
            shards = sorted(path.name for path in self.path.glob("model-*.safetensors"))
            if shards:
                raise ValueError(
                    f"{self.path}: has {len(shards)} shards but no {INDEX_FILE}; "
                    "the download is incomplete"
                )
            raise ValueError(f"{self.path}: holds neither {SINGLE_FILE} nor {INDEX_FILE}")
        weight_map = self.index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{self.path / INDEX_FILE}: has no weight_map")
        files = sorted(set(weight_map.values()))
        for file in files:
            if not isinstance(file, str) or Path(file).name != file:
                raise ValueError(f"{self.path / INDEX_FILE}: {file!r} is not a file name")
        absent = [file for file in files if not (self.path / file).is_file()]
        if absent:
            raise ValueError(
                f"{self.path}: {len(absent)} of {len(files)} shards are absent, first "
                f"{absent[0]}; the download is incomplete"
            )
        return files

    def _check_index(self) -> None:
        assert self.index is not None
        weight_map = self.index["weight_map"]
        files = {name: stored.file for name, stored in self.stored.items()}
        wrong = sorted(
            name for name in weight_map.keys() | files if weight_map.get(name) != files.get(name)
        )
        if wrong:
            raise ValueError(
                f"{self.path}: {INDEX_FILE} and the shards disagree about {len(wrong)} "
                f"tensors, first {wrong[0]} (index: {weight_map.get(wrong[0])}, "
                f"shard: {files.get(wrong[0])})"
            )


def read_header(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Tensors and metadata of a safetensors file, and a check that all its bytes are there.

    The format: 8 bytes little-endian length, that many bytes of JSON, then the data.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if start == b"version ":
            raise ValueError(
                f"{path}: is a Git LFS pointer, not the tensors; fetch the file itself"
            )
        if len(start) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"{path}: is cut off inside its header ({size} bytes)")
        try:
            header = json.loads(file.read(length))
        except ValueError:
            raise ValueError(f"{path}: is not a safetensors file") from None
    metadata = header.pop("__metadata__", {})
    tensors, end = {}, 0
    for name, entry in header.items():
        tensors[name] = Stored(path.name, entry["dtype"], tuple(entry["shape"]))
        end = max(end, entry["data_offsets"][1])
    if size != 8 + length + end:
        raise ValueError(
            f"{path}: has {size} of {8 + length + end} bytes; the download is incomplete"
        )
    return tensors, metadata


@contextmanager
def whole_directory(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yields a temporary sibling of `target`, which takes its place when the block ends well.

    On an error or interrupt the sibling is removed and `target` is as before. An existing `target`
    is replaced if it is empty or holds nothing but a checkpoint, otherwise only with `overwrite`;
    raises `ValueError` before anything is written.
    """
    target = target.absolute()
    if not overwrite:
        _check_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        partial.chmod(0o755)
        yield partial
        _sync_directory(partial)
        if target.exists():
            # between the two renames the old checkpoint is whole under its `.replaced-` name
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}.replaced-", dir=target.parent))
            target.rename(old / target.name)
            partial.rename(target)
            shutil.rmtree(old)
        else:
            partial.rename(target)
        _sync_directory(target.parent)
    finally:
        if partial.exists():
            shutil.rmtree(partial)


def write_file(path: Path, data: bytes) -> None:
    """Writes a small file and syncs it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _check_replaceable(target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise ValueError(f"{target}: is a file; give a directory")
    names = sorted(path.name for path in target.iterdir())
    known = {CONFIG_FILE, INDEX_FILE, "README.md", *COMPANION_FILES}
    pattern = re.compile(
        r"(model|model-\d+-of-\d+|golden)\.safetensors|\w+\.py|\.gitattributes|LICENSE.*"
    )
    foreign = [name for name in names if name not in known and not pattern.fullmatch(name)]
    if names and CONFIG_FILE not in names:
        raise ValueError(f"{target}: is not empty and not a checkpoint; choose another directory")
    if foreign:
        raise ValueError(
            f"{target}: holds {foreign[0]!r} beside a checkpoint, which saving would remove; "
            "choose another directory"
        )


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
