"""What a build consists of. Recipes (`recipes.py`) return these; nothing here reads a file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Rules = Literal["prose", "code", "short"]
Made = Literal["exercises", "rendered_text", "chart", "shapes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FilesConfig:
    """A source of files on this machine."""

    name: str
    domain: str
    licence: str
    roots: tuple[Path, ...]  # folders, read whole, and files
    suffixes: tuple[str, ...]  # such as ".md"; a ".gz" after one of them is taken off
    excludes: tuple[str, ...] = ()  # glob patterns of file and folder names to leave out
    rules: Rules = "prose"  # which filters its text must pass; "short" for dictionaries and titles
    is_optional: bool = False  # absent or empty: skipped with a note; else an error
    max_bytes: int | None = None  # of text to keep; the rest of the source is left unread
    has_titles_in_names: bool = False  # a picture without caption is named by its file

    def __post_init__(self) -> None:
        if not self.roots or not self.suffixes:
            raise ValueError(f"source {self.name!r}: needs roots and suffixes")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ValueError(f"source {self.name!r} max_bytes={self.max_bytes}: must be positive")


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeConfig:
    """A source that is made while building, from the recipe's seed."""

    name: str
    domain: str
    kind: Made
    num_documents: int
    fonts: tuple[Path, ...] = ()  # folders with .ttf files; without any, Pillow's own font

    def __post_init__(self) -> None:
        if self.num_documents < 1:
            raise ValueError(
                f"source {self.name!r} num_documents={self.num_documents}: must be >= 1"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterConfig:
    """Limits of the rule filters; shares lie in 0 to 1."""

    min_characters: int = 200
    max_characters: int = 1_000_000
    max_symbol_share: float = 0.3  # neither letter, digit nor blank; prose
    max_code_symbol_share: float = 0.5
    min_letter_share: float = 0.5  # of what is not blank; prose
    max_duplicate_line_share: float = 0.3  # characters in lines seen before
    max_ngram_share: float = 0.2  # of the most frequent four words in a row
    max_line: int = 2_000  # characters; longer ones are data or minified code
    max_log_line_share: float = 0.3
    max_unreadable_share: float = 0.001  # control characters and U+FFFD
    min_quality: float = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class DedupConfig:
    """Fuzzy deduplication; exact is always on. Needs the extra `data`."""

    num_hashes: int = 64  # of a MinHash
    threshold: float = 0.8  # Jaccard similarity of word n-grams above which two are one
    ngram: int = 5  # words
    max_picture_distance: int = 2  # bits of 64 between perceptual hashes of one picture

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 1:
            raise ValueError(f"dedup threshold={self.threshold}: must lie between 0 and 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class LongConfig:
    """Long-context synthesis: windows of whole documents with tasks spread across them."""

    num_windows: int
    num_characters: int  # of a window, about
    num_entries: int = 6  # pieces of evidence per task, each in its own part of the window
    takes_pictures: bool = False  # documents with pictures too; then windows cannot be cut
    domain: str = "long"

    def __post_init__(self) -> None:
        if self.num_windows < 1 or self.num_entries < 2:
            raise ValueError(
                f"long num_windows={self.num_windows}, num_entries={self.num_entries}: must be at "
                "least 1 and 2"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RephraseConfig:
    """Rephrasing by a callable given to `build`."""

    domains: tuple[str, ...]  # which are rephrased
    styles: tuple[str, ...]  # one rephrasing per style
    chunk_characters: int = 2_000  # rewritten at once, seeing the rewriting so far
    min_recall: float = 0.9  # share of numbers and names that must be kept


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerConfig:
    """A tokenizer to train on the documents, or one to take from a folder."""

    vocab_size: int
    num_specials: int = 256
    sample_bytes: int = 20_000_000  # text to learn merges from
    directory: Path | None = None  # with the files of a tokenizer of `vocab_size` ids


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildConfig:
    """A whole recipe."""

    name: str
    seed: int
    files: tuple[FilesConfig, ...]
    made: tuple[MadeConfig, ...]
    tokenizer: TokenizerConfig
    filters: FilterConfig
    dedup: DedupConfig | None  # None: exact only
    long: LongConfig | None
    rephrase: RephraseConfig | None
    held_out_share: float
    max_picture_tokens: int  # a larger picture is scaled down
    shard_tokens: int  # a shard is written when it has so many

    def __post_init__(self) -> None:
        names = [source.name for source in self.files]
        names += [source.name for source in self.made]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"sources {names}: must be at least one, each with its own name")
        if not 0 < self.held_out_share < 1:
            raise ValueError(
                f"held_out_share={self.held_out_share}: must lie between 0 and 1, so that there is "
                "something to evaluate on"
            )
        for name in ("max_picture_tokens", "shard_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be positive")
