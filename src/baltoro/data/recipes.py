"""The recipes of data: functions that return a whole `BuildConfig`.

`tiny` is what the repository carries and makes, for a first run anywhere. `machine` is what any
Python on a Linux machine has lying about: documentation, manual pages, sources and pictures.
"""

import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

from baltoro.config import nearest
from baltoro.data.config import (
    BuildConfig,
    DedupConfig,
    FilesConfig,
    FilterConfig,
    LongConfig,
    MadeConfig,
    Rules,
    TokenizerConfig,
)

_CORPUS = Path(__file__).parent / "corpus"
_SHARE = Path("/usr/share")
_CHANGELOGS = ("*changelog*", "*ChangeLog*", "CHANGES*", "NEWS*", "THANKS*", "AUTHORS*")
_CODE = (".c", ".h", ".cpp", ".hpp", ".js", ".sh", ".pl", ".pm", ".rb", ".lua", ".css", ".sql")


def tiny(vocab_size: int = 512) -> BuildConfig:
    """What is shipped, exercises and drawn pictures; seconds. 512 ids are bytes and specials."""
    return BuildConfig(
        name="tiny",
        seed=0,
        files=(
            _corpus("prose", "prose", (".txt",)),
            _corpus("facts", "facts", (".md",)),
            _corpus("code", "code", (".txt",), rules="code"),
            _corpus("dialogue", "dialogue", (".jsonl",), rules="short"),
            _corpus("pictures", "pictures", (".png",), rules="short"),
        ),
        made=(
            MadeConfig(name="exercises", domain="maths", kind="exercises", num_documents=900),
            *_drawn(rendered_text=160, chart=80, shapes=80),
        ),
        tokenizer=TokenizerConfig(vocab_size=vocab_size),
        filters=FilterConfig(),
        dedup=None,
        long=LongConfig(num_windows=8, num_characters=6_000, num_entries=4),
        rephrase=None,
        held_out_share=0.08,
        max_picture_tokens=64,
        shard_tokens=1 << 24,
    )


def machine(vocab_size: int = 32_768, max_bytes: int = 60_000_000) -> BuildConfig:
    """`tiny`'s sources and what this machine has; minutes. Needs the extra `data`.

    max_bytes: text to take from each source, so that none drowns the others.
    """
    shipped = tiny()
    return BuildConfig(
        name="machine",
        seed=0,
        files=(*shipped.files, *_local_text(max_bytes), *_local_pictures()),
        made=(
            MadeConfig(name="exercises", domain="maths", kind="exercises", num_documents=6_000),
            *_drawn(rendered_text=3_000, chart=1_500, shapes=1_500, fonts=(_SHARE / "fonts",)),
        ),
        tokenizer=TokenizerConfig(vocab_size=vocab_size),
        filters=FilterConfig(),
        dedup=DedupConfig(),
        long=LongConfig(num_windows=200, num_characters=120_000, num_entries=8),
        rephrase=None,
        held_out_share=0.01,
        max_picture_tokens=64,
        shard_tokens=1 << 24,
    )


def recipe(name: str, vocab_size: int | None) -> BuildConfig:
    """The recipe called `name`, with its own vocabulary size or another.

    Raises `ValueError` with the nearest name for one that is unknown.
    """
    if name not in RECIPES:
        raise ValueError(f"recipe {name!r} is unknown; {nearest(name, RECIPES)}")
    return RECIPES[name]() if vocab_size is None else RECIPES[name](vocab_size)


def _corpus(
    name: str, domain: str, suffixes: tuple[str, ...], rules: Rules = "prose"
) -> FilesConfig:
    return FilesConfig(
        name=f"shipped {name}",
        domain=domain,
        licence="Apache-2.0",
        roots=(_CORPUS / name,),
        suffixes=suffixes,
        rules=rules,
    )


def _drawn(
    *, rendered_text: int, chart: int, shapes: int, fonts: tuple[Path, ...] = ()
) -> tuple[MadeConfig, ...]:
    return (
        MadeConfig(
            name="rendered text",
            domain="pictures",
            kind="rendered_text",
            num_documents=rendered_text,
            fonts=fonts,
        ),
        MadeConfig(
            name="charts", domain="pictures", kind="chart", num_documents=chart, fonts=fonts
        ),
        MadeConfig(name="shapes", domain="pictures", kind="shapes", num_documents=shapes),
    )


def _local_text(max_bytes: int) -> tuple[FilesConfig, ...]:
    python = sysconfig.get_paths()
    libraries = tuple(dict.fromkeys((Path(python["stdlib"]), Path(python["purelib"]))))
    folders = (Path(python["purelib"]), _SHARE / "doc")
    distribution = "as the distribution's packages"
    return (
        FilesConfig(
            name="documentation",
            domain="docs",
            licence=distribution,
            roots=folders,
            suffixes=(".txt", ".md", ".rst", ".html"),
            excludes=(*_CHANGELOGS, "copyright*", "RECORD", "top_level.txt", "entry_points.txt"),
            is_optional=True,
            max_bytes=max_bytes,
        ),
        FilesConfig(
            name="manual pages",
            domain="docs",
            licence=distribution,
            roots=tuple(_SHARE / "man" / f"man{section}" for section in range(1, 9)),
            suffixes=(".man",),
            is_optional=True,
            max_bytes=max_bytes,
        ),
        FilesConfig(
            name="python sources",
            domain="code",
            licence="as the installed packages",
            roots=libraries,
            suffixes=(".py", ".pyi"),
            excludes=("idle_test", "lib2to3", "__pycache__"),
            rules="code",
            is_optional=True,
            max_bytes=max_bytes,
        ),
        FilesConfig(
            name="other sources",
            domain="code",
            licence="as the installed packages",
            roots=(*libraries, Path("/usr/include"), _SHARE / "perl", _SHARE / "perl5"),
            suffixes=_CODE,
            rules="code",
            is_optional=True,
            max_bytes=max_bytes,
        ),
        FilesConfig(
            name="licences",
            domain="docs",
            licence=distribution,
            roots=(_SHARE / "common-licenses",),
            suffixes=("", ".0", ".1", ".2", ".3"),
            is_optional=True,
            max_bytes=max_bytes,
        ),
        FilesConfig(
            name="dictionaries",
            domain="facts",
            licence=distribution,
            roots=(_SHARE / "dict", _SHARE / "zoneinfo" / "zone.tab"),
            suffixes=(".tab", ""),
            rules="short",
            is_optional=True,
            max_bytes=max_bytes,
        ),
    )


def _local_pictures() -> tuple[FilesConfig, ...]:
    return (
        FilesConfig(
            name="icons",
            domain="pictures",
            licence="as the icon themes",
            roots=(_SHARE / "icons", _SHARE / "pixmaps"),
            suffixes=(".png",),
            excludes=("8x8", "16x16", "22x22", "24x24", "256x256", "512x512", "cursors"),
            rules="short",
            is_optional=True,
            has_titles_in_names=True,
        ),
    )


RECIPES: Mapping[str, Callable[..., BuildConfig]] = {"tiny": tiny, "machine": machine}
