"""`raytrain bench loop`: both loops on one and two workers, and what comes out."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from raytrain.bench.loop import LoopOptions, bench_loop
from raytrain.data.shards import ShardSet
from raytrain.errors import RaytrainError
from raytrain.recipe.load import recipe_from_dict

RECIPE = {
    "model": {"name": "small_cnn", "args": {"width": 4}},
    "phases": [{"epochs": 1, "image_px": 16, "batch": 32}],
    "schedule": {"lr": 0.1},
}


def test_both_loops_are_measured_on_each_number_of_workers(drawn_set: Path) -> None:
    options = LoopOptions(workers=(1, 2), steps=11, repeats=2)
    assert options.turn_steps == 30
    report = bench_loop(recipe_from_dict(RECIPE), ShardSet.open(drawn_set), options)
    assert [speed.workers for speed in report.speeds] == [1, 2]
    for speed in report.speeds:
        assert speed.ours.low > 0
        assert speed.bare.low > 0
        assert speed.ours.low / speed.bare.high <= speed.share.median
        assert speed.share.median <= speed.ours.high / speed.bare.low
    assert json.loads(report.as_json())["batch"] == 32
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(report.table())
    assert console.export_text().count("raytrain / bare") == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": {"name": "lars"}}, "--set optimizer.name=nag"),
        ({"augment": {"mixup": 0.2}}, "--set augment.mixup=0"),
        ({"compile": True}, "--set compile=false"),
    ],
)
def test_what_the_bare_loop_lacks_is_refused(
    drawn_set: Path, change: dict[str, object], message: str
) -> None:
    recipe = recipe_from_dict(RECIPE | change)
    with pytest.raises(RaytrainError, match=message):
        bench_loop(recipe, ShardSet.open(drawn_set), LoopOptions())
