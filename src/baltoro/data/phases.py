"""The phases of a build. Each looks first whether its result is there, in `work`."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from baltoro import config as configs
from baltoro.data import drawn, exercises
from baltoro.data.config import BuildConfig, FilesConfig, MadeConfig, Rules
from baltoro.data.dataset import TOKENIZER_DIRECTORY, tokenizer_sha256
from baltoro.data.dedup import Deduplicator
from baltoro.data.document import Document
from baltoro.data.files import OpenFile, sha256, write_atomically
from baltoro.data.filters import fault, quality
from baltoro.data.images import encode
from baltoro.data.long import windows
from baltoro.data.manifest import VERSION, Manifest, SourceEntry, write_manifest
from baltoro.data.progress import Progress, Report
from baltoro.data.readers import read_file
from baltoro.data.rephrase import Rephraser, rephrasings
from baltoro.data.shard import EncodedDocument, ShardEntry, ShardWriter
from baltoro.data.shuffle import permutation
from baltoro.data.source import AbsentSource, paths
from baltoro.text.files import read_json
from baltoro.text.images import ImageProcessor
from baltoro.text.processor import Processor
from baltoro.text.tokenizer import Tokenizer, load_tokenizer, train

SPLITS = ("train", "held_out")


@dataclass(frozen=True, slots=True)
class _Source:
    """What all phases know of a source, whichever way it comes about."""

    name: str
    domain: str
    licence: str
    rules: Rules
    is_made: bool
    path: Path  # of its files in `work`, without suffix


class Phases:
    """One build in one folder."""

    def __init__(self, config: BuildConfig, out: Path, report: Report, open_file: OpenFile) -> None:
        """Claim the folder. Raises `ValueError` if another recipe was begun there."""
        self._config = config
        self._out = out
        self._work = out / "work"
        self._report = report
        self._open_file = open_file
        self._sources: list[_Source] = []
        for files in config.files:
            self._add_source(files.name, files.domain, files.licence, files.rules)
        for made in config.made:
            self._add_source(made.name, made.domain, "made here", "short", is_made=True)
        self._num_collected = len(self._sources)
        claim = self._work / "recipe.json"
        if claim.is_file() and read_json(claim).get("digest") != configs.digest(config):
            raise ValueError(
                f"{out}: holds an unfinished build of another recipe or of other settings; choose "
                "another folder, or remove this one"
            )
        self._write(claim, {"digest": configs.digest(config)})

    def collect(self) -> None:
        """Documents that pass the filters: `NAME.jsonl`, and `NAME.json` with what was left out."""
        made = {source.name: source for source in self._config.made}
        files = {source.name: source for source in self._config.files}
        for source in self._sources:
            if _beside(source, ".json").is_file():
                continue
            if source.is_made:
                self._make(source, made[source.name])
            else:
                self._collect_files(source, files[source.name])

    def deduplicate(self) -> None:
        """Duplicates out, the rest split by hash: `NAME.split.json` per source."""
        sources = self._sources[: self._num_collected]
        if all(_beside(source, ".split.json").is_file() for source in sources):
            return
        deduplicator = Deduplicator(self._config.dedup)
        progress = Progress(self._report, "deduplicate", _num_bytes(sources))
        kept: dict[str, dict[bytes, int]] = {}
        by_domain: dict[str, list[bytes]] = {}
        dropped: dict[str, Counter[str]] = {source.name: Counter() for source in sources}
        for source in sources:
            kept[source.name] = {}
            for index, document in enumerate(_documents(source)):
                progress.add(len(document.text))
                reason = deduplicator.fault(document, source.is_made)
                if reason:
                    dropped[source.name][reason] += 1
                else:
                    kept[source.name][document.hash] = index
                    by_domain.setdefault(source.domain, []).append(document.hash)
        held_out = {
            key
            for keys in by_domain.values()
            for key in held_out_of(keys, self._config.held_out_share)
        }
        for source in sources:
            split = {
                "train": [i for key, i in kept[source.name].items() if key not in held_out],
                "held_out": [i for key, i in kept[source.name].items() if key in held_out],
            }
            self._write(_beside(source, ".split.json"), {**split, "dropped": dropped[source.name]})
        num_kept = sum(map(len, kept.values()))
        num_dropped = sum(counts.total() for counts in dropped.values())
        progress.end(f"{num_kept:,} documents kept, {num_dropped:,} left out")

    def learn_tokenizer(self) -> None:
        """The tokenizer's files in `tokenizer`, trained or copied."""
        done = self._work / "tokenizer.json"
        if done.is_file():
            return
        config = self._config.tokenizer
        progress = Progress(self._report, "tokenizer", 1)
        if config.directory is not None:
            tokenizer = load_tokenizer(config.directory)
            if tokenizer.vocab_size != config.vocab_size:
                raise ValueError(
                    f"tokenizer vocab_size={config.vocab_size}: {config.directory} has one of "
                    f"{tokenizer.vocab_size} ids"
                )
        else:
            sources = self._sources[: self._num_collected]
            share = config.sample_bytes / max(1, _num_bytes(sources))
            texts = (
                document.text
                for source in sources
                for document in self._split(source, "train")
                if int.from_bytes(document.hash[8:16], "big") < share * 2.0**64
            )
            tokenizer = train(texts, config.vocab_size, config.num_specials)
        tokenizer.save(self._out / TOKENIZER_DIRECTORY)
        self._write(done, {"vocab_size": tokenizer.vocab_size})
        progress.end(f"{tokenizer.vocab_size:,} ids")

    def synthesise(self, rephraser: Rephraser | None) -> None:
        """Rephrasings of documents to train on, and long windows of each split."""
        if rephraser is not None:
            self._rephrase(rephraser)
        if self._config.long is not None:
            self._lengthen()

    def encode(self) -> Manifest:
        """Shards, then card and manifest."""
        tokenizer = load_tokenizer(self._out / TOKENIZER_DIRECTORY)
        progress = Progress(self._report, "encode", _num_bytes(self._sources))
        domains = tuple(dict.fromkeys(source.domain for source in self._sources))
        entries: list[SourceEntry] = []
        shards: list[ShardEntry] = []
        for number, source in enumerate(self._sources):
            path = _beside(source, ".shards.json")
            if not path.is_file():
                entry, written = self._encode_source(source, number, domains, tokenizer, progress)
                self._write(
                    path, {"entry": asdict(entry), "shards": [asdict(shard) for shard in written]}
                )
            result = read_json(path)
            entries.append(configs.from_dict(SourceEntry, result["entry"]))
            shards += [configs.from_dict(ShardEntry, shard) for shard in result["shards"]]
        manifest = Manifest(
            version=VERSION,
            recipe=self._config.name,
            recipe_digest=configs.digest(self._config),
            seed=self._config.seed,
            vocab_size=tokenizer.vocab_size,
            tokenizer_sha256=tokenizer_sha256(self._out / TOKENIZER_DIRECTORY),
            max_picture_tokens=self._config.max_picture_tokens,
            domains=domains,
            sources=tuple(entries),
            shards=tuple(shards),
        )
        write_manifest(manifest, self._out, self._open_file)
        progress.end(f"{manifest.num_tokens:,} tokens in {len(shards)} shards")
        return manifest

    def _add_source(
        self, name: str, domain: str, licence: str, rules: Rules, *, is_made: bool = False
    ) -> _Source:
        path = self._work / f"{len(self._sources):03d}"
        source = _Source(name, domain, licence, rules, is_made, path)
        self._sources.append(source)
        return source

    def _write(self, path: Path, content: object) -> None:
        write_atomically(path, [json.dumps(content).encode()], self._open_file)

    def _make(self, source: _Source, made: MadeConfig) -> None:
        progress = Progress(self._report, f"make {source.name}", made.num_documents)
        make = exercises.documents if made.kind == "exercises" else drawn.documents
        documents = []
        for document in make(made, self._config.seed):
            documents.append(document)
            progress.add(1)
        self._keep(source, documents, Counter(), note=None)
        progress.end(f"{len(documents):,} documents")

    def _collect_files(self, source: _Source, files: FilesConfig) -> None:
        dropped: Counter[str] = Counter()
        kept: list[Document] = []
        try:
            found = paths(files)
        except AbsentSource as error:
            if not files.is_optional:
                raise
            self._report(f"{error}; skipped")
            self._keep(source, [], dropped, note=str(error).partition(": ")[2])
            return
        order = range(len(found))
        if files.max_bytes is not None:
            order = permutation(len(found), self._config.seed, files.name).tolist()
        progress = Progress(self._report, f"collect {source.name}", len(found))
        size = 0
        for index in order:
            for document in read_file(
                found[index], str(found[index]), dropped, files.has_titles_in_names
            ):
                reason = self._fault(document, source)
                if reason:
                    dropped[reason] += 1
                else:
                    kept.append(document)
                    size += len(document.text.encode(errors="replace"))
            progress.add(1)
            if files.max_bytes is not None and size >= files.max_bytes:
                break
        reasons = ", ".join(f"{reason} {number}" for reason, number in dropped.most_common())
        if not kept and not files.is_optional:
            raise ValueError(
                f"source {source.name!r}: none of its {len(found)} files gave a document "
                f"({reasons or 'all empty'}); mend the source or loosen its rules"
            )
        self._keep(source, kept, dropped, note=None if kept else f"nothing passed ({reasons})")
        progress.end(f"{len(kept):,} documents, {size:,} bytes")

    def _fault(self, document: Document, source: _Source) -> str | None:
        reason = fault(document.text, source.rules, self._config.filters)
        if (
            reason is None
            and quality(document.text, source.rules) < self._config.filters.min_quality
        ):
            return "low quality"
        return reason

    def _keep(
        self,
        source: _Source,
        documents: Iterable[Document],
        dropped: Counter[str],
        *,
        note: str | None,
    ) -> None:
        lines = [(document.to_json() + "\n").encode() for document in documents]
        write_atomically(_beside(source, ".jsonl"), lines, self._open_file)
        self._write(_beside(source, ".json"), {"dropped": dropped, "note": note})

    def _split(self, source: _Source, split: str) -> Iterator[Document]:
        """Its documents in one split."""
        wanted = set(read_json(_beside(source, ".split.json"))[split])
        for index, document in enumerate(_documents(source)):
            if index in wanted:
                yield document

    def _rephrase(self, rephraser: Rephraser) -> None:
        config = self._config.rephrase
        assert config is not None
        originals = self._sources[: self._num_collected]
        for domain in config.domains:
            source = self._add_source(f"rephrased {domain}", domain, "as its originals", "prose")
            if _beside(source, ".split.json").is_file():
                continue
            dropped: Counter[str] = Counter()
            documents = [
                rephrased
                for original in originals
                if original.domain == domain
                for document in self._split(original, "train")
                for rephrased in rephrasings(document, rephraser, config, dropped)
            ]
            self._keep(source, documents, dropped, note=None)
            split = {"train": list(range(len(documents))), "held_out": [], "dropped": {}}
            self._write(_beside(source, ".split.json"), split)

    def _lengthen(self) -> None:
        config = self._config.long
        assert config is not None
        source = self._add_source("long windows", config.domain, "as its documents", "prose")
        if _beside(source, ".split.json").is_file():
            return
        originals = self._sources[: self._num_collected]
        share = self._config.held_out_share
        num_held_out = max(1, round(config.num_windows * share))
        made: dict[str, list[Document]] = {}
        for split, count in (("train", config.num_windows), ("held_out", num_held_out)):
            parts = [
                document for original in originals for document in self._split(original, split)
            ]
            sized = configs.replace(config, {"num_windows": count})
            made[split] = list(windows(parts, sized, self._config.seed))
        self._keep(source, [*made["train"], *made["held_out"]], Counter(), note=None)
        count = len(made["train"])
        split_of = {"train": list(range(count)), "dropped": {}}
        held_out = list(range(count, count + num_held_out))
        self._write(_beside(source, ".split.json"), {**split_of, "held_out": held_out})

    def _encode_source(
        self,
        source: _Source,
        number: int,
        domains: tuple[str, ...],
        tokenizer: Tokenizer,
        progress: Progress,
    ) -> tuple[SourceEntry, list[ShardEntry]]:
        processor = Processor(tokenizer, ImageProcessor())
        shards: list[ShardEntry] = []
        scores: list[float] = []
        hashes: list[bytes] = []
        num_bytes = num_held_out = 0
        for split in SPLITS:
            writer = ShardWriter(
                self._out,
                f"{split}/{number:03d}",
                split,
                vocab_size=tokenizer.vocab_size,
                max_tokens=self._config.shard_tokens,
                open_file=self._open_file,
            )
            for document in self._split(source, split):
                tokens, pictures = encode(document, processor, self._config.max_picture_tokens)
                scores.append(quality(document.text, source.rules))
                hashes.append(document.hash)
                num_held_out += split == "held_out"
                num_bytes += len(document.text.encode(errors="replace"))
                key = int.from_bytes(document.hash[:8], "big")
                domain = domains.index(source.domain)
                writer.add(EncodedDocument(tokens, pictures, key, scores[-1], domain, number))
                progress.add(len(document.text))
            shards += writer.close()
        collected = read_json(_beside(source, ".json"))
        dropped = Counter(collected["dropped"])
        dropped.update(read_json(_beside(source, ".split.json"))["dropped"])
        entry = SourceEntry(
            name=source.name,
            domain=source.domain,
            licence=source.licence,
            note=collected["note"],
            num_documents=len(hashes),
            num_held_out=num_held_out,
            num_bytes=num_bytes,
            num_tokens=sum(shard.num_tokens for shard in shards),
            num_pictures=sum(shard.num_pictures for shard in shards),
            quality=sum(scores) / max(1, len(scores)),
            dropped=dict(dropped),
            sha256=sha256(hashes),
        )
        return entry, shards


def held_out_of(hashes: list[bytes], share: float) -> set[bytes]:
    """The hashes of a domain that lie below `share` of all possible ones.

    More documents never move one from a split to the other. A domain of several documents with none
    below gives its lowest, so that each can be evaluated, and a single document is trained on.
    """
    if len(hashes) < 2:
        return set()
    found = {key for key in hashes if int.from_bytes(key[:8], "big") < share * 2.0**64}
    if len(found) == len(hashes):
        found.remove(max(found))
    return found or {min(hashes)}


def _beside(source: _Source, suffix: str) -> Path:
    return source.path.with_name(source.path.name + suffix)


def _documents(source: _Source) -> Iterator[Document]:
    with _beside(source, ".jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            yield Document.from_json(line)


def _num_bytes(sources: Iterable[_Source]) -> int:
    return sum(_beside(source, ".jsonl").stat().st_size for source in sources)
