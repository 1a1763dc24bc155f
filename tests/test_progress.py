"""What a person sees while a run goes on, on a terminal and elsewhere."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from raytrain.recipe.load import recipe_from_dict
from raytrain.recipe.plan import Plan
from raytrain.run.format import duration, goal, number, percent, rate
from raytrain.run.progress import Progress, State, closing
from raytrain.run.rows import EventRow, StepRow, ValidationRow
from tests.test_record import six_steps

PHASES = [
    {"epochs": 2, "image_px": 16, "batch": 10},
    {"epochs": 2, "image_px": 32, "batch": 10},
]


def plan(target: Mapping[str, float] | None = None) -> Plan:
    """40 steps of 10 images, the last 20 with four times the pixels."""
    recipe: dict[str, Any] = {
        "model": {"name": "resnet18"},
        "phases": PHASES,
        "schedule": {"lr": 0.1},
        "target": dict(target or {}),
    }
    return Plan(recipe_from_dict(recipe), 100)


def step_row(step: int, *, data_wait_s: float = 0.0, loss: float = 1.5) -> StepRow:
    """One second a step at 16 px, four at 32 px."""
    image_px, seconds = (16, step + 1.0) if step < 20 else (32, 20 + 4.0 * (step - 19))
    return StepRow(
        step=step,
        epoch=step // 10,
        phase=step // 20,
        samples_seen=10 * (step + 1),
        seconds=seconds,
        lr=0.1,
        momentum=0.9,
        weight_decay=0.0,
        batch=10,
        image_px=image_px,
        loss=loss,
        top1=0.5,
        images_per_s=10.0 if step < 20 else 2.5,
        data_wait_s=data_wait_s,
        loss_scale=1.0,
        world_size=2,
    )


def validation_row(epoch: int, top1: float) -> ValidationRow:
    return ValidationRow(
        step=10 * epoch,
        epoch=float(epoch),
        seconds=10.0 * epoch,
        top1=top1,
        top5=0.99,
        loss=0.4,
        num_images=50,
    )


def event_row(kind: str, **detail: object) -> EventRow:
    return EventRow(kind=kind, step=7, seconds=7.0, time="2026-01-01T00:00:00+00:00", detail=detail)


def plain_lines(interval_s: float) -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    return Progress(plan(), Console(file=out, width=60), interval_s=interval_s), out


def test_plain_lines_are_few_and_whole() -> None:
    progress, out = plain_lines(interval_s=3600.0)
    with progress:
        for step in range(10):
            progress.steps([step_row(step)])
    assert out.getvalue() == (
        "step 1/40  epoch 1/4  16 px  batch 10  lr 0.1  momentum 0.9  loss 1.5  10 images/s  "
        "workers 2  data wait 0 %  at 1.0 s  left -\n"
    )


def test_each_validation_and_loud_event_has_its_line() -> None:
    progress, out = plain_lines(interval_s=3600.0)
    with progress:
        progress.validation(validation_row(1, 0.5))
        progress.event(event_row("checkpoint"))
        progress.event(event_row("fault", reason="worker 1 [rank 1] died"))
        progress.event(event_row("resize", world_size=3))
    assert out.getvalue().splitlines() == [
        "epoch 1: top-1 50.00 %  top-5 99.00 %  loss 0.4  at 10.0 s",
        "fault at step 7: worker 1 [rank 1] died",
        "resize at step 7: 3 workers",
    ]


def test_terminal_shows_the_newest_numbers() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, height=30, force_terminal=True, color_system=None)
    with Progress(plan({"top1": 0.75}), console) as progress:
        assert "starting the workers" in out.getvalue()
        progress.steps([step_row(0), step_row(1)])
        progress.validation(validation_row(1, 0.5))
    text = out.getvalue()
    assert "epoch 1: top-1 50.00 %" in text
    for part in ("step 2/40", "1/4", "16 px", "top-1 75 %", "~1 m 38 s"):
        assert part in text


@pytest.mark.parametrize(("wait", "shown"), [(0.2, "20 %"), (0.3, "30 % (input-bound)")])
def test_waiting_for_images_is_named(wait: float, shown: str) -> None:
    state = State(plan())
    state.steps([step_row(step, data_wait_s=wait) for step in range(3)])
    assert f"data wait {shown}  at" in state.line()


def test_time_left_counts_the_larger_images_to_come() -> None:
    state = State(plan())
    assert state.seconds_left() is None
    state.steps([step_row(step) for step in range(10)])
    assert state.seconds_left() == pytest.approx(10 + 20 * 4)
    state.steps([step_row(step) for step in range(10, 40)])
    assert state.seconds_left() == 0


def test_steps_that_run_again_start_the_estimate_anew() -> None:
    state = State(plan())
    state.steps([step_row(step) for step in range(10)])
    state.steps([step_row(4)])
    assert state.seconds_left() is None
    assert state.last == step_row(4)


@pytest.mark.parametrize(
    ("shares", "target", "expected"),
    [
        ([0.5], {"top1": 0.75}, None),  # one validation is no trend
        ([0.2, 0.6], {}, None),
        ([0.2, 0.6], {"top1": 0.8}, 10.0),  # the error halves in each epoch of 10 s
        ([0.2, 0.6], {"top1": 0.8, "top5": 0.9}, 10.0),
        ([0.2, 0.6], {"top1": 0.6}, None),  # reached
        ([0.6, 0.6], {"top1": 0.8}, None),  # no progress
        ([0.2, 0.6], {"top1": 1.0}, None),  # never, at this rate
        ([0.60, 0.61], {"top1": 0.9}, None),  # after the end
    ],
)
def test_time_to_the_target(
    shares: list[float], target: Mapping[str, float], expected: float | None
) -> None:
    state = State(plan(target))
    state.steps([step_row(step) for step in range(20)])
    state.validations.extend(validation_row(epoch, top1) for epoch, top1 in enumerate(shares, 1))
    assert state.seconds_to_target() == (expected and pytest.approx(expected))


def test_a_loss_that_blew_up_is_told() -> None:
    state = State(plan())
    state.steps([step_row(0, loss=float("nan"))])
    assert "loss not finite" in state.line()


def test_closing_lines(tmp_path: Path) -> None:
    record = six_steps(tmp_path)
    summary = record.finish("target_reached", "top-1 80 % is at least 75 %", seconds=6.0)
    assert closing(summary, tmp_path).splitlines() == [
        "target reached: top-1 80 % is at least 75 %",
        "  accuracy   top-1 80.00 %, top-5 90.00 % (best 80.00 %, 90.00 %)",
        "  to target  6.0 s (top-1 75 %, validation time counted)",
        "  training   6.0 s, 2 epochs, 6 steps, 10 images/s",
        f"  picture    {tmp_path}/convergence.png",
        f"  files      {tmp_path}",
    ]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (duration(8.449), "8.4 s"),
        (duration(59.96), "1 m 00 s"),
        (duration(628.2), "10 m 28 s"),
        (duration(3599.6), "1 h 00 m"),
        (duration(7500), "2 h 05 m"),
        (duration(float("nan")), "-"),
        (percent(0.7512), "75.12 %"),
        (percent(None), "-"),
        (rate(5210.4), "5,210"),
        (rate(9.876), "9.88"),
        (number(1.25e-5), "1.25e-05"),
        (goal({"top1": 0.97, "top5": 0.999}), "top-1 97 % and top-5 99.9 %"),
    ],
)
def test_numbers_for_people(written: str, expected: str) -> None:
    assert written == expected
