"""Helpers for configurations: trees of frozen dataclasses with plain values at the leaves.

A leaf is `bool`, `int`, `float`, `str`, `Path`, a `Literal`, `None`, or a tuple or string-keyed
mapping of these. Values are checked against the annotations, so a wrong configuration fails where
it is read and not where it is used. The helpers fill nothing in and import nothing of ours.
"""

import dataclasses
import difflib
import hashlib
import json
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

C = TypeVar("C")


def paths(config: object) -> list[str]:
    """Every dotted path of `config`, parts before their fields, in order of definition."""
    found: list[str] = []
    for field in dataclasses.fields(_instance(config)):
        value = getattr(config, field.name)
        found.append(field.name)
        if dataclasses.is_dataclass(value):
            found += [f"{field.name}.{path}" for path in paths(value)]
    return found


def replace(config: C, changes: Mapping[str, object]) -> C:
    """A copy of `config` with values at dotted paths replaced, for example `{"kda.num_heads": 4}`.

    All changes of one part are made together, so its own checks see the final values. Raises
    `ValueError` for an unknown path (naming the nearest), for a value that does not fit its
    annotation, for a path through an absent part, and for a part set both whole and by field.
    """
    return _replace(config, changes, prefix="", root=config)


def to_dict(config: object) -> dict[str, Any]:
    """`config` as plain JSON types: parts become dicts, tuples lists, paths strings."""
    return {
        field.name: _plain(getattr(config, field.name))
        for field in dataclasses.fields(_instance(config))
    }


def from_dict(cls: type[C], data: Mapping[str, Any]) -> C:
    """The inverse of `to_dict`.

    Raises `ValueError` naming the dotted path of an unknown key (with the nearest field), a missing
    field, or a value that does not fit its annotation.
    """
    return typing.cast(C, _build(cls, data, path=""))


def digest(config: object) -> str:
    """SHA-256 (64 hex digits) of `to_dict(config)`: equal for equal values, in any process."""
    return digest_of(to_dict(config))


def digest_of(data: Mapping[str, Any]) -> str:
    """The digest of a configuration as plain JSON types, of all that it holds."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def nearest(name: str, known: Iterable[str]) -> str:
    """A phrase for an error message: the closest of `known`, or all of them when none is close."""
    names = list(known)
    tail = name.rpartition(".")[2]
    same_tail = [other for other in names if other.rpartition(".")[2] == tail]
    close = same_tail or difflib.get_close_matches(name, names, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(names)}"


def _instance(config: object) -> Any:
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise TypeError(f"expected a dataclass instance, got {config!r}")
    return config


def _replace(config: Any, changes: Mapping[str, object], *, prefix: str, root: object) -> Any:
    hints = typing.get_type_hints(type(config))
    values: dict[str, object] = {}
    inner: dict[str, dict[str, object]] = {}
    for path, value in changes.items():
        head, dot, rest = path.partition(".")
        if head not in hints:
            full = prefix + path
            raise ValueError(f"{full}: unknown path; {nearest(full, paths(root))}")
        if dot:
            if head in changes:
                raise ValueError(f"{prefix}{head}: set both whole and by field; choose one")
            inner.setdefault(head, {})[rest] = value
        else:
            values[head] = _build(hints[head], value, path=prefix + head)
    for head, part_changes in inner.items():
        part = getattr(config, head)
        if not dataclasses.is_dataclass(part):
            field = f"{prefix}{head}.{next(iter(part_changes))}"
            raise ValueError(f"{field}: {prefix}{head} is {part!r} and has no fields; set it whole")
        values[head] = _replace(part, part_changes, prefix=f"{prefix}{head}.", root=root)
    return dataclasses.replace(config, **values)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a configuration holds plain values, not {type(value).__name__}: {value!r}")


def _build(hint: Any, value: Any, *, path: str) -> Any:
    """`value`, plain or already built, as the annotation `hint` asks for it."""
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, typing.cast(type, hint)) else _part(hint, value, path)
    if origin in (typing.Union, types.UnionType):
        return _build_union(typing.get_args(hint), value, path)
    if origin is typing.Literal:
        return _fit(value, value in typing.get_args(hint), path, typing.get_args(hint))
    if origin is tuple:
        return _build_tuple(typing.get_args(hint), value, path)
    if origin is dict:
        _fit(value, isinstance(value, Mapping), path, "a mapping")
        item_hint = typing.get_args(hint)[1]
        return {key: _build(item_hint, item, path=f"{path}.{key}") for key, item in value.items()}
    if hint is Path:
        return Path(_fit(value, isinstance(value, (str, Path)), path, "a path"))
    if hint is float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return float(_fit(value, is_number, path, "a number"))
    if hint in (bool, int, str, types.NoneType):
        return _fit(value, type(value) is hint, path, hint.__name__)
    raise TypeError(f"{path}: annotation {hint!r} is not one that a configuration may have")


def _part(cls: Any, data: Any, path: str) -> Any:
    where = f"{path}." if path else ""
    _fit(data, isinstance(data, Mapping), path or cls.__name__, f"a mapping of {cls.__name__}")
    hints = typing.get_type_hints(cls)
    for key in data:
        if key not in hints:
            raise ValueError(f"{where}{key}: unknown key; {nearest(str(key), hints)}")
    for field in dataclasses.fields(cls):
        has_default = not (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if field.name not in data and not has_default:
            raise ValueError(f"{where}{field.name}: missing; {cls.__name__} requires it")
    return cls(**{key: _build(hints[key], item, path=where + key) for key, item in data.items()})


def _build_union(hints: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and types.NoneType in hints:
        return None
    members = [hint for hint in hints if hint is not types.NoneType]
    if len(members) == 1:
        return _build(members[0], value, path=path)
    if not all(member in (bool, int, float, str) for member in members):
        raise TypeError(f"{path}: a union may hold None and one part, or plain types; got {hints}")
    names = " or ".join(member.__name__ for member in members)
    return _fit(value, type(value) in members, path, names)


def _build_tuple(hints: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    _fit(value, isinstance(value, (tuple, list)), path, "a list")
    if len(hints) == 2 and hints[1] is Ellipsis:
        hints = (hints[0],) * len(value)
    _fit(value, len(value) == len(hints), path, f"{len(hints)} items")
    return tuple(
        _build(hint, item, path=f"{path}[{index}]")
        for index, (hint, item) in enumerate(zip(hints, value, strict=True))
    )


def _fit(value: Any, ok: bool, path: str, expected: object) -> Any:
    if not ok:
        wanted = f"one of {expected}" if isinstance(expected, tuple) else f"must be {expected}"
        raise ValueError(f"{path}={value!r}: {wanted}")
    return value
