"""The plan: each image once an epoch, in even steps, and arithmetic that agrees with itself."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain.errors import RaytrainError
from raytrain.recipe.load import recipe_from_dict
from raytrain.recipe.plan import Plan, share


def make_plan(
    num_images: int, *phases: tuple[int, int], every_epochs: int = 1, lr: object = 0.1
) -> Plan:
    """Plan phases of (epochs, batch), where phase i has images of 8 (i + 1) px."""
    recipe = recipe_from_dict(
        {
            "model": {"name": "any"},
            "phases": [
                {"epochs": epochs, "image_px": 8 * (i + 1), "batch": batch}
                for i, (epochs, batch) in enumerate(phases)
            ],
            "schedule": {"lr": lr},
            "validation": {"every_epochs": every_epochs},
        }
    )
    return Plan(recipe, num_images)


phase_lists = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 80)), min_size=1, max_size=3)
plans = st.builds(
    lambda num_images, phases, every: make_plan(num_images, *phases, every_epochs=every),
    st.integers(1, 200),
    phase_lists,
    st.integers(1, 4),
)


@settings(deadline=None)
@given(plans)
def test_each_epoch_uses_each_image_exactly_once(plan: Plan) -> None:
    positions: dict[int, list[int]] = {epoch: [] for epoch in range(plan.num_epochs)}
    for step in map(plan.step, range(plan.num_steps)):
        positions[step.epoch] += range(step.first, step.first + step.count)
    assert all(used == list(range(plan.num_images)) for used in positions.values())


@settings(deadline=None)
@given(plans)
def test_steps_are_even_and_within_the_batch(plan: Plan) -> None:
    for span in plan.phases:
        steps = range(span.first_step, span.first_step + span.num_steps)
        counts = [plan.step(s).count for s in steps]
        assert 1 <= min(counts) <= max(counts) <= min(span.phase.batch, min(counts) + 1)
        assert span.steps_per_epoch == math.ceil(plan.num_images / span.phase.batch)
    assert plan.min_count == min(plan.step(s).count for s in range(plan.num_steps))


@settings(deadline=None)
@given(plans)
def test_steps_follow_each_other(plan: Plan) -> None:
    samples = 0
    progress = -1.0
    for s in range(plan.num_steps):
        step = plan.step(s)
        phase = plan.recipe.phases[step.phase]
        assert step.index == s
        assert step.image_px == phase.image_px
        assert step.crop_area == phase.crop_area
        assert plan.samples_before(s) == samples == step.epoch * plan.num_images + step.first
        assert step.ends_epoch == (step.first + step.count == plan.num_images)
        assert progress < step.epoch_progress
        assert step.epoch <= step.epoch_progress < step.epoch + 1
        samples += step.count
        progress = step.epoch_progress
    assert plan.samples_before(plan.num_steps) == samples == plan.num_images * plan.num_epochs


@settings(deadline=None)
@given(plans)
def test_validation_follows_each_nth_epoch_and_the_last_step(plan: Plan) -> None:
    validated = [s for s in range(plan.num_steps) if plan.validates_after(s)]
    every = plan.recipe.validation.every_epochs
    epochs = [plan.step(s).epoch + 1 for s in validated]
    due = [epoch for epoch in range(1, plan.num_epochs + 1) if epoch % every == 0]
    assert epochs == (due if due[-1:] == [plan.num_epochs] else [*due, plan.num_epochs])
    assert all(plan.step(s).ends_epoch for s in validated)


def test_an_example_by_hand() -> None:
    plan = make_plan(10, (2, 4), (1, 10))
    assert (plan.num_steps, plan.num_epochs, plan.min_count) == (7, 3, 3)
    steps = [plan.step(s) for s in range(7)]
    assert [(s.epoch, s.phase, s.first, s.count) for s in steps] == [
        (0, 0, 0, 3),
        (0, 0, 3, 3),
        (0, 0, 6, 4),
        (1, 0, 0, 3),
        (1, 0, 3, 3),
        (1, 0, 6, 4),
        (2, 1, 0, 10),
    ]
    assert [s.image_px for s in steps] == [8] * 6 + [16]
    assert [s.ends_epoch for s in steps] == [False, False, True, False, False, True, True]
    assert [s.epoch_progress for s in steps] == [0, 0.3, 0.6, 1, 1.3, 1.6, 2]


def test_curves_are_read_at_the_progress_of_a_step() -> None:
    pieces = [{"until": 1, "linear": [0.0, 1.0]}, {"until": "end", "constant": 5.0}]
    plan = make_plan(10, (2, 5), lr=pieces)
    assert [plan.step(s).lr for s in range(4)] == [0.0, 0.5, 5.0, 5.0]
    assert {plan.step(s).momentum for s in range(4)} == {0.9}
    assert {plan.step(s).weight_decay for s in range(4)} == {0.0}


def test_a_batch_above_the_number_of_images_is_one_step_an_epoch() -> None:
    plan = make_plan(3, (2, 100))
    assert [plan.step(s).count for s in range(plan.num_steps)] == [3, 3]


@pytest.mark.parametrize("s", [-1, 7])
def test_outside_of_the_run_there_is_no_step(s: int) -> None:
    plan = make_plan(10, (2, 4), (1, 10))
    for ask in (plan.step, plan.validates_after):
        with pytest.raises(IndexError, match="outside the plan's 0 to 6"):
            ask(s)


@pytest.mark.parametrize("s", [-1, 8])
def test_samples_are_counted_within_the_run_only(s: int) -> None:
    with pytest.raises(IndexError):
        make_plan(10, (2, 4), (1, 10)).samples_before(s)


def test_no_images_is_an_error() -> None:
    with pytest.raises(RaytrainError, match="training set has no images"):
        make_plan(0, (1, 1))


@given(st.integers(0, 10_000), st.integers(1, 200))
def test_shares_follow_each_other_and_are_even(count: int, world: int) -> None:
    end = 0
    sizes = []
    for rank in range(world):
        offset, size = share(count, rank, world)
        assert offset == end
        end = offset + size
        sizes.append(size)
    assert end == count
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("count", "rank", "world"), [(5, 2, 2), (5, -1, 2), (5, 0, 0), (-1, 0, 1)])
def test_there_is_no_share_for_a_worker_that_does_not_exist(
    count: int, rank: int, world: int
) -> None:
    with pytest.raises(ValueError, match="no share"):
        share(count, rank, world)


def test_the_recipe_package_is_light() -> None:
    """A plan needs none of the packages that are slow to import."""
    code = (
        "import sys, raytrain.recipe; "
        "print([m for m in ('torch', 'ray', 'numpy', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
