"""The recipes and the verb: what comes with the package builds, checks and reads."""

from pathlib import Path

import pytest

from baltoro import config
from baltoro.data.cli import data
from baltoro.data.config import BuildConfig
from baltoro.data.dataset import Dataset
from baltoro.data.loader import Loader, LoaderConfig, StageConfig
from baltoro.data.manifest import read_manifest
from baltoro.data.mixture import natural
from baltoro.data.recipes import RECIPES, recipe
from baltoro.text.images import ImageProcessor


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_configurations_that_can_be_stored(name):
    built = recipe(name, None)
    assert config.from_dict(BuildConfig, config.to_dict(built)) == built
    assert recipe(name, 4096).tokenizer.vocab_size == 4096


def test_an_unknown_recipe_is_named_with_the_nearest():
    with pytest.raises(ValueError, match="recipe 'tinny' is unknown; did you mean 'tiny'"):
        recipe("tinny", None)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "out"
    data("build", "tiny", out=folder)
    return folder


def test_the_shipped_corpus_is_all_used(tiny):
    shipped = [s for s in read_manifest(tiny).sources if s.name.startswith("shipped")]
    assert len(shipped) == 5
    for source in shipped:
        assert source.num_documents and not source.dropped


def test_a_loader_reads_the_tiny_data(tiny):
    dataset = Dataset(tiny, "train", vocab_size=512)
    stage = StageConfig(first_step=0, seq_len=512, mixture=natural(dataset))
    loader = Loader(
        dataset, LoaderConfig(seed=0, tokens_per_step=2048, stages=(stage,)), ImageProcessor()
    )
    batches = [next(loader) for _ in range(8)]
    assert any(batch.pixel_values is not None for batch in batches)


def test_the_verb_shows_and_checks(tiny, capsys):
    data("show", str(tiny))
    assert "# Data card: recipe `tiny`" in capsys.readouterr().out
    data("check", str(tiny))
    assert "every file is as it was built" in capsys.readouterr().out


def test_the_verb_refuses_options_that_an_action_does_not_have(tiny):
    with pytest.raises(ValueError, match="data check: takes a folder and no option"):
        data("check", str(tiny), vocab_size=300)
