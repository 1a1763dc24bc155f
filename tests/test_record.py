"""The run directory: what is written, what survives a crash, and DAWNBench's format."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)

from raytrain.errors import RaytrainError
from raytrain.run import dawnbench
from raytrain.run.history import read_history, read_jsonl
from raytrain.run.record import RunRecord, git_commit, package_versions
from raytrain.run.rows import (
    DataSource,
    Hardware,
    RunFacts,
    StepRow,
    ValidationRow,
    first_at_target,
    meets,
)

PUBLIC_ENTRIES = Path(__file__).parents[2] / "shared" / "data" / "dawnbench"

FACTS = RunFacts(
    model="small_cnn",
    data=DataSource(uri="/data/digits", fingerprint="ab12", num_classes=10),
    total_steps=6,
    hardware=Hardware(nodes=1, cpu="Some CPU", cpus=2),
    versions={"raytrain": "0.1.0", "torch": "2.14.1"},
    target={"top1": 0.75},
    price_per_hour=36.0,
)


def step_row(step: int, *, seconds: float | None = None, world_size: int = 2) -> StepRow:
    return StepRow(
        step=step,
        epoch=step // 3,
        phase=0,
        samples_seen=10 * (step + 1),
        seconds=step + 1.0 if seconds is None else seconds,
        lr=0.1,
        momentum=0.9,
        weight_decay=1e-4,
        batch=10,
        image_px=32,
        loss=2.0 - 0.1 * step,
        top1=0.1 * step,
        images_per_s=10.0,
        data_wait_s=0.1,
        loss_scale=1.0,
        world_size=world_size,
    )


def validation_row(step: int, top1: float, top5: float = 0.9) -> ValidationRow:
    return ValidationRow(
        step=step,
        epoch=step / 3,
        seconds=float(step),
        top1=top1,
        top5=top5,
        loss=0.5,
        num_images=100,
    )


def started(run_dir: Path) -> RunRecord:
    record = RunRecord(run_dir)
    record.recipe("model: {name: small_cnn}\n")
    record.start(FACTS)
    return record


def six_steps(run_dir: Path) -> RunRecord:
    """Two epochs of three steps, with a resize to three workers after four steps."""
    record = started(run_dir)
    record.metrics([step_row(step) for step in range(3)])
    record.validation(validation_row(3, 0.7))
    record.metrics([step_row(3)])
    record.event("resize", step=4, seconds=4.0, world_size=3)
    record.metrics([step_row(step, world_size=3) for step in (4, 5)])
    record.validation(validation_row(6, 0.8))
    return record


def test_rows_come_back_as_written(tmp_path: Path) -> None:
    six_steps(tmp_path)
    history = read_history(tmp_path)
    assert history.steps[3] == step_row(3)
    assert history.validations == [validation_row(3, 0.7), validation_row(6, 0.8)]
    assert history.facts == FACTS
    assert [event.kind for event in history.events] == ["start", "resize"]
    assert history.events[1].detail == {"world_size": 3}
    assert (tmp_path / "recipe.yaml").read_text() == "model: {name: small_cnn}\n"


def test_a_loss_that_blew_up_stays_plain_json(tmp_path: Path) -> None:
    record = started(tmp_path)
    record.metrics([replace(step_row(0), loss=math.inf, top1=math.nan)])
    line = (tmp_path / "metrics.jsonl").read_text()
    row = json.loads(line, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    assert row["loss"] is None
    assert math.isnan(read_history(tmp_path).steps[0].loss)


def test_summary_says_what_the_rows_say(tmp_path: Path) -> None:
    record = six_steps(tmp_path)
    record.event("fault", step=6, seconds=6.0, reason="worker 1 died")
    summary = record.finish(
        "target_reached", "top-1 80 % >= 75 %", seconds=6.0, startup_seconds=4.0
    )
    assert summary.seconds_to_target == 6.0
    assert (summary.top1, summary.best_top1) == (0.8, 0.8)
    assert (summary.steps, summary.epochs, summary.images_per_s) == (6, 2.0, 10.0)
    assert (summary.world_sizes, summary.faults, summary.restarts) == ([2, 3], 1, 0)
    assert summary.cost == pytest.approx(0.1)  # 10 s at $36 an hour
    assert read_history(tmp_path).summary == summary
    assert read_history(tmp_path).events[-1].kind == "end"
    assert (tmp_path / "convergence.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.tmp"))


def test_summary_of_a_run_that_failed_at_once(tmp_path: Path) -> None:
    summary = started(tmp_path).finish("failed", "no worker came up", seconds=0.0)
    assert (summary.top1, summary.images_per_s, summary.steps) == (None, None, 0)
    assert summary.seconds_to_target is None
    assert read_history(tmp_path).summary == summary


@pytest.mark.parametrize(
    ("target", "expected"),
    [({}, False), ({"top1": 0.7}, True), ({"top1": 0.7, "top5": 0.91}, False)],
)
def test_target_needs_every_share(target: Mapping[str, float], expected: bool) -> None:
    assert meets(target, validation_row(3, 0.7)) is expected


def test_first_validation_at_the_target_counts() -> None:
    rows = [validation_row(3, 0.74), validation_row(6, 0.75), validation_row(9, 0.9)]
    assert first_at_target({"top1": 0.75}, rows) is rows[1]
    assert first_at_target({"top1": 0.95}, rows) is None


def test_rewind_drops_what_runs_again(tmp_path: Path) -> None:
    record = six_steps(tmp_path)
    assert record.rewind(4) == 3  # steps 4 and 5, and the validation after six steps
    history = read_history(tmp_path)
    assert [row.step for row in history.steps] == [0, 1, 2, 3]
    assert [row.step for row in history.validations] == [3]
    assert record.rewind(4) == 0


def test_rewind_keeps_the_validation_at_its_step(tmp_path: Path) -> None:
    record = six_steps(tmp_path)
    record.rewind(3)
    assert [row.step for row in read_history(tmp_path).validations] == [3]


def test_resume_goes_on_with_the_clock(tmp_path: Path) -> None:
    six_steps(tmp_path).finish("interrupted", "asked to stop", seconds=6.5)
    record = RunRecord(tmp_path)
    assert record.last_seconds() == 6.5
    event = record.start(FACTS, step=3)
    assert (event.kind, event.step, event.seconds) == ("resume", 3, 6.5)
    history = read_history(tmp_path)
    assert history.summary is None
    assert len(history.steps) == 3
    record.metrics([step_row(3, seconds=7.5)])
    assert record.finish("failed", "again", seconds=7.5).restarts == 1


@pytest.mark.parametrize("torn", ['{"step": 6, "epo', '{"step"', "\x00\x00"])
def test_a_torn_last_line_is_left_out_and_mended(tmp_path: Path, torn: str) -> None:
    six_steps(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    assert len(read_history(tmp_path).steps) == 6
    RunRecord(tmp_path).metrics([step_row(6)])
    assert [row.step for row in read_history(tmp_path).steps] == list(range(7))


def test_damage_elsewhere_names_file_and_line(tmp_path: Path) -> None:
    six_steps(tmp_path)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], lines[1][:20] + "\n", *lines[2:]]))
    with pytest.raises(RaytrainError, match=r"metrics\.jsonl:2: damaged line"):
        read_history(tmp_path)
    path.write_text("".join([*lines[:4], lines[4].replace('"loss"', '"lost"')]))
    with pytest.raises(RaytrainError, match=r"metrics\.jsonl:5: loss: Field required"):
        read_history(tmp_path)


def test_a_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert read_jsonl(tmp_path / "none.jsonl") == []


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        RaytrainError, match=r"cannot write .*file/run: Not a directory; .*--run-dir"
    ):
        RunRecord(tmp_path / "file" / "run")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("metrics.jsonl", lambda record: record.metrics([step_row(0)])),
        ("events.jsonl", lambda record: record.event("fault", step=0, seconds=0.0)),
    ],
)
def test_a_full_disk_is_one_line(
    tmp_path: Path, name: str, write: Callable[[RunRecord], object]
) -> None:
    record = RunRecord(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(RaytrainError, match=rf"cannot write .*{name}: No space left on device"):
        write(record)


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    six_steps(tmp_path)
    record = RunRecord(tmp_path)
    record.start(FACTS, step=3)
    record.metrics([step_row(3, seconds=9.0), step_row(4, seconds=10.0)])
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = events.Scalars("train/loss")
    assert [point.step for point in losses] == [0, 1, 2, 3, 4]
    assert losses[1].value == pytest.approx(1.9)
    assert losses[2].wall_time - losses[0].wall_time == pytest.approx(2.0, abs=0.5)
    assert [point.step for point in events.Scalars("validation/top1")] == [3]


def test_tensorboard_that_cannot_write_is_no_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    six_steps(tmp_path)
    assert len(read_history(tmp_path).steps) == 6
    assert [record.message[:40] for record in caplog.records] == [
        "no more TensorBoard events: cannot write"
    ]


def test_git_commit_of_a_checkout_and_of_none(tmp_path: Path) -> None:
    assert git_commit(tmp_path) is None
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "a").write_text("1")
    subprocess.run(["git", "add", "a"], cwd=tmp_path, check=True)
    subprocess.run(["git", *identity, "commit", "-qm", "a"], cwd=tmp_path, check=True)
    commit = git_commit(tmp_path)
    assert commit is not None
    assert len(commit) == 40
    (tmp_path / "a").write_text("2")
    assert git_commit(tmp_path) == f"{commit}-dirty"


def test_package_versions_name_cuda_only_where_there_is_one() -> None:
    assert set(package_versions()) == {"raytrain", "ray", "torch", "python"}
    assert package_versions(cuda="12.8")["cuda"] == "12.8"


def our_entry(run_dir: Path) -> dawnbench.Entry:
    return dawnbench.read_entry(run_dir / "dawnbench.json", run_dir / "dawnbench.tsv")


def test_dawnbench_entry_ends_with_the_first_row_at_the_target(tmp_path: Path) -> None:
    record = six_steps(tmp_path)
    record.validation(validation_row(9, 0.95))
    record.finish("target_reached", "", seconds=9.0)
    entry = our_entry(tmp_path)
    assert [point.epoch for point in entry.points] == [1.0, 2.0]
    assert entry.points[-1].top1 == pytest.approx(80.0)
    hours = dawnbench.time_to(entry, top1=75.0, top5=None)
    assert hours == pytest.approx(6 / 3600, rel=1e-6)
    assert dawnbench.time_to(entry) is None  # 90 % top-5
    assert entry.meta["costPerHour"] == 36.0
    assert entry.meta["misc"]["recipe"] == {"model": {"name": "small_cnn"}}


def test_dawnbench_entry_without_a_price_has_no_cost(tmp_path: Path) -> None:
    record = RunRecord(tmp_path)
    record.start(replace(FACTS, price_per_hour=None, target={}))
    record.validation(validation_row(3, 0.9))
    summary = record.finish("completed", "", seconds=3.0)
    assert summary.cost is None
    assert "costPerHour" not in our_entry(tmp_path).meta


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("epoch\thours\ttop1Accuracy\n", r"tsv:1: expected the columns epoch"),
        ("epoch\thours\ttop1Accuracy\ttop5Accuracy\n1\t0.1\t5\n", r"tsv:2: expected 4 numbers"),
        ("epoch\thours\ttop1Accuracy\ttop5Accuracy\n1\t0.1\t5\tx\n", r"tsv:2: expected 4 numbers"),
    ],
)
def test_a_broken_entry_names_file_and_line(tmp_path: Path, table: str, message: str) -> None:
    six_steps(tmp_path).finish("completed", "", seconds=6.0)
    (tmp_path / "dawnbench.tsv").write_text(table)
    with pytest.raises(RaytrainError, match=message):
        our_entry(tmp_path)


@pytest.mark.skipif(not PUBLIC_ENTRIES.is_dir(), reason="needs ../shared/data/dawnbench")
def test_our_entry_has_the_format_of_the_public_ones(tmp_path: Path) -> None:
    six_steps(tmp_path).finish("target_reached", "", seconds=6.0)
    ours = our_entry(tmp_path)
    header = (tmp_path / "dawnbench.tsv").read_text().splitlines()[0]
    paths = sorted(PUBLIC_ENTRIES.glob("*.json"))
    assert len(paths) == 5
    seconds = {}
    for path in paths:
        table = path.with_suffix(".tsv")
        entry = dawnbench.read_entry(path, table)
        assert header == table.read_text().splitlines()[0]
        assert set(entry.meta) <= set(ours.meta)
        for key in set(entry.meta) - {"costPerHour"}:
            assert type(entry.meta[key]) is type(ours.meta[key])
        hours = dawnbench.time_to(entry)
        assert hours is not None
        seconds[path.stem] = round(3600 * hours)
    assert seconds == {
        "alibabacloud_resnet50_gn6e_16_machine_tensorflow": 158,
        "alibabacloud_resnet50_gn6e_1_machine_tensorflow": 1298,
        "fastai_resnet50_p3_16_machine_pytorch": 1085,
        "huaweicloud_resnet50_modelarts_10m28": 628,  # 10 m 28 s; its last row is later
        "huaweicloud_resnet50_modelarts_16_machine_tensorflow18": 162,
    }
