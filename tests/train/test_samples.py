"""What a run asks its model about: held-out pictures, the same ones every time."""

from pathlib import Path

import pytest
from data.small import small_config, write_sources

from baltoro.data.build import build
from baltoro.data.config import MadeConfig
from baltoro.data.dataset import Dataset
from baltoro.text.images import ImageProcessor
from baltoro.text.pictures import open_picture
from baltoro.train.folder import open_run
from baltoro.train.samples import picture_prompts


@pytest.fixture(scope="module")
def train_set(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    root = tmp_path_factory.mktemp("samples")
    write_sources(root / "sources")
    made = tuple(
        MadeConfig(name=kind, domain="pictures", kind=kind, num_documents=6)
        for kind in ("rendered_text", "chart", "shapes")
    )
    config = small_config(root / "sources", made=made, long=None, seed=1)
    build(config, root / "built", report=lambda line: None)
    return Dataset(root / "built", "train", vocab_size=300)


def prompts(dataset, count=9, max_tokens=1000):
    return picture_prompts(dataset, ImageProcessor(), count=count, max_tokens=max_tokens)


def documents_with_pictures(dataset):
    return [i for i in range(dataset.num_documents) if dataset.num_pictures[i] == 1]


def test_each_source_gives_its_first_document_with_a_picture(train_set):
    found = prompts(train_set)
    sources = [train_set.source(i) for i in documents_with_pictures(train_set)]
    assert len(found) == len(set(sources)) > 1
    first = documents_with_pictures(train_set)[0]
    ids = train_set.tokens(first).tolist()
    assert ids[: len(found[0].prompt.ids)] == found[0].prompt.ids
    assert [each.prompt.ids for each in prompts(train_set)] == [e.prompt.ids for e in found]


def test_a_prompt_holds_the_places_of_its_picture_and_none_of_the_answer(train_set):
    tokenizer = train_set.tokenizer
    for found in prompts(train_set):
        num_places = found.prompt.ids.count(tokenizer.media_pad_id)
        _, height, width = found.prompt.grid_thws[0]
        assert num_places == height * width // 4 > 0
        text = tokenizer.decode(found.prompt.ids)
        assert found.expected and found.expected not in text
        assert found.question in text
        assert max(open_picture(found.picture).size) <= 512


def test_a_conversation_is_asked_its_question_and_a_caption_nothing(train_set):
    found = prompts(train_set)
    questions = {each.question for each in found}
    assert "" in questions and len(questions) > 1
    for each in found:
        ending = train_set.tokenizer.decode(each.prompt.ids)[-40:]
        assert ending.endswith("<|sep|>" if each.question else "<|media_end|>"), ending


def test_number_and_length_are_bounded(train_set):
    assert len(prompts(train_set, count=1)) == 1
    longest = min(len(each.prompt.ids) for each in prompts(train_set))
    assert all(len(each.prompt.ids) <= longest for each in prompts(train_set, max_tokens=longest))
    assert prompts(train_set, max_tokens=3) == []


def test_a_picture_is_kept_once_in_the_folder(tmp_path: Path):
    with open_run(tmp_path / "run") as folder:
        names = {folder.keep_picture(b"one"), folder.keep_picture(b"one")}
        names |= {folder.keep_picture(b"two")}
    assert len(names) == 2
    assert sorted((tmp_path / "run" / name).read_bytes() for name in names) == [b"one", b"two"]
