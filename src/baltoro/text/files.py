"""Files of a tokenizer: JSON with clear errors, writes that leave a whole file or none."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `ValueError` naming the file if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path}: is missing") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: is not JSON ({error}); was the copy complete?") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds a {type(value).__name__}, not a JSON object")
    return value


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` by `data`; after a crash the old file is there, or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise
