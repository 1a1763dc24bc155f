"""The default job, as `make train` runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain.demo import run_demo
from raytrain.run.history import read_history

pytestmark = pytest.mark.usefixtures("ray_local")


def test_the_default_job_reaches_its_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo(tmp_path, workers=2) == 0
    history = read_history(tmp_path / "run")
    assert history.summary is not None
    assert history.summary.status == "target_reached"
    assert history.summary.best_top1 is not None
    assert history.summary.best_top1 >= 0.97
    assert {row.image_px for row in history.steps} == {16, 32}
    assert len({row.batch for row in history.steps}) > 2
    assert len({row.momentum for row in history.steps}) > 100
    said = capsys.readouterr().out
    assert str(tmp_path / "run" / "convergence.png") in said
    assert "raytrain prepare PHOTOS" in said
