"""Crop windows and flips from (seed, epoch, row). Pure: numpy only.

The random numbers of an image depend on the seed, the epoch and the row alone, never on the
worker that happens to read it, so a step's pixels are the same for every number of workers and
after every resume.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raytrain.data.hashing import uniforms

Ints = NDArray[np.int64]

_TRIES = 10  # as torchvision's RandomResizedCrop


@dataclass(frozen=True, slots=True)
class Windows:
    """One crop window an image: int64 arrays and a bool array, all of shape (n,), in pixels."""

    top: Ints
    left: Ints
    height: Ints
    width: Ints
    flip: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class CropRule:
    """The distribution that random windows are drawn from.

    Attributes:
        area: (low, high) share of the image's area, uniform.
        aspect: (low, high) width over height, uniform in its logarithm.
        flip: whether half of the images are mirrored left to right.
    """

    area: tuple[float, float]
    aspect: tuple[float, float]
    flip: bool


def random_windows(
    rule: CropRule, seed: int, epoch: int, rows: Ints, sizes: tuple[Ints, Ints]
) -> Windows:
    """RandomResizedCrop windows (Szegedy et al. 2014; the procedure is torchvision's).

    Args:
        rule: the distribution.
        seed: the recipe's seed.
        epoch: 0-based.
        rows: row numbers of the images, shape (n,).
        sizes: (widths, heights) of the images in pixels, each of shape (n,).
    """
    width, height = (s.astype(np.float64) for s in sizes)
    u = uniforms(seed, epoch, rows, 2 * _TRIES + 3)
    area = width[:, None] * height[:, None] * _between(rule.area, u[:, :_TRIES])
    low, high = np.log(rule.aspect[0]), np.log(rule.aspect[1])
    aspect = np.exp(_between((low, high), u[:, _TRIES : 2 * _TRIES]))
    w = np.rint(np.sqrt(area * aspect))
    h = np.rint(np.sqrt(area / aspect))
    fits = (w >= 1) & (h >= 1) & (w <= width[:, None]) & (h <= height[:, None])
    try_ = np.argmax(fits, axis=1)
    n = np.arange(len(rows))
    w, h = w[n, try_], h[n, try_]
    none = ~fits[n, try_]
    if none.any():  # the largest centred window of an allowed aspect
        ratio = np.clip(width / height, *rule.aspect)
        w = np.where(none, np.maximum(1, np.rint(np.minimum(width, height * ratio))), w)
        h = np.where(none, np.maximum(1, np.rint(np.minimum(height, width / ratio))), h)
    top = np.floor(u[:, -3] * (height - h + 1))
    left = np.floor(u[:, -2] * (width - w + 1))
    top = np.where(none, (height - h) // 2, top)
    left = np.where(none, (width - w) // 2, left)
    flip = (u[:, -1] < 0.5) & rule.flip
    return Windows(_ints(top), _ints(left), _ints(h), _ints(w), flip)


def centre_windows(crop_ratio: float, sizes: tuple[Ints, Ints]) -> Windows:
    """The centred square whose side is ``crop_ratio`` of the short side.

    The same as resizing the short side to ``image_px / crop_ratio`` and taking the centre
    ``image_px`` square (224 of 256 is a ratio of 0.875).
    """
    width, height = sizes
    side = np.maximum(1, np.rint(np.minimum(width, height) * crop_ratio)).astype(np.int64)
    no_flip = np.zeros(len(side), dtype=np.bool_)
    return Windows((height - side) // 2, (width - side) // 2, side, side, no_flip)


def rectangle_shapes(image_px: int, sizes: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
    """The pixels that images keep their aspect ratio in: fast.ai's rectangular validation.

    The short side has ``image_px`` pixels; the long side is the one of a few lengths that is next
    to the image's own ratio, so that many images share a shape and go through the model together:
    multiples of an eighth of ``image_px`` (rounded up to whole 8s), at most twice ``image_px``.
    An image's shape depends on no other image.

    Args:
        image_px: the short side.
        sizes: (widths, heights) of the images in pixels, each of shape (n,).

    Returns:
        (heights, widths), each of shape (n,).
    """
    width, height = sizes
    ratio = np.maximum(width, height) / np.minimum(width, height)
    unit = -(-image_px // 64) * 8
    longer = np.rint(image_px * (ratio - 1) / unit) * unit
    long = image_px + _ints(np.clip(longer, 0, image_px // unit * unit))
    short = np.full_like(long, image_px)
    lies = width > height
    return np.where(lies, short, long), np.where(lies, long, short)


def centre_rectangles(
    crop_ratio: float, sizes: tuple[Ints, Ints], shapes: tuple[Ints, Ints]
) -> Windows:
    """The largest centred windows of some shapes' aspect ratios, inside ``crop_ratio`` of both
    sides of their images.

    Args:
        crop_ratio: share of each side, in (0, 1].
        sizes: (widths, heights) of the images in pixels, each of shape (n,).
        shapes: (heights, widths) that the windows will be resized to, each of shape (n,).
    """
    width, height = sizes
    scale = np.minimum(width / shapes[1], height / shapes[0]) * crop_ratio
    w = np.maximum(1, _ints(np.rint(shapes[1] * scale)))
    h = np.maximum(1, _ints(np.rint(shapes[0] * scale)))
    return Windows((height - h) // 2, (width - w) // 2, h, w, np.zeros(len(w), dtype=np.bool_))


def _ints(a: NDArray[np.float64]) -> Ints:
    return a.astype(np.int64)


def _between(ends: tuple[float, float], u: NDArray[np.float64]) -> NDArray[np.float64]:
    return ends[0] + (ends[1] - ends[0]) * u
