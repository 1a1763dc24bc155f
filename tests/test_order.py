from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain.data.order import BlockLayout, Order
from raytrain.recipe.plan import share

block_sizes = st.lists(st.integers(1, 20), min_size=1, max_size=30)


def layout_of(sizes: list[int]) -> BlockLayout:
    return BlockLayout(tuple(np.cumsum([0, *sizes]).tolist()))


@settings(max_examples=60, deadline=None)
@given(block_sizes, st.integers(0, 2**62), st.integers(1, 40), st.integers(1, 50))
def test_an_epoch_is_a_permutation_however_it_is_cut(
    sizes: list[int], seed: int, window: int, step: int
) -> None:
    order = Order(layout_of(sizes), seed, window)
    total = sum(sizes)
    rows = np.concatenate(
        [order.step_rows(5, at, min(step, total - at)) for at in range(0, total, step)]
    )
    assert sorted(rows) == list(range(total))


@given(block_sizes, st.integers(0, 100))
def test_a_step_is_the_same_set_however_much_was_asked_at_once(sizes: list[int], seed: int) -> None:
    order = Order(layout_of(sizes), seed, 4)
    total, half = sum(sizes), sum(sizes) // 2
    whole = order.step_rows(0, 0, total)
    parts = [order.step_rows(0, a, b - a) for a, b in ((0, half), (half, total)) if b > a]
    assert sorted(whole) == sorted(np.concatenate(parts))


def test_every_epoch_and_seed_has_another_order() -> None:
    layout = layout_of([16] * 40)
    first = Order(layout, 0, 8)
    orders = [first.step_rows(epoch, 0, 100).tolist() for epoch in range(20)]
    orders.append(Order(layout, 1, 8).step_rows(0, 0, 100).tolist())
    assert len({tuple(order) for order in orders}) == 21


def test_the_order_survives_pickling() -> None:
    order = Order(layout_of([5] * 9), 3, 4)
    again = pickle.loads(pickle.dumps(order))
    assert again.step_rows(2, 7, 11).tolist() == order.step_rows(2, 7, 11).tolist()


def test_a_step_mixes_blocks_from_all_over_the_set() -> None:
    """A step of 64 draws from about 64 of the window's 64 blocks, spread over the whole set."""
    layout = layout_of([64] * 1000)
    order = Order(layout, 0, 64)
    for epoch in range(5):
        blocks = layout.block_of(order.step_rows(epoch, 640, 64))
        assert len(np.unique(blocks)) > 40
        assert np.std(blocks) == pytest.approx(1000 / np.sqrt(12), rel=0.25)  # uniform
    pairs = _neighbours(order, 0) & _neighbours(order, 1)
    assert len(pairs) <= 3  # of 320: images that were together aren't again, but by chance


def _neighbours(order: Order, epoch: int) -> set[tuple[int, int]]:
    steps = [sorted(order.step_rows(epoch, at, 2).tolist()) for at in range(0, 640, 2)]
    return {(a, b) for a, b in steps}


def test_workers_divide_a_window_by_blocks() -> None:
    """Over a window each of 8 workers reads about an eighth of its blocks, not all of them."""
    layout = layout_of([64] * 256)
    order = Order(layout, 0, 64)
    for rank in range(8):
        read: set[int] = set()
        for at in range(0, 64 * 64, 128):
            offset, size = share(128, rank, 8)
            rows = order.step_rows(0, at, 128)[offset : offset + size]
            read |= set(layout.block_of(rows).tolist())
        assert len(read) <= 64 / 8 + 2


def test_positions_outside_the_epoch_are_refused() -> None:
    order = Order(layout_of([4, 4]), 0, 2)
    for first, count in ((-1, 2), (7, 2), (0, 0)):
        with pytest.raises(IndexError):
            order.step_rows(0, first, count)
