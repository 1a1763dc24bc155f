"""A decoder that decodes nothing: how fast everything but the input could be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from raytrain.data.augment import Windows
from raytrain.data.decode import Pixels


@dataclass(frozen=True)
class SyntheticDecoder:
    """The same noise for every image; the JPEG files aren't looked at, so none need be read."""

    name: ClassVar[str] = "synthetic"
    reads: ClassVar[bool] = False
    in_worker: ClassVar[bool] = False

    def decode(
        self,
        jpegs: Sequence[bytes | memoryview],
        windows: Windows,  # noqa: ARG002 (the contract's)
        image_px: int,
    ) -> Pixels:
        """As `raytrain.data.decode.Decoder` says, but of pixels that mean nothing."""
        return np.broadcast_to(_noise(image_px), (len(jpegs), image_px, image_px, 3)).copy()


@lru_cache(maxsize=8)
def _noise(image_px: int) -> Pixels:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (image_px, image_px, 3), dtype=np.uint8)
