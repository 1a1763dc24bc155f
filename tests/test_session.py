from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from raytrain.data.shards import ShardSet
from raytrain.errors import RaytrainError
from raytrain.inline import local_hardware
from raytrain.recipe.load import recipe_from_dict
from raytrain.run.checkpoint import Checkpoint, Snapshot
from raytrain.run.history import read_history, read_jsonl
from raytrain.run.rows import ValidationRow
from raytrain.session import Session
from raytrain.train import Job, Parts
from tests.workers import plain_cnn

RECIPE = {
    "model": {"name": "not.used:here"},
    "phases": [{"epochs": 4, "image_px": 16, "batch": 331}],
    "schedule": {"lr": 0.1},
    "target": {"top1": 0.9},
}


@pytest.fixture
def job(drawn_set: Path, tmp_path: Path) -> Job:
    recipe = recipe_from_dict(RECIPE)
    return Job(recipe, ShardSet.open(drawn_set), tmp_path / "run", Parts(model=plain_cnn))


def open_session(job: Job) -> Session:
    return Session(job, local_hardware("cpu"), None)


def write(job: Job, step: int) -> Checkpoint:
    return job.checkpoints.write(
        Snapshot(
            step=step,
            epoch=float(step),
            seconds=float(step),
            validate=True,
            model={"weight": torch.full((1,), float(step))},
            training={},
        )
    )


def row(step: int, top1: float) -> ValidationRow:
    return ValidationRow(
        step=step,
        epoch=float(step),
        seconds=float(step),
        top1=top1,
        top5=1.0,
        loss=0.5,
        num_images=103,
    )


def kept(job: Job) -> float:
    return load_file(job.run_dir / "model.safetensors")["weight"].item()


def test_the_best_weights_are_kept_also_over_a_resume(job: Job) -> None:
    def first_command() -> None:
        session.begin(0, 1, 0.0)
        for step, top1 in ((1, 0.5), (2, 0.7), (3, 0.6)):
            write(job, step)
            session.validation(row(step, top1))

    session = open_session(job)
    session.run(first_command)
    assert kept(job) == 2
    (job.run_dir / "summary.json").unlink()
    again = open_session(job)
    write(job, 4)

    def second_command() -> None:
        again.begin(3, 2, 3.0)
        again.validation(row(4, 0.65))

    again.run(second_command)
    assert kept(job) == 2
    assert job.checkpoints.due() == []


def test_a_validation_due_stays_due_until_it_is_written_down(job: Job) -> None:
    session = open_session(job)
    session.begin(0, 1, 0.0)
    write(job, 1)
    in_the_way = job.run_dir / "validations.jsonl"
    in_the_way.mkdir()
    session.validation(row(1, 0.5))
    assert [checkpoint.step for checkpoint in job.checkpoints.due()] == [1]
    in_the_way.rmdir()
    write(job, 2)
    session.validation(row(2, 0.6))
    assert job.checkpoints.due() == []
    assert [r["step"] for r in read_jsonl(in_the_way)] == [1, 2]


def test_one_command_at_a_time(job: Job) -> None:
    first = open_session(job)
    with pytest.raises(RaytrainError, match="in use by another raytrain"):
        open_session(job)
    first.run(lambda: first.begin(0, 1, 0.0))
    open_session(job)


def test_a_target_that_was_reached_before_the_end_was_written(job: Job) -> None:
    """Killed after the validation at the target: the next command only writes the end."""
    session = open_session(job)
    session.begin(0, 1, 0.0)
    write(job, 1)
    session.validation(row(1, 0.95))
    copy = job.run_dir.with_name("copy")
    shutil.copytree(job.run_dir, copy)
    killed = Job(job.recipe, job.shards, copy, job.parts)
    ran: list[int] = []
    result = open_session(killed).run(lambda: ran.append(1))
    assert ran == []
    assert result.exit_status == 0
    assert result.summary.seconds_to_target == 1.0


def test_faults_recoveries_and_resizes_are_events(job: Job) -> None:
    def engine() -> None:
        session.begin(0, 3, 0.0)
        session.fault("worker 1 died")
        session.begin(2, 3, 5.0)
        session.begin(2, 2, 6.0)

    session = open_session(job)
    session.run(engine)
    kinds = [event.kind for event in read_history(job.run_dir).events]
    assert kinds == ["start", "fault", "recovery", "recovery", "resize", "end"]
