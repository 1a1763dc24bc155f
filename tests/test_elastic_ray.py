"""Elastic steps on Ray: the first worker is killed, the others go on, nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import raytrain
from raytrain.orchestrate.faults import Fault, FaultMaker
from raytrain.run.audit import used_rows
from raytrain.run.history import read_jsonl
from tests.workers import plain_cnn

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_local")]

EPOCHS = 40
RECIPE: dict[str, Any] = {
    "model": {"name": "not.used:here"},
    "phases": [{"epochs": EPOCHS, "image_px": 16, "batch": 64, "crop_area": [0.5, 1.0]}],
    "schedule": {"lr": [{"until": "end", "linear": [0.1, 0.02]}]},
    "validation": {"every_epochs": 20},
    "input": {"audit": True, "window_blocks": 6},
    "log": {"every_steps": 3},
    "checkpoint": {"every_steps": 30},
}


def test_the_first_worker_is_killed(drawn_set: Path, tmp_path: Path) -> None:
    run_dir, alone = tmp_path / "run", tmp_path / "alone"
    elastic = RECIPE | {"faults": {"elastic": "step"}}
    raytrain.fit(RECIPE, drawn_set, model=plain_cnn, engine="inline", run_dir=alone)
    with FaultMaker([Fault(at_step=20, do="kill", worker=0)], run_dir) as faults:
        result = raytrain.fit(elastic, drawn_set, model=plain_cnn, workers=3, run_dir=run_dir)
    assert len(faults.applied) == 1
    assert result.exit_status == 0
    assert 2 in result.summary.world_sizes
    ours, theirs = (read_jsonl(d / "metrics.jsonl") for d in (run_dir, alone))
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for row, other in zip(ours, theirs, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert used_rows(run_dir) == used_rows(alone)
    events = [event["kind"] for event in read_jsonl(run_dir / "events.jsonl")]
    assert "recovery" not in events, "no checkpoint was gone back to"
    assert events.count("fault") == 1
    validations = read_jsonl(run_dir / "validations.jsonl")
    assert [row["step"] for row in validations] == [20 * 6, 40 * 6]
    assert {row["num_images"] for row in validations} == {103}


def test_what_elastic_steps_refuse(drawn_set: Path, tmp_path: Path) -> None:
    def train(workers: int, **sections: Any) -> None:
        recipe = RECIPE | {"faults": {"elastic": "step"}} | sections
        raytrain.fit(recipe, drawn_set, model=plain_cnn, workers=workers, run_dir=tmp_path / "run")

    with pytest.raises(raytrain.RaytrainError, match="two workers or more"):
        train(1)
    with pytest.raises(raytrain.RaytrainError, match=r"validates in a process of its own"):
        train(2, validation={"where": "inline"})
    with pytest.raises(raytrain.RaytrainError, match="compile: true compiles anew"):
        train(2, compile=True)
