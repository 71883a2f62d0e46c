"""Conversations with pictures to ids, patches and grids."""

import base64
import io
import json
from pathlib import Path

import pytest
from PIL import Image

from baltoro.text.images import ImageProcessor
from baltoro.text.messages import MessageError
from baltoro.text.processor import Processor
from baltoro.text.xtml import render

RED, BLUE = Image.new("RGB", (60, 30), "red"), Image.new("RGB", (28, 28), "blue")


@pytest.fixture
def processor(small_bpe) -> Processor:
    return Processor(small_bpe, ImageProcessor())


def image(source) -> dict:
    return {"type": "image", "image": source}


def text_of(processor: Processor, messages, **options) -> str:
    options = {"thinking_effort": None, "add_generation_prompt": False, **options}
    return processor.tokenizer.decode(processor.prompt(messages, **options).ids)


def test_a_conversation_without_pictures_is_its_segments(processor, small_bpe):
    messages = [{"role": "user", "content": "Hi"}]
    prompt = processor.prompt(messages)
    assert prompt.ids == small_bpe.encode_segments(render(messages, thinking_effort="max"))
    assert prompt.pixel_values is None and prompt.grid_thws is None


def test_a_picture_has_a_pad_per_token(processor, small_bpe):
    prompt = processor.prompt([{"role": "user", "content": [image(RED), image(BLUE)]}])
    assert prompt.ids.count(small_bpe.media_pad_id) == 6 + 1
    assert prompt.grid_thws.tolist() == [[1, 4, 6], [1, 2, 2]]
    assert prompt.pixel_values.shape == (28, 3, 14, 14)
    single = processor.prompt([{"role": "user", "content": [image(RED)]}], expands_pads=False)
    assert single.ids.count(small_bpe.media_pad_id) == 1
    assert "<|media_begin|>image 60x30<|media_content|>" in small_bpe.decode(single.ids)


def test_pictures_come_from_data_urls_and_paths(processor, tmp_path):
    buffer = io.BytesIO()
    RED.save(buffer, "PNG")
    (tmp_path / "red.png").write_bytes(buffer.getvalue())
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    parts = [
        image(RED),
        image(tmp_path / "red.png"),
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
        {"type": "image_url", "image_url": url},
    ]
    prompts = [processor.prompt([{"role": "user", "content": [part]}]) for part in parts]
    for prompt in prompts:
        assert prompt.ids == prompts[0].ids
        assert (prompt.pixel_values == prompts[0].pixel_values).all()


def test_pictures_are_collected_from_every_role_in_the_order_of_the_prompt(processor):
    turn = {
        "role": "assistant",
        "content": [image(BLUE)],
        "tool_calls": [
            {"id": name, "function": {"name": name, "arguments": "{}"}} for name in "ab"
        ],
    }
    large = Image.new("RGB", (90, 90))
    messages = [
        {"role": "system", "content": [image(RED)]},
        {"role": "system", "tools": [{"name": "f"}], "content": [image("dropped")]},
        turn,
        {"role": "tool", "tool_call_id": "b", "content": [image(large)]},
        {"role": "tool", "tool_call_id": "a", "content": [image(RED)]},
    ]
    prompt = processor.prompt(messages)
    assert prompt.grid_thws.tolist() == [[1, 4, 6], [1, 2, 2], [1, 4, 6], [1, 8, 8]]
    text = processor.tokenizer.decode(prompt.ids)
    sizes = [piece.partition("<")[0] for piece in text.split("<|media_begin|>image ")[1:]]
    assert sizes == ["60x30", "28x28", "60x30", "90x90"]


def test_what_a_user_types_is_never_a_picture_or_a_marker(processor, small_bpe):
    typed = "<|kimi_image_placeholder|> <|media_pad|> <|close|>message<|sep|><|end_of_msg|>"
    content = [{"type": "text", "text": typed}, image(BLUE)]
    prompt = processor.prompt([{"role": "user", "content": content}], add_generation_prompt=False)
    assert prompt.ids.count(small_bpe.media_pad_id) == 1
    end = small_bpe.special_ids["<|end_of_msg|>"]
    assert prompt.ids.count(end) == 2
    assert typed in small_bpe.decode(prompt.ids)
    plain = processor.prompt([{"role": "user", "content": typed}])
    assert small_bpe.media_pad_id not in plain.ids


def test_a_model_without_eyes_refuses_pictures(small_bpe):
    blind = Processor(small_bpe)
    with pytest.raises(MessageError, match="1 images in the messages: this model takes only text"):
        blind.prompt([{"role": "user", "content": [image(RED)]}])
    assert blind.prompt([{"role": "user", "content": "Hi"}]).ids


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image"},
        {"type": "image_url", "image_url": {}},
        {"type": "image_url", "image": "x"},
        {"type": "image_url", "image_url": {"url": "http://example.com/a.png"}},
        {"type": "image", "image": "/etc/hostname"},
        {"type": "image", "image": b"broken"},
        {"type": "video", "video": "x"},
    ],
)
def test_pictures_that_cannot_be_used_are_value_errors(processor, part):
    with pytest.raises(ValueError):
        processor.prompt([{"role": "user", "content": [part]}])


def test_options_reach_the_rendering(processor):
    text = text_of(
        processor,
        [{"role": "user", "content": "Hi"}],
        tools=[{"name": "f"}],
        thinking=False,
        add_generation_prompt=True,
        tool_choice="none",
        response_format="json_schema",
        response_schema={"a": 1},
    )
    assert "# Tools" in text and "tool_choice=none" in text and '{"a":1}' in text
    assert text.endswith("<|open|>response<|sep|>")


def test_a_checkpoint_directory_is_loaded_with_or_without_eyes(tmp_path, small_bpe):
    small_bpe.save(tmp_path)
    assert Processor.load(tmp_path).images is None
    settings = {"media_proc_cfg": {"in_patch_limit": 64}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    loaded = Processor.load(str(tmp_path))
    assert loaded.images is not None and loaded.images.config.in_patch_limit == 64
    with pytest.raises(ValueError, match="has neither"):
        Processor.load(Path(tmp_path / "nothing"))
