"""Whole builds: equal bytes, resumed, interrupted at every write, and refused for a reason."""

import errno
import fcntl
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from data.small import FullDisk, prose, small_config

from baltoro.data.build import build
from baltoro.data.config import RephraseConfig, TokenizerConfig
from baltoro.data.dataset import Dataset, verify
from baltoro.data.manifest import read_manifest
from baltoro.data.phases import held_out_of
from baltoro.data.progress import Progress
from baltoro.text.tokenizer import train


def quiet(line: str) -> None:
    """Takes progress and says nothing."""


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A source so small that building it takes no time."""
    (tmp_path / "sources").mkdir()
    for number in range(12):
        (tmp_path / "sources" / f"{number:02d}.txt").write_text(prose(number))
    return tmp_path / "sources"


def tiny_config(sources: Path, **changes: object):
    made = small_config(sources).made[1:]
    short = (replace(made[0], num_documents=2),)
    return small_config(sources, **{"made": short, "long": None, **changes})


def test_the_same_recipe_gives_the_same_bytes(sources, tmp_path):
    build(tiny_config(sources), tmp_path / "a", report=quiet)
    build(tiny_config(sources), tmp_path / "b", report=quiet)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_a_build_stopped_at_any_write_goes_on_to_the_same_bytes(sources, tmp_path):
    config = tiny_config(sources)
    build(config, tmp_path / "whole", report=quiet)
    expected = files_of(tmp_path / "whole")
    out = tmp_path / "out"
    num_failures = 0
    for max_bytes in range(200, 10**6, 2500):
        try:
            build(config, out, report=quiet, open_file=FullDisk(max_bytes).open)
        except OSError as error:
            assert error.errno == errno.ENOSPC
            num_failures += 1
            assert not list(out.rglob("*.partial"))
            assert not (out / "manifest.json").exists()
        else:
            break
    assert num_failures > 3
    assert files_of(out) == expected


def test_what_was_finished_is_not_done_again(sources, tmp_path):
    config = tiny_config(sources)
    with pytest.raises(OSError):
        build(config, tmp_path / "out", report=quiet, open_file=FullDisk(30_000).open)
    for path in sources.iterdir():
        path.unlink()
    build(config, tmp_path / "out", report=quiet)
    assert read_manifest(tmp_path / "out").sources[0].num_documents == 12


def test_a_finished_folder_is_left_as_it_is(built):
    before = files_of(built)
    lines: list[str] = []
    build(small_config(built.parent / "sources"), built, report=lines.append)
    assert files_of(built) == before
    assert "already built" in lines[0]


def test_a_folder_of_another_recipe_is_refused(built):
    with pytest.raises(ValueError, match="of another recipe, 'test'"):
        build(small_config(built.parent / "sources", seed=4), built, report=quiet)


def test_an_unfinished_folder_of_another_recipe_is_refused(sources, tmp_path):
    with pytest.raises(OSError):
        build(tiny_config(sources), tmp_path / "out", open_file=FullDisk(3000).open)
    with pytest.raises(ValueError, match="unfinished build of another recipe"):
        build(tiny_config(sources, seed=9), tmp_path / "out", report=quiet)


def test_two_builds_in_one_folder_are_refused(sources, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    with (out / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another build is writing there"):
            build(tiny_config(sources), out, report=quiet)


def test_an_absent_source_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ValueError, match=r"source 'prose': none of .*nowhere exists"):
        build(tiny_config(tmp_path / "nowhere"), tmp_path / "out", report=quiet)


def test_an_empty_source_is_an_error_that_names_it(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty holds no file with \.txt"):
        build(tiny_config(tmp_path / "empty"), tmp_path / "out", report=quiet)


def test_a_source_of_nothing_usable_is_an_error_with_the_reasons(tmp_path):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.txt").write_bytes(b"\x00\x01\x02" * 100)
    (tmp_path / "bad" / "b.txt").write_text("short\n")
    with pytest.raises(ValueError, match=r"none of its 2 files gave.*binary 1.*too short 1"):
        build(tiny_config(tmp_path / "bad"), tmp_path / "out", report=quiet)


def test_an_optional_source_that_is_absent_is_skipped_with_a_note(sources, tmp_path):
    config = tiny_config(sources)
    extra = replace(config.files[0], name="extra", roots=(tmp_path / "nowhere",), is_optional=True)
    config = replace(config, files=(*config.files, extra))
    lines: list[str] = []
    manifest = build(config, tmp_path / "out", report=lines.append)
    assert any("extra" in line and "skipped" in line for line in lines)
    assert "nowhere exists" in (manifest.sources[1].note or "")
    assert "skipped, none of" in (tmp_path / "out" / "card.md").read_text()


def test_too_little_text_for_the_vocabulary_is_an_error(sources, tmp_path):
    config = tiny_config(sources, tokenizer=TokenizerConfig(vocab_size=50_000))
    with pytest.raises(ValueError, match="vocab_size=50000"):
        build(config, tmp_path / "out", report=quiet)


def test_a_given_tokenizer_is_used(sources, tmp_path):
    tokenizer = train([prose(1), prose(2)], 290, 16)
    tokenizer.save(tmp_path / "mine")
    config = TokenizerConfig(vocab_size=290, directory=tmp_path / "mine")
    build(tiny_config(sources, tokenizer=config), tmp_path / "out", report=quiet)
    dataset = Dataset(tmp_path / "out", "train", vocab_size=290)
    text = dataset.tokenizer.decode(dataset.tokens(0))
    assert dataset.tokens(0)[:-1].tolist() == tokenizer.encode(text.removesuffix("[EOS]"))


def test_a_given_tokenizer_of_another_size_is_refused(sources, tmp_path):
    train([prose(1)], 280, 16).save(tmp_path / "mine")
    config = TokenizerConfig(vocab_size=290, directory=tmp_path / "mine")
    with pytest.raises(ValueError, match=r"vocab_size=290: .* has one of 280 ids"):
        build(tiny_config(sources, tokenizer=config), tmp_path / "out", report=quiet)


def test_duplicates_are_counted_and_left_out(sources, tmp_path):
    (sources / "copy.txt").write_text(prose(3).upper())
    manifest = build(tiny_config(sources), tmp_path / "out", report=quiet)
    assert manifest.sources[0].num_documents == 12
    assert manifest.sources[0].dropped == {"duplicate": 1}


def test_no_document_is_in_both_splits(built):
    hashes = [
        set(np.concatenate([np.load(path)["hash"] for path in (built / split).glob("*documents*")]))
        for split in ("train", "held_out")
    ]
    assert hashes[0] and hashes[1] and not hashes[0] & hashes[1]


def test_every_domain_has_something_held_out(built):
    held_out = Dataset(built, "held_out", vocab_size=300)
    assert {held_out.domains[index] for index in held_out.domain} == set(held_out.domains)


def test_more_documents_move_none_to_the_other_split():
    hashes = [bytes([number]) * 32 for number in range(0, 250, 5)]
    few = held_out_of(hashes[:40], 0.1)
    assert few == held_out_of(hashes, 0.1)
    assert len(few) == 6


def test_a_domain_of_one_document_keeps_it_for_training():
    assert held_out_of([b"\x00" * 32], 0.5) == set()
    assert held_out_of([b"\xf0" * 32, b"\xff" * 32], 0.1) == {b"\xf0" * 32}


def test_a_limit_of_bytes_ends_a_source(sources, tmp_path):
    config = tiny_config(sources)
    limited = replace(config, files=(replace(config.files[0], max_bytes=2000),))
    manifest = build(limited, tmp_path / "out", report=quiet)
    assert 2 <= manifest.sources[0].num_documents < 12


def test_the_manifest_adds_up(built):
    manifest = read_manifest(built)
    assert sum(source.num_tokens for source in manifest.sources) == manifest.num_tokens
    assert sum(shard.num_documents for shard in manifest.shards) == sum(
        source.num_documents for source in manifest.sources
    )
    prose_source = manifest.sources[0]
    assert prose_source.num_bytes == sum(
        path.stat().st_size for path in (built.parent / "sources").iterdir()
    )
    assert prose_source.licence == "none" and len(prose_source.sha256) == 64
    assert not (built / "work").exists()
    verify(built)


def test_the_card_shows_domains_and_sources(built):
    card = (built / "card.md").read_text()
    assert "| prose | 40 |" in card
    assert "**signs** (pictures; licence: made here)" in card


def test_rephrasings_are_added_to_train_alone(sources, tmp_path):
    config = tiny_config(
        sources, rephrase=RephraseConfig(domains=("prose",), styles=("shouted",), min_recall=0.5)
    )

    def shout(passage: str, *, style: str, context: str) -> str:
        return f"In a {style} manner: {passage}!"

    manifest = build(config, tmp_path / "out", rephraser=shout, report=quiet)
    originals, rephrased = manifest.sources[0], manifest.sources[-1]
    assert rephrased.name == "rephrased prose" and rephrased.domain == "prose"
    assert rephrased.num_documents == originals.num_documents - originals.num_held_out
    assert rephrased.num_held_out == 0


def test_a_rephraser_without_its_part_of_the_recipe_is_refused(sources, tmp_path):
    with pytest.raises(ValueError, match="rephraser"):
        build(
            tiny_config(sources),
            tmp_path / "out",
            rephraser=lambda passage, *, style, context: passage,
        )


def test_long_windows_are_held_out_with_their_documents(built):
    dataset = Dataset(built, "held_out", vocab_size=300)
    (window,) = np.flatnonzero(dataset.domain == dataset.domains.index("long"))
    text = dataset.tokenizer.decode(dataset.tokens(int(window)))
    train_set = Dataset(built, "train", vocab_size=300)
    in_train = {
        train_set.tokenizer.decode(train_set.tokens(number))[:60]
        for number in range(train_set.num_documents)
        if train_set.source(number) == "prose"
    }
    assert in_train and not any(beginning in text for beginning in in_train)


def test_progress_tells_the_time_left():
    now = [0.0]
    lines: list[str] = []
    progress = Progress(lines.append, "encode", 100, clock=lambda: now[0])
    now[0] = 1.0
    progress.add(10)
    assert not lines
    now[0] = 6.0
    progress.add(10)
    assert lines == ["encode: 20%, 24 s left"]
    progress.end("done")
    assert lines[-1] == "encode: done, 6.0 s"


def test_the_manifest_is_json_of_this_version(built, tmp_path):
    content = json.loads((built / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**content, "version": 9}))
    with pytest.raises(ValueError, match="version=9, this program reads 1"):
        read_manifest(tmp_path)
