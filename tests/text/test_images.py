"""Pictures to patches: the golden pixels, the arithmetic of sizes, transparency, clips."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import load_file

from baltoro.text.images import ImageConfig, ImageProcessor

GOLDEN = Path(__file__).parents[1] / "golden" / "k3-vision-mini"
PROCESSOR = ImageProcessor()


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def pixels_of(source: Image.Image, processor: ImageProcessor = PROCESSOR) -> np.ndarray:
    """The processed picture as uint8 [height, width, 3], padding included."""
    patches, [[_, rows, columns]] = processor.process([source])
    image = patches.reshape(rows, columns, 3, 14, 14).transpose(0, 3, 1, 4, 2)
    return np.rint((image.reshape(rows * 14, columns * 14, 3) + 1) * 127.5).astype(np.uint8)


def test_golden_pictures_are_equal_to_the_bit():
    golden = load_file(GOLDEN / "golden.safetensors")
    processor = ImageProcessor.load(GOLDEN)
    pixel_values, grid_thws = processor.process([golden["image_0"], golden["image_1"]])
    assert pixel_values.dtype == np.float32 and grid_thws.dtype == np.int64
    assert (grid_thws == golden["grid_thws"][:2]).all()
    assert (pixel_values == golden["pixel_values"][:40]).all()


@pytest.mark.parametrize(
    ("size", "resized", "grid", "num_tokens"),
    [
        ((28, 28), (28, 28), (2, 2), 1),
        ((30, 16), (30, 16), (2, 4), 2),
        ((1, 1), (1, 1), (2, 2), 1),
        ((640, 480), (640, 480), (36, 46), 414),
        ((1000, 1000), (1000, 1000), (72, 72), 1296),
        ((896, 896), (896, 896), (64, 64), 1024),
        ((3584, 3584), (3584, 3584), (256, 256), 16384),
        ((8000, 100), (7168, 89), (8, 512), 1024),
        ((10, 20000), (3, 7168), (512, 2), 256),
        ((5000, 4000), (4012, 3210), (230, 288), 16560),
        ((10000, 10000), (3585, 3585), (258, 258), 16641),
        ((448, 449), (448, 449), (34, 32), 272),
    ],
)
def test_sizes_follow_the_release(size, resized, grid, num_tokens):
    assert PROCESSOR.resized(*size) == resized
    assert PROCESSOR.grid(*size) == grid
    assert PROCESSOR.num_tokens(*size) == num_tokens


@given(width=st.integers(1, 30_000), height=st.integers(1, 30_000))
def test_limits_hold_before_padding_and_nothing_is_enlarged(width, height):
    new_width, new_height = PROCESSOR.resized(width, height)
    assert 1 <= new_width <= min(width, 512 * 14) and 1 <= new_height <= min(height, 512 * 14)
    assert (new_width // 14) * (new_height // 14) <= 65536
    rows, columns = PROCESSOR.grid(width, height)
    assert 0 <= rows * 14 - new_height < 28 and 0 <= columns * 14 - new_width < 28
    assert max(rows, columns) <= 512


def test_every_picture_has_as_many_patches_as_its_tokens_say():
    rng = np.random.default_rng(1)
    sizes = [(448, 449), *rng.integers(1, 601, (20, 2)).tolist()]
    pictures = [Image.new("RGB", (width, height)) for width, height in sizes]
    pixel_values, grid_thws = PROCESSOR.process(pictures)
    assert len(pixel_values) == grid_thws.prod(axis=1).sum()
    for (width, height), grid in zip(sizes, grid_thws, strict=True):
        assert grid.prod() == 4 * PROCESSOR.num_tokens(width, height)


def test_padding_is_black_and_on_the_right_and_bottom():
    pixel_values, grid_thws = PROCESSOR.process([Image.new("RGB", (14, 14), "white")])
    assert grid_thws.tolist() == [[1, 2, 2]]
    assert (pixel_values[0] == 1).all() and (pixel_values[1:] == -1).all()


def test_patches_go_by_rows_and_hold_channels_first():
    pixels = np.zeros((28, 42, 3), dtype=np.uint8)
    pixels[20, 30] = (255, 0, 51)
    pixel_values, grid_thws = PROCESSOR.process([pixels])
    assert grid_thws.tolist() == [[1, 2, 4]]
    assert pixel_values[4 + 2, :, 6, 2] == pytest.approx([1.0, -1.0, -0.6])


def test_no_pictures_are_no_patches():
    pixel_values, grid_thws = PROCESSOR.process([])
    assert pixel_values.shape == (0, 3, 14, 14) and grid_thws.shape == (0, 3)


def test_a_transparent_picture_stands_on_a_chessboard():
    shown = pixels_of(Image.new("RGBA", (28, 28), (255, 0, 0, 0)))
    squares = np.add.outer(np.arange(28) // 8, np.arange(28) // 8) % 2
    assert (shown[:, :, 0] == np.where(squares, 180, 255)).all()
    half = pixels_of(Image.new("RGBA", (28, 28), (255, 0, 0, 128)))
    assert half[0, 0].tolist() == [255, 126, 126] and half[0, 8].tolist() == [217, 89, 89]


def test_the_chessboard_is_laid_after_the_resize():
    small = ImageProcessor(ImageConfig(in_patch_limit=4))
    shown = pixels_of(Image.new("RGBA", (112, 112), (0, 0, 0, 0)), small)
    assert shown.shape == (28, 28, 3)
    assert [shown[0, column, 0] for column in (0, 7, 8, 15, 16)] == [255, 255, 180, 180, 255]
    before = ImageProcessor(ImageConfig(in_patch_limit=4, fills_before_resize=True))
    blurred = pixels_of(Image.new("RGBA", (112, 112), (0, 0, 0, 0)), before)
    assert blurred[0, :4, 0].min() < 230 and blurred[0, 4:8, 0].min() < 230


def test_palettes_and_keyed_colours_may_be_transparent():
    palette = Image.new("P", (28, 28), 1)
    palette.putpalette([0, 0, 0, 9, 9, 9])
    assert (pixels_of(palette) == 9).all()
    palette.info["transparency"] = 1
    assert pixels_of(palette)[0, 0].tolist() == [255, 255, 255]
    grey = Image.new("L", (28, 28), 7)
    assert (pixels_of(grey) == 7).all()
    grey.info["transparency"] = 7
    assert pixels_of(grey)[0, 8].tolist() == [180, 180, 180]


def test_the_resize_is_bicubic_and_palettes_become_colours_before_it():
    small = ImageProcessor(ImageConfig(in_patch_limit=4))
    source = picture(112, 112)
    expected = np.asarray(source.resize((28, 28), Image.Resampling.BICUBIC))
    assert (pixels_of(source, small) == expected).all()
    palette = source.quantize(4)
    colours = palette.convert("RGBA").resize((28, 28), Image.Resampling.BICUBIC)
    assert (pixels_of(palette, small) == np.asarray(colours)[:, :, :3]).all()


def test_an_opaque_picture_is_the_same_in_any_mode():
    source = picture(60, 45)
    expected = pixels_of(source)
    assert (pixels_of(source.convert("RGBA")) == expected).all()


@pytest.mark.parametrize(
    ("background", "value"), [("white", 255), ("black", 0), ("gray", 128), (None, 50)]
)
def test_other_backgrounds(background, value):
    processor = ImageProcessor(ImageConfig(background=background))
    shown = pixels_of(Image.new("RGBA", (28, 28), (50, 50, 50, 0)), processor)
    assert (shown == value).all()


def test_a_clip_has_one_grid_and_the_tokens_of_a_frame():
    frames = [picture(56, 84, seed) for seed in range(2)]
    pixel_values, grid_thws = PROCESSOR.process([frames, frames[0]])
    assert grid_thws.tolist() == [[2, 6, 4], [1, 6, 4]]
    assert (pixel_values[:24] == pixel_values[48:]).all()
    assert (pixel_values[24:48] == PROCESSOR.process([frames[1]])[0]).all()
    assert PROCESSOR.num_tokens(56, 84, is_frame=True) == PROCESSOR.num_tokens(56, 84) == 6


def test_frames_have_a_limit_of_their_own():
    assert PROCESSOR.resized(3584, 3584) == (3584, 3584)
    assert PROCESSOR.resized(3584, 3584, is_frame=True) == (1792, 1792)


def test_odd_clips_are_refused():
    with pytest.raises(ValueError, match="clip of 5 frames"):
        PROCESSOR.process([[picture(28, 28)] * 5])
    with pytest.raises(ValueError, match="clip of 0 frames"):
        PROCESSOR.process([[]])
    with pytest.raises(ValueError, match="must all be the same"):
        PROCESSOR.process([[picture(28, 28), picture(28, 29)]])


def test_an_image_prompt_names_the_original_size():
    assert PROCESSOR.image_prompt(640, 480) == (
        "<|media_begin|>image 640x480<|media_content|><|media_pad|><|media_end|>"
    )
    assert PROCESSOR.image_prompt(1, 1, 3).count("<|media_pad|>") == 3
    with pytest.raises(ValueError, match="num_pads=0"):
        PROCESSOR.image_prompt(1, 1, 0)


RELEASED = {
    "patch_size": 14,
    "merge_kernel_size": 2,
    "in_patch_limit": 65536,
    "patch_limit_on_one_side": 512,
    "in_patch_limit_each_frame": 16384,
    "in_patch_limit_video": None,
    "fixed_output_tokens": None,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "sample_fps": 8.0,
    "temporal_merge_kernel_size": 4,
    "timestamp_mode": "hh:mm:ss.fff",
    "transparent_bg_config": {
        "pattern": "chessboard",
        "chessboard_square_size": 8,
        "chessboard_square_on_top_left": True,
        "chessboard_white_value": 255,
        "chessboard_gray_value": 180,
    },
    "transparent_bg_fill_stage": "after_resize",
    "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
}


def test_absent_keys_have_the_values_of_the_release():
    assert ImageConfig.read(RELEASED) == ImageConfig.read({}) == ImageConfig()
    assert ImageConfig.read({"merge_kernel_size": [2, 2]}) == ImageConfig()


def test_every_key_is_read():
    read = ImageConfig.read(
        {
            "patch_size": 7,
            "merge_kernel_size": [1, 3],
            "image_mean": [0.1, 0.2, 0.3],
            "transparent_bg_config": {"pattern": "white"},
            "transparent_bg_fill_stage": "before_resize",
        }
    )
    assert (read.patch_size, read.merge_height, read.merge_width) == (7, 1, 3)
    assert read.mean == (0.1, 0.2, 0.3) and read.background == "white"
    assert read.fills_before_resize
    assert ImageConfig.read({"transparent_bg_config": None}).background is None


@pytest.mark.parametrize(
    "changes",
    [
        {"patch_sise": 14},
        {"patch_size": 0},
        {"patch_size": "14"},
        {"merge_kernel_size": [2, 2, 2]},
        {"merge_kernel_size": [2, 0]},
        {"image_mean": [0.5]},
        {"image_std": [0.5, 0.5, 0]},
        {"fixed_output_tokens": 256},
        {"transparent_bg_config": {"pattern": "plaid"}},
        {"transparent_bg_config": {"colour": "white"}},
        {"transparent_bg_config": {"chessboard_gray_value": 300}},
        {"transparent_bg_fill_stage": "never"},
    ],
)
def test_unknown_keys_and_odd_values_are_refused_by_name(tmp_path, changes):
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps({"media_proc_cfg": {**RELEASED, **changes}}))
    with pytest.raises(ValueError, match=r"preprocessor_config\.json: "):
        ImageProcessor.load(tmp_path)


@pytest.mark.parametrize("content", ["{}", '{"media_proc_cfg": 3}', "{", ""])
def test_a_file_without_its_settings_is_refused(tmp_path, content):
    (tmp_path / "preprocessor_config.json").write_text(content)
    with pytest.raises(ValueError, match=r"preprocessor_config\.json"):
        ImageProcessor.load(tmp_path)


@pytest.mark.slow
def test_a_very_large_picture_is_scaled_down():
    pixel_values, grid_thws = PROCESSOR.process([Image.new("L", (10_000, 10_000), 128)])
    assert grid_thws.tolist() == [[1, 258, 258]] and len(pixel_values) == 258 * 258
