"""The contract of all decoders: JPEG files and crop windows -> uint8 pixels.

Every decoder gives the same crops, from windows that are drawn elsewhere (augment.py), so which
one a worker uses is a matter of speed. Pixels differ by rounding and by the resizing filter: on
ImageNet files the decoders here differ from torchvision's antialiased crop of the same window by
less than 1 of 255 levels on average, and by less than 5 in the worst image, at the sizes that
training reads (tests/test_decode.py holds them to that).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from raytrain.data.augment import Windows

Pixels = NDArray[np.uint8]


class DamagedImageError(ValueError):
    """An image can't be decoded.

    Attributes:
        position: its position among the images that were given.
    """

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(f"image {position}: {reason}")
        self.position = position


class Decoder(Protocol):
    """Decodes, cuts and resizes. Picklable, and safe to call from several threads at once."""

    @property
    def name(self) -> str:
        """What a recipe calls it."""

    @property
    def reads(self) -> bool:
        """Whether it looks at the JPEG files at all."""

    @property
    def in_worker(self) -> bool:
        """Whether it needs the training worker's GPU, so must run in the worker's own process."""

    def decode(
        self, jpegs: Sequence[bytes | memoryview], windows: Windows, image_px: int
    ) -> Pixels:
        """Decode each JPEG, cut its window, resize that to a square and mirror it where asked.

        Args:
            jpegs: n baseline or progressive JPEG files, grey or YCbCr (a ShardSet holds no other).
            windows: n windows in pixels of the decoded images, each inside its image.
            image_px: side of the result.

        Returns:
            uint8, shape (n, image_px, image_px, 3), RGB, in host memory.

        Raises:
            DamagedImageError: a JPEG can't be decoded.
        """
