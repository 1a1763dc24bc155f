"""The command line as a user meets it: exit status, one clear line for a mistake, resume."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from raytrain.cli import main
from raytrain.run.history import read_jsonl

RECIPE = """
model: {name: "tests.workers:plain_cnn"}
phases:
  - {epochs: 2, image_px: 16, batch: 64, crop_area: [0.5, 1.0]}
  - {epochs: 1, image_px: 24, batch: 100, crop_area: [0.5, 1.0]}
schedule: {lr: 0.05}
"""


INLINE = [sys.executable, "-m", "raytrain", "train", "--engine", "inline"]


@dataclass
class Said:
    status: int
    out: str
    err: str

    def one_line(self) -> str:
        """The error's one line; fails where there is more, or a stack trace."""
        assert self.status == 1, self.out + self.err
        lines = [line for line in self.err.splitlines() if line]
        assert len(lines) == 1, self.err
        assert lines[0].startswith("error: ")
        return lines[0]


class CommandLine:
    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    def __call__(self, *args: object) -> Said:
        self._monkeypatch.setattr(sys, "argv", ["raytrain", *map(str, args)])
        self._capsys.readouterr()
        status: object = 0
        try:
            main()
        except SystemExit as end:
            status = end.code
        assert isinstance(status, int)
        said = self._capsys.readouterr()
        return Said(status, said.out, said.err)


@pytest.fixture
def raytrain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    return CommandLine(capsys, monkeypatch)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE)
    return path


def test_help_and_import_load_nothing_heavy() -> None:
    code = (
        "import sys, raytrain; from raytrain.cli import app; from typer.testing import CliRunner;"
        "assert 'prepare' in CliRunner().invoke(app, ['--help']).output;"
        "print([m for m in ('torch', 'ray', 'matplotlib', 'pyarrow', 'cv2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_all_epochs_without_a_target(
    raytrain: CommandLine, recipe: Path, drawn_set: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    said = raytrain(
        "train", recipe, "--data", drawn_set, "--engine", "inline", "--run-dir", run_dir
    )
    assert said.status == 0, said.err
    assert "all 3 epochs ran" in said.out
    for name in (
        *("recipe.yaml", "metrics.jsonl", "validations.jsonl", "events.jsonl", "summary.json"),
        *("dawnbench.json", "dawnbench.tsv", "convergence.png", "model.safetensors"),
    ):
        assert (run_dir / name).stat().st_size > 0, name
    assert list((run_dir / "tensorboard").iterdir())
    assert len(list((run_dir / "checkpoints").glob("step-*"))) == 2
    rows = read_jsonl(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(6 + 6 + 4))
    assert [row["image_px"] for row in rows] == [16] * 12 + [24] * 4
    assert [row["step"] for row in read_jsonl(run_dir / "validations.jsonl")] == [6, 12, 16]
    again = raytrain(
        "train", recipe, "--data", drawn_set, "--engine", "inline", "--run-dir", run_dir
    )
    assert again.status == 0
    assert "was finished before" in again.out


@pytest.mark.parametrize(
    ("target", "status", "outcome"),
    [("0.2", 0, "target_reached"), ("1.0", 3, "target_missed")],
)
def test_exit_status_of_a_target(
    raytrain: CommandLine,
    recipe: Path,
    drawn_set: Path,
    tmp_path: Path,
    target: str,
    status: int,
    outcome: str,
) -> None:
    run_dir = tmp_path / "run"
    command = ("train", recipe, "--data", drawn_set, "--engine", "inline", "--run-dir", run_dir)
    said = raytrain(*command, "--set", f"target.top1={target}", "--set", "schedule.lr=1.0e-9")
    assert said.status == status, said.err
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == outcome
    assert (summary["seconds_to_target"] is not None) == (status == 0)
    again = raytrain(*command, "--set", f"target.top1={target}", "--set", "schedule.lr=1.0e-9")
    assert again.status == status


def test_killed_and_resumed(recipe: Path, drawn_set: Path, tmp_path: Path) -> None:
    """SIGKILL in mid-epoch; the same command goes on, and the record has no gap and no double."""
    run_dir = tmp_path / "run"
    command = [*INLINE, str(recipe), "--data", str(drawn_set), "--run-dir", str(run_dir)]
    for change in ("phases.0.epochs=400", "checkpoint.every_steps=4", "log.every_steps=1"):
        command += ["--set", change]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while len(list((run_dir / "checkpoints").glob("step-*"))) < 2:
        assert first.poll() is None, first.stderr and first.stderr.read().decode()
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    newest = max(int(p.name.split("-")[1]) for p in (run_dir / "checkpoints").glob("step-*"))
    second = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not _resumed(run_dir, newest):
        assert second.poll() is None
        time.sleep(0.05)
    second.send_signal(signal.SIGINT)
    _, err = second.communicate(timeout=600)
    assert "goes on from the newest checkpoint" in Said(second.returncode, "", err).one_line()
    steps = [row["step"] for row in read_jsonl(run_dir / "metrics.jsonl")]
    assert steps == list(range(len(steps)))
    events = read_jsonl(run_dir / "events.jsonl")
    assert [e["step"] for e in events if e["kind"] == "resume"] == [newest]
    assert events[-1]["status"] == "interrupted"
    seconds = [row["seconds"] for row in read_jsonl(run_dir / "metrics.jsonl")]
    assert seconds == sorted(seconds)


def _resumed(run_dir: Path, newest: int) -> bool:
    events = read_jsonl(run_dir / "events.jsonl")
    rows = read_jsonl(run_dir / "metrics.jsonl")
    return any(e["kind"] == "resume" for e in events) and rows[-1]["step"] > newest + 5


def test_a_changed_recipe_or_other_data_is_refused(
    raytrain: CommandLine, recipe: Path, drawn_set: Path, tmp_path: Path
) -> None:
    options = ("--engine", "inline", "--run-dir", tmp_path / "run", "--set", "phases.0.epochs=1")
    command = ("train", recipe, *options, "--data")
    assert raytrain(*command, drawn_set).status == 0
    changed = raytrain(
        *command, drawn_set, "--set", "schedule.momentum=0.8", "--set", "seed=4"
    ).one_line()
    assert "seed: 0 -> 4" in changed
    assert "schedule.momentum" in changed
    other = tmp_path / "other"
    shutil.copytree(drawn_set, other)
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["classes"].reverse()
    (other / "manifest.json").write_text(json.dumps(manifest))
    assert "other data" in raytrain(*command, other).one_line()


def test_show(raytrain: CommandLine, tmp_path: Path) -> None:
    said = raytrain("show", "digits", "--images", 1437, "--png", tmp_path / "plan.png")
    assert said.status == 0
    assert "1,437 images" in said.out
    assert (tmp_path / "plan.png").stat().st_size > 10_000


EIGHT = ("--set", "model.name=tests.workers:eight_outputs")
BUG = ("--set", "model.name=tests.workers:with_a_bug")

BAD = [
    (["prepare", "{tmp}/none", "{tmp}/out"], "none"),
    (["prepare", "{tmp}/empty", "{tmp}/out"], "empty"),
    (["prepare", "{images}", "{tmp}/out", "--sizes", "16,big"], "'big' is no size"),
    (["train", "{recipe}", "--data", "{tmp}/none"], "no ShardSet here"),
    (["train", "{tmp}/none.yaml", "--data", "{set}"], "none.yaml"),
    (["train", "digit", "--data", "{set}"], "digits"),
    (["train", "{recipe}", "--data", "{newer}"], "format version 99 is newer"),
    (["train", "{recipe}", "--data", "{set}", "--set", "phases.0.bacth=1"], "did you mean 'batch'"),
    (["train", "{recipe}", "--data", "{set}", "--set", "model.name=resnet5O"], "did you mean"),
    (["train", "{recipe}", "--data", "{set}", "--workers", "0"], "--workers 0"),
    (["train", "{recipe}", "--data", "{set}", "--workers", "3:2"], "--workers 3:2"),
    (["train", "{recipe}", "--data", "{set}", "--workers", "2", "--engine", "inline"], "inline"),
    (["train", "{recipe}", "--data", "{set}", "--workers", "9"], "has 8 CPUs"),
    (
        ["train", "{recipe}", "--data", "{set}", "--workers", "4", "--set", "phases.1.batch=3"],
        "some steps have 2 images only",
    ),
    (["train", "{recipe}", "--data", "{set}", "--device", "cuda"], "GPU"),
    (["train", "{recipe}", "--data", "{set}", "--run-dir", "{recipe}/run"], "cannot write"),
    (["train", "{recipe}", "--data", "{holed}"], "missing or of another size"),
    (["train", "{recipe}", "--data", "{set}", "--run-dir", "{images}"], "is no run"),
    (["train", "{recipe}", "--data", "{set}", *EIGHT, "--engine", "inline"], "4 classes; it must"),
    (["train", "{recipe}", "--data", "{set}", *BUG, "--engine", "inline"], "workers.py:"),
    (["show", "digits", "--images", "100", "--png", "{recipe}/plan.png"], "plan.png"),
    (["report", "{tmp}/none"], "not a run directory"),
]


@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize(("args", "says"), BAD)
def test_bad_input_is_one_line(
    raytrain: CommandLine,
    recipe: Path,
    drawn_set: Path,
    drawn_images: Path,
    tmp_path: Path,
    args: list[str],
    says: str,
) -> None:
    newer = tmp_path / "newer"
    newer.mkdir()
    manifest = json.loads((drawn_set / "manifest.json").read_text())
    (newer / "manifest.json").write_text(json.dumps(manifest | {"format_version": 99}))
    (tmp_path / "empty").mkdir()
    holed = tmp_path / "holed"
    shutil.copytree(drawn_set, holed)
    next(holed.rglob("*.parquet")).unlink()
    places = {
        "holed": holed,
        "tmp": tmp_path,
        "recipe": recipe,
        "set": drawn_set,
        "newer": newer,
        "images": drawn_images,
    }
    filled = [arg.format(**places) for arg in args]
    if args[0] == "train" and "--run-dir" not in args:
        filled += ["--run-dir", str(tmp_path / "run")]
    line = raytrain(*filled).one_line()
    assert says in line


@pytest.mark.parametrize(
    ("model", "name"), [("tests.workers:plain_cnn", "metrics.jsonl"), ("small_cnn", "checkpoints")]
)
def test_a_full_disk_is_one_line(
    recipe: Path, drawn_set: Path, tmp_path: Path, model: str, name: str
) -> None:
    """No file may grow above 16 kB, which fails like a disk without room."""
    run_dir = tmp_path / "run"
    changes = ("--set", f"model.name={model}", "--set", "phases.0.epochs=40")
    done = subprocess.run(
        [*INLINE, str(recipe), "--data", str(drawn_set), "--run-dir", str(run_dir), *changes],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, 16_000)),
    )
    line = Said(done.returncode, done.stdout, done.stderr).one_line()
    assert str(run_dir / name) in line
    assert "File too large" in line


def test_a_loss_that_isnt_finite_ends_the_run(
    raytrain: CommandLine, recipe: Path, drawn_set: Path, tmp_path: Path
) -> None:
    command = ("train", recipe, "--data", drawn_set, "--engine", "inline")
    line = raytrain(
        *command, "--run-dir", tmp_path / "run", "--set", "schedule.lr=1.0e+9"
    ).one_line()
    assert "the loss is nan at step" in line
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
