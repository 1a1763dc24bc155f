"""`raytrain report`: the table and the pictures of one and several runs."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from raytrain.errors import RaytrainError
from raytrain.run.history import read_history
from raytrain.run.picture import draw_convergence
from raytrain.run.record import RunRecord
from raytrain.run.report import comparison, report
from tests.test_record import FACTS, six_steps, started, step_row, validation_row


def text_of(table: Table, width: int = 80) -> str:
    out = io.StringIO()
    Console(width=width, file=out).print(table)
    return out.getvalue()


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved, so that a test can look at what is in them."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *args: object, **options: object) -> None:
        figures.append(figure)
        save(figure, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def lines_named(axes: Axes) -> dict[str, int]:
    """Label -> number of points, of each labelled line."""
    labelled = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
    return {str(line.get_label()): np.size(line.get_xdata()) for line in labelled}


def words(axes: Axes) -> str:
    return " | ".join(text.get_text() for text in axes.texts)


def test_table_of_ended_and_unended_runs(tmp_path: Path) -> None:
    six_steps(tmp_path / "good").finish("target_reached", "", seconds=6.0, startup_seconds=4.0)
    record = started(tmp_path / "missed")
    record.metrics([step_row(0)])
    record.validation(validation_row(3, 0.5))
    record.finish("target_missed", "", seconds=61.0)
    six_steps(tmp_path / "dead")
    RunRecord(tmp_path / "empty")
    text = text_of(report([tmp_path / name for name in ("good", "missed", "dead", "empty")]))
    good, missed, dead, empty = (text.index(name) for name in ("good", "missed", "dead", "empty"))
    assert good < missed < dead < empty
    for cell in ("target reached", "80.00 %", "6.0 s", "2 to 3", "$0.10"):
        assert cell in text[good:missed]
    for cell in ("target missed", "50.00 %", "1 m 01 s", "missed"):
        assert cell in text[missed:dead]
    for cell in ("running or dead", "silent", "80.00 %", "6.0 s"):
        assert cell in text[dead:empty]
    assert "not started" in text[empty:]


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        six_steps(tmp_path / folder / "run")
    text = text_of(report([tmp_path / "a" / "run", tmp_path / "b" / "run"]), width=400)
    assert str(tmp_path / "a" / "run") in text
    assert str(tmp_path / "b" / "run") in text


def test_a_folder_that_is_no_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RaytrainError, match=r"not a run directory \(no events\.jsonl in it\)"):
        report([tmp_path])
    with pytest.raises(RaytrainError, match="nowhere: not a run directory"):
        report([tmp_path / "nowhere"])


def test_the_command_line_need_not_wait_for_heavy_imports() -> None:
    heavy = {"matplotlib", "tensorboard", "torch", "ray", "numpy"}
    code = f"""if True:
        import raytrain.run.report, raytrain.run.progress, sys
        print({heavy} & sys.modules.keys())
    """
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout == "set()\n"


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    six_steps(tmp_path / "run")
    with pytest.raises(RaytrainError, match=r"cannot draw the picture .*No such file"):
        report([tmp_path / "run"], tmp_path / "missing" / "a.png")


def test_picture_of_one_elastic_run(tmp_path: Path, drawn: list[Figure]) -> None:
    record = six_steps(tmp_path)
    record.metrics([replace(step_row(6, world_size=3), image_px=64)])
    draw_convergence([read_history(tmp_path)], tmp_path / "a.png")
    accuracy, loss, workers = drawn[0].axes
    assert lines_named(accuracy) == {
        "validation top-1": 2,
        "validation top-5": 2,
        "training top-1": 7,
        "resize": 0,
    }
    assert words(accuracy) == "target\ntop-1 75 % | 6.0 s | 32 px | 64 px"
    assert loss.get_ylabel() == "training loss"
    assert np.asarray(workers.get_lines()[0].get_ydata()).tolist() == [2, 2, 2, 2, 3, 3, 3]
    assert workers.get_xlabel() == "training time, seconds"
    assert (
        drawn[0].get_suptitle()
        == f"{tmp_path.name}  ·  small_cnn  ·  top-1 75 % in 6.0 s  ·  not ended"
    )


def test_picture_leaves_out_what_says_nothing(tmp_path: Path, drawn: list[Figure]) -> None:
    """No workers panel while their number stays, no top-5 among five classes."""
    record = RunRecord(tmp_path)
    record.start(replace(FACTS, target={}, data=replace(FACTS.data, num_classes=5)))
    record.metrics([step_row(0), step_row(1)])
    record.validation(validation_row(2, 0.5))
    draw_convergence([read_history(tmp_path)], tmp_path / "a.png")
    accuracy, _loss = drawn[0].axes
    assert list(lines_named(accuracy)) == ["validation top-1", "training top-1"]


def test_picture_of_several_runs(tmp_path: Path, drawn: list[Figure]) -> None:
    for name in ("a", "b"):
        six_steps(tmp_path / name)
    record = started(tmp_path / "c")
    record.metrics([step_row(0, seconds=7200.0)])
    report([tmp_path / name for name in ("a", "b", "c")], tmp_path / "all.png")
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    accuracy = drawn[0].axes[0]
    assert list(lines_named(accuracy)) == ["a (6.0 s)", "b (6.0 s)", "c", "top-5", "training top-1"]
    assert drawn[0].axes[-1].get_xlabel() == "training time, minutes"


def test_picture_of_a_run_without_a_step(tmp_path: Path, drawn: list[Figure]) -> None:
    started(tmp_path)
    draw_convergence([read_history(tmp_path)], tmp_path / "a.png")
    assert len(drawn[0].axes) == 2


def test_a_run_beside_entries(tmp_path: Path) -> None:
    """A run's own DAWNBench files are an entry like any other, with the same time and cost."""
    priced = replace(FACTS, price_per_hour=360.0, target={"top1": 0.75})
    record = RunRecord(tmp_path / "good")
    record.start(priced)
    record.metrics([step_row(s) for s in range(6)])
    for step, top1 in ((3, 0.5), (6, 0.8)):
        record.validation(validation_row(step, top1))
    record.finish("target_reached", "", seconds=6.0)
    text = text_of(comparison([f"{tmp_path}/good"], [f"{tmp_path}/good/dawnbench.json"]))
    ours, theirs = (line for line in text.splitlines() if "6.0 s" in line)
    assert ours.split()[-2:] == theirs.split()[-2:]
    assert "$0.60" in ours


def test_the_record_run_beside_a_run_without_a_target(tmp_path: Path) -> None:
    entries = Path(__file__).parents[2] / "shared" / "data" / "dawnbench"
    if not entries.is_dir():
        pytest.skip("needs shared/data/dawnbench")
    record = RunRecord(tmp_path / "run")
    record.start(replace(FACTS, target={}))
    record.finish("completed", "", seconds=1.0)
    paths = sorted(entries.glob("*.json"))
    text = text_of(comparison([tmp_path / "run"], paths), width=120)
    assert "to top-5 93 %" in text
    for name, time in (("modelarts_10m28", "10 m 28 s"), ("gn6e_16_machine", "2 m 38 s")):
        (line,) = (row for row in text.splitlines() if name in row)
        assert time in line
    (line,) = (row for row in text.splitlines() if "fastai" in row)
    assert "$" in line


def test_a_file_that_is_no_entry_is_one_line(tmp_path: Path) -> None:
    six_steps(tmp_path / "run").finish("completed", "", seconds=6.0)
    with pytest.raises(RaytrainError, match="not a DAWNBench entry") as told:
        comparison([tmp_path / "run"], [tmp_path / "run" / "summary.json"])
    assert "\n" not in str(told.value)
