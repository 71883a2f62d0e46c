"""Launch shapes of kernels: tiles, warps and stages, pinned for each class of shapes in a table.

Nothing is tuned while a model runs. A kernel's module names the class of a call in words ("bf16
w1024": dtype and padded width; each says how) and looks its shape up here. The table has a section
for every kind of device that was measured (`sm_90`) and one, `portable`, that any device takes for
what its own section lacks. `baltoro bench tune` measures and writes sections (`tune.py`).
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch

TABLE = Path(__file__).with_suffix(".json")
PORTABLE = "portable"
VERSION = 1

_DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16"}

Launch = dict[str, int]
Table = dict[str, dict[str, dict[str, Launch]]]  # section -> kernel -> class -> shape
Result = TypeVar("Result")

_forget: list[Callable[[], None]] = []  # what empties each cache of `derived`


class LaunchTableError(ValueError):
    """The table lacks an entry or is not one."""


def derived(function: Callable[..., Result]) -> Callable[..., Result]:
    """`functools.cache` for what follows from the table: while a shape is tried, it is found anew.

    A kernel on a path whose host time counts keeps so all that it reads from an entry.
    """
    kept = cache(function)
    _forget.append(kept.cache_clear)
    return kept


def launch(kernel: str, shape_class: str, device: torch.device) -> Launch:
    """How to launch `kernel` for a class of shapes on `device`; not to be written to.

    Raises `LaunchTableError` where neither the device's section nor the portable one has it.
    """
    return _launch(kernel, shape_class, section_of(device))


@cache
def section_of(device: torch.device) -> str:
    """`sm_90` for a Hopper GPU, `portable` for what is no GPU of NVIDIA's."""
    if device.type != "cuda" or torch.version.cuda is None:
        return PORTABLE
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@derived
def _launch(kernel: str, shape_class: str, section: str) -> Launch:
    table = pinned()
    for name in (section, PORTABLE):
        found = table.get(name, {}).get(kernel, {}).get(shape_class)
        if found is not None:
            return found
    known = [f"{k} {c}" for k, classes in table[PORTABLE].items() for c in classes]
    near = get_close_matches(f"{kernel} {shape_class}", known, n=1)
    hint = f"the nearest entry is {near[0]!r}; " if near else ""
    raise LaunchTableError(
        f"launch table: no entry for kernel {kernel!r}, class {shape_class!r}, in {section} or "
        f"{PORTABLE}; {hint}add it to {TABLE}"
    )


@cache
def pinned() -> Table:
    """The table of this installation."""
    return read(TABLE)


@contextmanager
def trying(kernel: str, shape_class: str, section: str, shape: Launch) -> Iterator[None]:
    """Another shape for one entry while the block runs."""
    classes = pinned().setdefault(section, {}).setdefault(kernel, {})
    before = classes.get(shape_class)
    classes[shape_class] = shape
    forget()
    try:
        yield
    finally:
        if before is None:
            del classes[shape_class]
            for holder, name in ((pinned()[section], kernel), (pinned(), section)):
                if not holder[name]:
                    del holder[name]
        else:
            classes[shape_class] = before
        forget()


def forget() -> None:
    """Let what was derived from the table be found anew; whoever changes `pinned()` calls it."""
    for empty in _forget:
        empty()


def read(path: Path) -> Table:
    """The table of a file; raises `LaunchTableError` with the place of what is wrong in it."""
    try:
        held = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise LaunchTableError(f"launch table: {path} is no JSON ({error})") from error
    if not isinstance(held, dict) or held.get("version") != VERSION:
        raise LaunchTableError(f'launch table: {path} must hold "version": {VERSION}')
    sections: Table = held.get("sections", {})
    _check(path, "sections", sections, depth=4)
    if PORTABLE not in sections:
        raise LaunchTableError(f"launch table: {path} has no section {PORTABLE!r}")
    return sections


def _check(path: Path, place: str, value: object, *, depth: int) -> None:
    """Sections, kernels and classes are objects, and what a shape holds are positive integers."""
    if depth == 0:
        if type(value) is not int or value < 1:
            raise LaunchTableError(
                f"launch table: {path}: {place} is {value!r}; it must be a positive integer"
            )
        return
    if not isinstance(value, dict) or (depth < 4 and not value):
        raise LaunchTableError(f"launch table: {path}: {place} must be an object with entries")
    for name, inner in value.items():
        _check(path, f"{place}.{name}", inner, depth=depth - 1)


def write(table: Table, path: Path) -> None:
    """Write a table whole, a shape a line: whoever reads meanwhile has the old one or the new."""
    text = f'{{"version": {VERSION}, "sections": {{\n'
    text += ",\n".join(
        f' {json.dumps(section)}: {{\n' + ",\n".join(
            f"  {json.dumps(kernel)}: {{\n" + ",\n".join(
                f"   {json.dumps(name)}: {json.dumps(shape)}" for name, shape in classes.items()
            ) + "}"
            for kernel, classes in sorted(kernels.items())
        ) + "}"
        for section, kernels in sorted(table.items())
    )  # fmt: skip
    text += "}}\n"
    whole = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        whole.write_text(text)
        os.replace(whole, path)
    except OSError:
        whole.unlink(missing_ok=True)
        raise


def dtype_class(dtype: torch.dtype) -> str:
    """`bf16`, `fp32` or `fp16`: the dtypes that kernels serve."""
    return _DTYPES[dtype]


def width_class(width: int, low: int, high: int) -> str:
    """`w1024` for 513 to 1024 numbers, none below `low` nor above `high`, powers of two."""
    return f"w{min(max(1 << (width - 1).bit_length(), low), high)}"
