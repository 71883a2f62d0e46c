"""A recipe to a data folder: collect, deduplicate and split, learn a tokenizer, encode.

    out/  train/ held_out/ (shards)  tokenizer/  card.md  manifest.json
    out/work/  what each phase has finished; gone when the manifest is there

Each phase keeps its results source by source, so a build that was stopped goes on where it was. A
folder belongs to one recipe and to one build at a time. The same recipe on the same machine gives
the same bytes. Rephrasing sees only documents to train on, and a long window only documents of one
split, so nothing held out is trained on in another form.
"""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baltoro.config import digest
from baltoro.data.config import BuildConfig
from baltoro.data.files import OpenFile, create
from baltoro.data.manifest import MANIFEST, Manifest, read_manifest
from baltoro.data.phases import Phases
from baltoro.data.progress import Report
from baltoro.data.rephrase import Rephraser


def build(
    config: BuildConfig,
    out: Path,
    *,
    rephraser: Rephraser | None = None,
    report: Report = print,
    open_file: OpenFile = create,
) -> Manifest:
    """Build the data of a recipe in `out`, or finish what was begun there; returns the manifest.

    rephraser: rewrites passages if the recipe has a `rephrase` part.
    report: takes lines of progress, with the time left of a phase.
    open_file: opens each file that is written; for tests of full disks.

    Raises `ValueError` for a source that is absent or empty and not optional, a folder of another
    recipe or in use, too little text for the vocabulary, or a missing package; `OSError` when
    writing fails. What was finished stays, and the next call goes on from there.
    """
    if (config.rephrase is None) != (rephraser is None):
        raise ValueError("rephraser: give one exactly if the recipe has a rephrase part")
    out.mkdir(parents=True, exist_ok=True)
    with _lock(out):
        if (out / MANIFEST).is_file():
            manifest = read_manifest(out)
            if manifest.recipe_digest != digest(config):
                raise ValueError(
                    f"{out}: holds the data of another recipe, {manifest.recipe!r}, or of other "
                    "settings; choose another folder"
                )
            report(f"{out}: is already built, {manifest.num_tokens:,} tokens")
        else:
            phases = Phases(config, out, report, open_file)
            phases.collect()
            phases.deduplicate()
            phases.learn_tokenizer()
            phases.synthesise(rephraser)
            manifest = phases.encode()
        shutil.rmtree(out / "work", ignore_errors=True)
    return manifest


@contextmanager
def _lock(out: Path) -> Iterator[None]:
    """Hold the folder; the lock ends with the process, however it ends."""
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{out}: another build is writing there; wait for it") from error
        yield
