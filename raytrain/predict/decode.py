"""What reading and decoding an image costs a core, from `raytrain bench input`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from raytrain.errors import RaytrainError
from raytrain.predict.constants import (
    ASPECT,
    NS_PER_CROP_PIXEL,
    NS_PER_STORED_PIXEL,
    STORED_BYTES,
    STREAM_SHARE,
)

MARGIN: Final = 1.14
"""As in `ShardSet.size_for`: training at s pixels reads images of a short side >= 1.14 s."""

_OURS: Final = "raytrain cpu"


def stored_px(image_px: int) -> int:
    """Short side, in pixels, of the stored images that training at `image_px` reads."""
    return next((size for size in STORED_BYTES if size >= MARGIN * image_px), max(STORED_BYTES))


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """CPU time of an image: the stored image is decoded whole, the crop is resized.

    Attributes:
        ns_per_stored_pixel: nanoseconds of a core for a pixel of the stored image.
        ns_per_crop_pixel: the same for a pixel of the crop that the network sees.
    """

    ns_per_stored_pixel: float
    ns_per_crop_pixel: float

    def seconds(self, image_px: int) -> float:
        """Core seconds of an image for training at `image_px`, the stream's share included."""
        stored = self.ns_per_stored_pixel * _area(stored_px(image_px))
        return (stored + self.ns_per_crop_pixel * image_px**2) / 1e9 / STREAM_SHARE

    @classmethod
    def fit(cls, measured: Iterable[tuple[int, int, float]]) -> DecodeCost:
        """Least squares of the relative error over (stored px, image px, images/s of a core)."""
        rows = np.array([(_area(size), px**2, rate) for size, px, rate in measured])
        weighted = rows[:, :2] * rows[:, 2:] / 1e9
        stored, crop = np.linalg.lstsq(weighted, np.ones(len(rows)), rcond=None)[0]
        return cls(float(stored), float(crop))

    @classmethod
    def read(cls, path: Path) -> DecodeCost:
        """From what `raytrain bench input --json` wrote; RaytrainError where it isn't that."""
        try:
            rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
            cases = [(row["case"], float(row["images_per_s"]["median"])) for row in rows]
            ours = [
                (int(case["size"]), int(case["image_px"]), rate)
                for case, rate in cases
                if case["what"] == _OURS and case["size"] != "original"
            ]
        except OSError as error:
            raise RaytrainError(f"{path}: can't be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise RaytrainError(
                f"{path}: not what `raytrain bench input --json` writes; write it anew"
            ) from error
        if len(ours) < 2:
            raise RaytrainError(
                f"{path}: fewer than two measurements of {_OURS!r}; measure with --sizes 160,256"
            )
        return cls.fit(ours)


MEASURED: Final = DecodeCost(NS_PER_STORED_PIXEL, NS_PER_CROP_PIXEL)
"""Without a measurement of the user's."""


def _area(short_side: int) -> float:
    return ASPECT * short_side**2
