"""Decoding on the CPU: simplejpeg (libjpeg-turbo) decodes, OpenCV resizes.

The fastest well-kept pair by measurement; ``raytrain bench input`` shows the margins. Neither
holds the interpreter lock, so threads decode in parallel. Decoding at half size where the window
is twice the result was 12 % faster at best and doubled the error against torchvision, so it isn't
done: a smaller prepared size gains several times that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import cv2
import numpy as np
import simplejpeg

from raytrain.data.augment import Windows
from raytrain.data.decode import DamagedImageError, Pixels

cv2.setNumThreads(0)  # parallel by images, not inside one

_ANTIALIAS_FROM = 1.1  # shrunk by less, bilinear is as close to an antialiased resize, and faster


@dataclass(frozen=True)
class CpuDecoder:
    """simplejpeg and OpenCV, one image after another on the calling thread."""

    name: ClassVar[str] = "cpu"
    reads: ClassVar[bool] = True
    in_worker: ClassVar[bool] = False

    def decode(
        self, jpegs: Sequence[bytes | memoryview], windows: Windows, image_px: int
    ) -> Pixels:
        """As `raytrain.data.decode.Decoder` says."""
        return self.decode_to((image_px, image_px), jpegs, windows)

    def decode_to(
        self, shape: tuple[int, int], jpegs: Sequence[bytes | memoryview], windows: Windows
    ) -> Pixels:
        """The same for any (height, width); gives (n, height, width, 3)."""
        out = np.empty((len(jpegs), *shape, 3), dtype=np.uint8)
        top, left = windows.top.tolist(), windows.left.tolist()
        bottom = (windows.top + windows.height).tolist()
        right = (windows.left + windows.width).tolist()
        flip = windows.flip.tolist()
        for i, jpeg in enumerate(jpegs):
            try:
                image = simplejpeg.decode_jpeg(jpeg, colorspace="RGB")
            except ValueError as error:
                raise DamagedImageError(i, str(error)) from error
            _resize(image[top[i] : bottom[i], left[i] : right[i]], out[i])
            if flip[i]:
                cv2.flip(out[i], 1, dst=out[i])
        return out


def _resize(crop: Pixels, out: Pixels) -> None:
    """Resize into ``out``: averaging areas where the crop shrinks, else bilinear."""
    factors = (crop.shape[0] / out.shape[0], crop.shape[1] / out.shape[1])
    shrinks = min(factors) >= 1 and max(factors) > _ANTIALIAS_FROM
    how = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    cv2.resize(crop, (out.shape[1], out.shape[0]), dst=out, interpolation=how)
