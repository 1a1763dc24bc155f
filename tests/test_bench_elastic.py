"""`raytrain bench elastic`: what is read from a run's record, and a small run of it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from raytrain.bench.elastic import (
    ElasticOptions,
    ElasticReport,
    back_after,
    bench_elastic,
    cost_of,
    goodput_of,
    images_wrong,
    usual_step,
)
from raytrain.errors import RaytrainError
from raytrain.recipe.load import recipe_from_dict
from raytrain.recipe.types import Recipe

ZERO = 1_800_000_000.0  # when the clock of these runs was zero


def row(step: int, seconds: float, workers: int) -> dict[str, Any]:
    return {"step": step, "seconds": seconds, "world_size": workers}


def event(kind: str, seconds: float, late: float = 0.0, **detail: Any) -> dict[str, Any]:
    told = datetime.fromtimestamp(ZERO + seconds + late, UTC).isoformat()
    return {"kind": kind, "seconds": seconds, "time": told, **detail}


STEPS = [row(s, 1.0 + s, 3) for s in range(10)]  # one a second; the fault comes at 10.5


def test_a_step_made_again_by_those_left() -> None:
    rows = [*STEPS, row(10, 11.0, 3), row(11, 13.0, 2), row(12, 14.0, 2), row(13, 15.5, 3)]
    events = [event("start", 0.0), event("fault", 10.9, late=0.2), event("resize", 13.0, late=0.1)]
    cost = cost_of("kill", ZERO + 10.5, 9, rows, events, step_s=1.0)
    assert cost.detected_s == pytest.approx(0.6)
    assert cost.paused_s == pytest.approx(1.0)  # from 11 to 13, less a step
    assert cost.full_s == pytest.approx(5.0)
    assert cost.joined_s == pytest.approx(0.5)
    assert cost.steps_lost == 0


def test_a_restart_from_a_checkpoint() -> None:
    rows = [*STEPS[:8], row(8, 20.5, 3), row(9, 21.5, 3)]
    events = [event("start", 0.0), event("fault", 11.0), event("recovery", 19.0, rows_dropped=2)]
    cost = cost_of("kill", ZERO + 10.5, 9, rows, events, step_s=1.0)
    assert cost.paused_s == pytest.approx(9.0)
    assert cost.full_s == pytest.approx(10.0)
    assert cost.joined_s is None
    assert cost.steps_lost == 2


def test_steps_that_are_in_the_record_twice_were_lost() -> None:
    rows = [*STEPS, row(4, 40.0, 3), row(5, 41.0, 3)]
    cost = cost_of("kill", ZERO + 10.5, 9, rows, [event("worker", 0.0)], step_s=1.0)
    assert cost.steps_lost == 6
    assert cost.detected_s is None


def test_when_all_are_back() -> None:
    assert not back_after(STEPS, 10.5, 3)
    assert not back_after([*STEPS, row(10, 11.0, 2)], 10.5, 3)
    assert back_after([*STEPS, row(10, 11.0, 2), row(11, 12.0, 3)], 10.5, 3)


def test_what_a_fault_takes_of_a_minute() -> None:
    """Ten steps of a second, a pause of ten, and four steps by fewer workers; two made again."""
    rows = [*STEPS, row(8, 20.0, 2), row(9, 22.0, 2), row(10, 24.0, 2), row(11, 26.0, 3)]
    goodput, pace = goodput_of(rows, 0.0, 30.0, 3)
    assert goodput == pytest.approx((8 * 1 + 3 + 3 * 2) / 30)  # of the first new step three times
    assert pace == pytest.approx(12 * 1 / 30)


def test_the_usual_step_is_that_of_all_workers() -> None:
    rows = [row(0, 1.0, 3), row(1, 2.0, 3), row(2, 5.0, 3), row(3, 6.0, 3), row(4, 15.0, 2)]
    assert usual_step(rows, 3) == pytest.approx(1.0)


def test_images_left_out_or_used_twice_are_counted(tmp_path: Path) -> None:
    epochs = {0: [[0, 1], [2, 3]], 1: [[0, 1], [1, 3]], 2: [[0]]}  # in epoch 1: 1 for 2
    (tmp_path / "audit").mkdir()
    lines, rows, step = [], [], 0
    for epoch, steps in epochs.items():
        for used in steps:
            lines += [{"step": step, "quorum": 0, "rows": used}, {"step": step, "quorum": 0}]
            rows.append({"step": step, "epoch": epoch})
            step += 1
    (tmp_path / "audit" / "1-0-0.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in rows))
    assert images_wrong(tmp_path) == 2


def small_recipe() -> Recipe:
    return recipe_from_dict(
        {
            "model": {"name": "small_cnn", "args": {"width": 4}},
            "phases": [{"epochs": 1, "image_px": 16, "batch": 64}],
            "schedule": {"lr": 0.1},
            "log": {"every_steps": 2},
            "checkpoint": {"every_steps": 20},
            "input": {"decoders": 1},
        }
    )


def test_a_folder_with_something_in_it_is_refused(drawn_set: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(RaytrainError, match="isn't empty"):
        bench_elastic(small_recipe(), str(drawn_set), tmp_path, ElasticOptions())


@pytest.mark.slow
def test_all_contenders_lose_a_worker(drawn_set: Path, tmp_path: Path) -> None:
    options = ElasticOptions(
        workers=2, contenders=("step", "restart", "ray"), repeats=1, patience_s=600
    )
    report: ElasticReport = bench_elastic(
        small_recipe(), str(drawn_set), tmp_path / "bench", options
    )
    assert list(report.found) == ["step", "restart", "ray"]
    for contender, found in report.found.items():
        assert not found.gave_up
        assert [cost.fault for cost in found.costs] == ["kill"]
        assert found.images_wrong == (None if contender == "ray" else 0)
    assert report.found["step"].costs[0].steps_lost == 0
    assert report.found["restart"].costs[0].steps_lost < 20 + 2 * 2
