from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torchvision.transforms import RandomResizedCrop

from raytrain.data.augment import (
    CropRule,
    Windows,
    centre_rectangles,
    centre_windows,
    random_windows,
    rectangle_shapes,
)

RULE = CropRule((0.08, 1.0), (3 / 4, 4 / 3), flip=True)


def windows_of(rows: NDArray[np.int64], width: int, height: int, epoch: int = 0) -> Windows:
    n = len(rows)
    return random_windows(RULE, 0, epoch, rows, (np.full(n, width), np.full(n, height)))


@pytest.mark.parametrize(("width", "height"), [(500, 375), (160, 400), (1000, 40), (1, 1)])
def test_windows_are_distributed_as_torchvisions(width: int, height: int) -> None:
    ours = windows_of(np.arange(4000), width, height)
    assert (ours.top >= 0).all()
    assert (ours.top + ours.height <= height).all()
    assert (ours.left >= 0).all()
    assert (ours.left + ours.width <= width).all()
    torch.manual_seed(0)
    image = torch.empty(3, height, width)
    theirs = np.array(
        [RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(4000)]
    )
    for mine, other in zip((ours.top, ours.left, ours.height, ours.width), theirs.T, strict=True):
        spread = 5 * other.std() / np.sqrt(4000) + 1e-9  # five standard errors
        assert mine.mean() == pytest.approx(other.mean(), abs=2 * spread)
        assert mine.std() == pytest.approx(other.std(), rel=0.06, abs=1e-9)
    assert ours.flip.mean() == pytest.approx(0.5, abs=0.04)


def test_a_window_depends_on_seed_epoch_and_row_only() -> None:
    alone = windows_of(np.array([17]), 300, 200)
    among = windows_of(np.array([3, 99, 17]), 300, 200)
    for name in Windows.__slots__:
        assert getattr(alone, name)[0] == getattr(among, name)[2]
    later = windows_of(np.arange(50), 300, 200, epoch=1)
    assert (later.top != windows_of(np.arange(50), 300, 200).top).mean() > 0.8


def test_no_flip_where_the_rule_has_none() -> None:
    rule = CropRule((0.5, 1.0), (1.0, 1.0), flip=False)
    n = np.full(200, 64)
    assert not random_windows(rule, 0, 0, np.arange(200), (n, n)).flip.any()


def test_centre_windows() -> None:
    windows = centre_windows(0.875, (np.array([512, 256]), np.array([256, 300])))
    assert windows.height.tolist() == windows.width.tolist() == [224, 224]
    assert windows.left.tolist() == [144, 16]
    assert windows.top.tolist() == [16, 38]


@pytest.mark.parametrize("image_px", [24, 64, 100, 288])
def test_rectangles_keep_the_aspect_ratio_within_half_a_unit(image_px: int) -> None:
    rng = np.random.default_rng(1)
    widths, heights = (rng.integers(image_px, 4 * image_px, 500) for _ in range(2))
    shapes = rectangle_shapes(image_px, (widths, heights))
    short, long = np.minimum(*shapes), np.maximum(*shapes)
    assert (short == image_px).all()
    assert (widths > heights)[shapes[1] > shapes[0]].all()
    assert (widths < heights)[shapes[1] < shapes[0]].all()
    ratio = np.maximum(widths, heights) / np.minimum(widths, heights)
    unit = -(-image_px // 64) * 8
    within = ratio < long.max() / image_px
    assert (np.abs(long - image_px * ratio)[within] <= unit / 2 + 1e-9).all()
    assert (long <= 2 * image_px).all()
    assert len(set(long.tolist())) <= 9


def test_rectangle_windows_are_centred_and_of_their_shapes_ratio() -> None:
    sizes = (np.array([500, 375, 400, 90]), np.array([375, 500, 400, 900]))
    shapes = rectangle_shapes(64, sizes)
    assert list(zip(*(s.tolist() for s in shapes), strict=True)) == [
        (64, 88),
        (88, 64),
        (64, 64),
        (128, 64),
    ]
    windows = centre_rectangles(0.875, sizes, shapes)
    assert not windows.flip.any()
    np.testing.assert_allclose(windows.width / windows.height, shapes[1] / shapes[0], rtol=0.01)
    for start, side, whole in (
        (windows.top, windows.height, sizes[1]),
        (windows.left, windows.width, sizes[0]),
    ):
        assert (np.abs(2 * start + side - whole) <= 1).all()
        assert (side <= np.ceil(whole * 0.875)).all()
    # the first shape is a little wider than its image; a square is what it always was
    assert (windows.width[0], windows.height[0]) == (438, 318)
    square = centre_windows(0.875, sizes)
    assert (windows.width[2], windows.height[2]) == (square.width[2], square.height[2])
