"""JPEG bytes and a crop window -> uint8 pixels, on the CPU.

simplejpeg (libjpeg-turbo) decodes, OpenCV resizes: area averaging when shrinking, which is the
antialiased filter that costs least, and bilinear when enlarging. Neither holds the interpreter
lock, so threads decode in parallel.
"""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray

from raytrain.data.augment import Windows

Pixels = NDArray[np.uint8]

cv2.setNumThreads(0)  # parallel by images, not inside one


def decode_crops(jpegs: Sequence[bytes | memoryview], windows: Windows, image_px: int) -> Pixels:
    """Decode each JPEG, cut its window and resize that to a square.

    Args:
        jpegs: n baseline or progressive JPEG files, grey or YCbCr (a ShardSet holds no other).
        windows: n windows in pixels of the decoded images.
        image_px: side of the result.

    Returns:
        uint8, shape (n, image_px, image_px, 3), RGB.

    Raises:
        ValueError: a JPEG can't be decoded, with its position in ``jpegs``.
    """
    out = np.empty((len(jpegs), image_px, image_px, 3), dtype=np.uint8)
    for i, jpeg in enumerate(jpegs):
        try:
            image = simplejpeg.decode_jpeg(jpeg, colorspace="RGB")
        except ValueError as error:
            raise ValueError(f"image {i} of {len(jpegs)}: {error}") from error
        top, left = int(windows.top[i]), int(windows.left[i])
        height, width = int(windows.height[i]), int(windows.width[i])
        crop = image[top : top + height, left : left + width]
        if windows.flip[i]:
            crop = crop[:, ::-1]
        out[i] = _resize(crop, image_px)
    return out


def _resize(crop: Pixels, image_px: int) -> Pixels:
    shrinks = crop.shape[0] >= image_px and crop.shape[1] >= image_px
    how = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    resized = cv2.resize(crop, (image_px, image_px), interpolation=how)
    return np.asarray(resized, dtype=np.uint8)
