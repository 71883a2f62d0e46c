"""What a data folder holds: `manifest.json` for programs, `card.md` for people."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from baltoro import config
from baltoro.data.files import OpenFile, write_atomically
from baltoro.data.shard import ShardEntry
from baltoro.text.files import read_json

MANIFEST = "manifest.json"
CARD = "card.md"
VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceEntry:
    """One source and what came of it."""

    name: str
    domain: str
    licence: str
    note: str | None = None  # why the source was skipped, or None
    num_documents: int = 0  # kept, in both splits
    num_held_out: int = 0
    num_bytes: int = 0  # of text kept, UTF-8
    num_tokens: int = 0  # kept, in both splits
    num_pictures: int = 0
    quality: float = 0.0  # mean score of what was kept
    dropped: dict[str, int] = field(default_factory=dict)  # reason to number of documents
    sha256: str = ""  # over the hashes of its documents, in order


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """All that a reader of the folder needs to know; stored as JSON."""

    version: int
    recipe: str
    recipe_digest: str  # of the configuration
    seed: int
    vocab_size: int
    tokenizer_sha256: str
    max_picture_tokens: int
    domains: tuple[str, ...]
    sources: tuple[SourceEntry, ...]
    shards: tuple[ShardEntry, ...]

    @property
    def num_tokens(self) -> int:
        """In both splits."""
        return sum(shard.num_tokens for shard in self.shards)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a data folder.

    Raises `ValueError` if the folder has none (it was never built, or not to the end), if it is not
    readable, or if it has another version.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise ValueError(
            f"{directory}: holds no {MANIFEST}, so no finished build; run `baltoro data build`"
        )
    content = read_json(path)
    if content.get("version") != VERSION:
        raise ValueError(
            f"{path}: version={content.get('version')!r}, this program reads {VERSION}; build again"
        )
    try:
        return config.from_dict(Manifest, content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; build the data again") from error


def write_manifest(manifest: Manifest, directory: Path, open_file: OpenFile) -> None:
    """Write the card, then the manifest: its presence means that the build is whole."""
    write_atomically(directory / CARD, [card(manifest).encode()], open_file)
    text = json.dumps(config.to_dict(manifest), indent=1, ensure_ascii=False) + "\n"
    write_atomically(directory / MANIFEST, [text.encode()], open_file)


def card(manifest: Manifest) -> str:
    """The data card, Markdown."""
    lines = [
        f"# Data card: recipe `{manifest.recipe}`",
        "",
        f"{manifest.num_tokens:,} tokens of a vocabulary of {manifest.vocab_size:,}; seed "
        f"{manifest.seed}; recipe digest `{manifest.recipe_digest[:16]}`, tokenizer "
        f"`{manifest.tokenizer_sha256[:16]}`.",
        "",
        "Documents are split into train and held-out by the hash of their content.",
        "",
        "| domain | documents | held out | pictures | text bytes | tokens |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for domain in manifest.domains:
        rows = [source for source in manifest.sources if source.domain == domain]
        names = ("num_documents", "num_held_out", "num_pictures", "num_bytes", "num_tokens")
        totals = [sum(getattr(row, name) for row in rows) for name in names]
        lines.append(f"| {domain} | " + " | ".join(f"{total:,}" for total in totals) + " |")
    lines += ["", "## Sources", ""]
    for source in manifest.sources:
        lines.append(_source_line(source))
    return "\n".join(lines) + "\n"


def _source_line(source: SourceEntry) -> str:
    head = f"- **{source.name}** ({source.domain}; licence: {source.licence})"
    if source.note is not None:
        return f"{head}: skipped, {source.note}"
    dropped = ", ".join(f"{reason} {number:,}" for reason, number in sorted(source.dropped.items()))
    return (
        f"{head}: {source.num_documents:,} documents, {source.num_tokens:,} tokens, mean quality "
        f"{source.quality:.2f}; dropped: {dropped or 'none'}"
    )
