"""Pictures to patches, as the release's kimi_k3_vision_processing.py does it.

A picture of w x h pixels is never enlarged: scale = min(1, sqrt(in_patch_limit / (w//14 * h//14)),
512*14 / w, 512*14 / h). It is resized straight to that size (Pillow, bicubic), padded right and
bottom with zeros to multiples of 28, brought to [-1, 1], and cut into patches of 14 x 14, row by
row. Four patches become one token, so padding costs tokens, and the limits can be passed by it.

Clips are not in the release's processor; up to four frames make one clip with grid (t, h, w) and
the tokens of a single frame, as in K2.5-style code.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from PIL import Image

from baltoro.text.files import read_json
from baltoro.text.markers import MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END, MEDIA_PAD
from baltoro.text.pictures import Picture, open_picture

CONFIG_FILE = "preprocessor_config.json"

Clip: TypeAlias = Sequence[Picture]
Background = Literal["chessboard", "white", "black", "gray"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageConfig:
    """`media_proc_cfg` of a checkpoint; an absent key has the value of the release."""

    patch_size: int = 14
    merge_height: int = 2  # patches that one token covers
    merge_width: int = 2
    in_patch_limit: int = 65536  # of a picture, before padding
    in_patch_limit_each_frame: int = 16384  # of a frame in a clip
    patch_limit_on_one_side: int = 512
    max_frames: int = 4  # of a clip
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    background: Background | None = "chessboard"  # behind transparency; None drops alpha
    fills_before_resize: bool = False
    square_size: int = 8  # pixels, of the chessboard
    white_on_top_left: bool = True
    white_value: int = 255
    gray_value: int = 180

    @classmethod
    def read(cls, media_proc_cfg: Mapping[str, Any]) -> "ImageConfig":
        """From the release's keys. Raises `ValueError` for an unknown key or an odd value."""
        values: dict[str, Any] = {}
        for key, value in media_proc_cfg.items():
            if key in _FIELD_OF:
                values[_FIELD_OF[key]] = value
            elif key == "merge_kernel_size":
                values["merge_height"], values["merge_width"] = _pair(key, value)
            elif key in ("image_mean", "image_std"):
                values[key.removeprefix("image_")] = _triple(key, value)
            elif key == "transparent_bg_config":
                values |= _background(value)
            elif key == "transparent_bg_fill_stage":
                if value not in ("before_resize", "after_resize"):
                    raise ValueError(f"{key}={value!r}: must be 'before_resize' or 'after_resize'")
                values["fills_before_resize"] = value == "before_resize"
            elif key == "fixed_output_tokens" and value is not None:
                raise ValueError(f"{key}={value!r}: only null is supported")
            elif key not in _NOT_READ:
                raise ValueError(f"media_proc_cfg.{key}={value!r}: unknown key; remove it")
        return cls(**values)

    def __post_init__(self) -> None:
        for name in (
            *("patch_size", "merge_height", "merge_width", "in_patch_limit", "max_frames"),
            *("in_patch_limit_each_frame", "patch_limit_on_one_side", "square_size"),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"image {name}={value!r}: must be a positive integer")
        for name in ("white_value", "gray_value"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 <= value <= 255:
                raise ValueError(f"image {name}={value!r}: must be an integer in 0 .. 255")
        if self.background is not None and self.background not in get_args(Background):
            raise ValueError(f"image background={self.background!r}: unknown pattern")
        if min(self.std) <= 0:
            raise ValueError(f"image std={self.std!r}: must be positive")


class ImageProcessor:
    """Pictures and clips to the patches and grids that the vision tower takes."""

    def __init__(self, config: ImageConfig | None = None) -> None:
        self.config = config or ImageConfig()

    @classmethod
    def load(cls, directory: Path | str) -> "ImageProcessor":
        """From `preprocessor_config.json`. Raises `ValueError` naming what is wrong in it."""
        path = Path(directory) / CONFIG_FILE
        media_proc_cfg = read_json(path).get("media_proc_cfg")
        if not isinstance(media_proc_cfg, dict):
            raise ValueError(f"{path}: media_proc_cfg={media_proc_cfg!r}; must be an object")
        try:
            return cls(ImageConfig.read(media_proc_cfg))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def process(self, pictures: Sequence[Picture | Clip]) -> tuple[np.ndarray, np.ndarray]:
        """`pixel_values` float32 [I, 3, 14, 14] and `grid_thws` int64 [number of pictures, 3].

        A grid is (frames, rows, columns) of patches; `I` is the sum of their products. Patches
        follow one another by picture, frame, row and column. A list of pictures is a clip.

        Raises `ValueError` for a picture that cannot be read, a clip that is too long, or frames of
        unequal sizes.
        """
        patches_I, grids = [], []
        for picture in pictures:
            frames = _frames(picture)
            self._check_clip(frames)
            is_frame = len(frames) > 1
            patches_I += [self._patches(frame, is_frame) for frame in frames]
            grids.append((len(frames), *self.grid(*frames[0].size, is_frame=is_frame)))
        patch = self.config.patch_size
        if not grids:
            empty = np.zeros((0, 3, patch, patch), dtype=np.float32)
            return empty, np.zeros((0, 3), dtype=np.int64)
        return np.concatenate(patches_I), np.array(grids, dtype=np.int64)

    def resized(self, width: int, height: int, *, is_frame: bool = False) -> tuple[int, int]:
        """Pixels (w, h) to which a picture is scaled, before padding."""
        config = self.config
        if width < 1 or height < 1:
            raise ValueError(f"image of {width}x{height} pixels: is empty")
        patch, limit = config.patch_size, config.in_patch_limit
        if is_frame:
            limit = config.in_patch_limit_each_frame
        longest = config.patch_limit_on_one_side * patch
        num_patches = max(1, width // patch) * max(1, height // patch)
        scale = min(1.0, math.sqrt(limit / num_patches), longest / width, longest / height)
        return (
            min(longest, max(1, int(width * scale))),
            min(longest, max(1, int(height * scale))),
        )

    def grid(self, width: int, height: int, *, is_frame: bool = False) -> tuple[int, int]:
        """Rows and columns of patches of a picture, padding included."""
        config = self.config
        new_width, new_height = self.resized(width, height, is_frame=is_frame)
        return (
            -(-new_height // (config.patch_size * config.merge_height)) * config.merge_height,
            -(-new_width // (config.patch_size * config.merge_width)) * config.merge_width,
        )

    def num_tokens(self, width: int, height: int, *, is_frame: bool = False) -> int:
        """Tokens of a picture, or of a clip of such frames: its frames are averaged."""
        rows, columns = self.grid(width, height, is_frame=is_frame)
        return rows * columns // (self.config.merge_height * self.config.merge_width)

    @staticmethod
    def image_prompt(width: int, height: int, num_pads: int = 1) -> str:
        """Text of a picture in a prompt; the size is the original one.

        The release writes one pad, which its model expands; engines write `num_tokens` pads.
        """
        if num_pads < 1:
            raise ValueError(f"num_pads={num_pads}: an image has at least one")
        head = f"{MEDIA_BEGIN}image {width}x{height}{MEDIA_CONTENT}"
        return head + MEDIA_PAD * num_pads + MEDIA_END

    def _patches(self, picture: Image.Image, is_frame: bool) -> np.ndarray:
        """One picture as float32 [rows * columns, 3, 14, 14]."""
        config = self.config
        patch = config.patch_size
        size = self.resized(*picture.size, is_frame=is_frame)
        rows, columns = self.grid(*picture.size, is_frame=is_frame)
        if config.fills_before_resize:
            picture = self._without_alpha(picture)
        elif picture.mode == "P":
            picture = picture.convert("RGBA")
        picture = self._without_alpha(picture.resize(size, Image.Resampling.BICUBIC))
        canvas = np.zeros((rows * patch, columns * patch, 3), dtype=np.uint8)
        canvas[: size[1], : size[0]] = np.asarray(picture)
        cut = canvas.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
        patches = cut.astype(np.float32, order="C")
        patches /= np.float32(255.0)
        for channel, (mean, std) in enumerate(zip(config.mean, config.std, strict=True)):
            patches[:, :, channel] -= np.float32(mean)
            patches[:, :, channel] /= np.float32(std)
        return patches.reshape(-1, 3, patch, patch)

    def _without_alpha(self, picture: Image.Image) -> Image.Image:
        has_alpha = "A" in picture.getbands() or "transparency" in picture.info
        if picture.mode == "RGB" or not has_alpha or self.config.background is None:
            return picture.convert("RGB")
        rgba = np.asarray(picture.convert("RGBA"), dtype=np.float32)
        alpha = rgba[:, :, 3:] / np.float32(255.0)
        background = self._background(picture.height, picture.width)
        blended = alpha * rgba[:, :, :3] + (1 - alpha) * background
        return Image.fromarray(blended.astype(np.uint8))

    def _background(self, height: int, width: int) -> np.ndarray:
        """What shows through, uint8 [height, width, 1]."""
        config = self.config
        if config.background != "chessboard":
            value = {"white": 255, "black": 0, "gray": 128}[config.background or "black"]
            return np.full((height, width, 1), value, dtype=np.uint8)
        squares = np.add.outer(
            np.arange(height) // config.square_size, np.arange(width) // config.square_size
        )
        is_gray = squares % 2 == int(config.white_on_top_left)
        board = np.where(is_gray, config.gray_value, config.white_value).astype(np.uint8)
        return board[:, :, None]

    def _check_clip(self, frames: Sequence[Image.Image]) -> None:
        if not 1 <= len(frames) <= self.config.max_frames:
            raise ValueError(
                f"clip of {len(frames)} frames: must have 1 to {self.config.max_frames}"
            )
        sizes = {frame.size for frame in frames}
        if len(sizes) > 1:
            raise ValueError(f"clip with frames of sizes {sorted(sizes)}: must all be the same")


_FIELD_OF = {
    "patch_size": "patch_size",
    "in_patch_limit": "in_patch_limit",
    "in_patch_limit_each_frame": "in_patch_limit_each_frame",
    "patch_limit_on_one_side": "patch_limit_on_one_side",
    "temporal_merge_kernel_size": "max_frames",
}
# Keys of the release that pictures do not need: sampling of videos, and names.
_NOT_READ = (
    *("config_type", "fixed_output_tokens", "in_patch_limit_video"),
    *("sample_fps", "timestamp_mode"),
)
_BACKGROUND_FIELD_OF = {
    "pattern": "background",
    "chessboard_square_size": "square_size",
    "chessboard_square_on_top_left": "white_on_top_left",
    "chessboard_white_value": "white_value",
    "chessboard_gray_value": "gray_value",
}


def _background(config: Any) -> dict[str, Any]:
    if config is None:
        return {"background": None}
    if not isinstance(config, dict) or not set(config) <= set(_BACKGROUND_FIELD_OF):
        known = ", ".join(_BACKGROUND_FIELD_OF)
        raise ValueError(f"transparent_bg_config={config!r}: must be null or have only {known}")
    return {_BACKGROUND_FIELD_OF[key]: value for key, value in config.items()}


def _pair(key: str, value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    if isinstance(value, (list, tuple)) and len(value) == 2:
        return value[0], value[1]
    raise ValueError(f"{key}={value!r}: must be an integer or a pair of them")


def _triple(key: str, value: Any) -> tuple[float, float, float]:
    is_list = isinstance(value, (list, tuple)) and len(value) == 3
    if not is_list or not all(isinstance(item, (int, float)) for item in value):
        raise ValueError(f"{key}={value!r}: must be three numbers")
    return value[0], value[1], value[2]


def _frames(picture: Picture | Clip) -> list[Image.Image]:
    if isinstance(picture, (list, tuple)):
        return [open_picture(frame) for frame in picture]
    return [open_picture(picture)]  # type: ignore[arg-type]
