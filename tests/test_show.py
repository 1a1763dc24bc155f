"""The table and the picture of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from raytrain.errors import RaytrainError
from raytrain.recipe import Plan, recipe_from_dict
from raytrain.run.show import draw_plan, plan_table

PHASES = [
    {"epochs": 21, "image_px": 128, "batch": 28672},
    {"epochs": 8, "image_px": 224, "batch": 8192},
]
LR = [{"until": 3, "linear": [0.05, 8.5]}, {"until": "end", "cosine": [8.5, 0.05]}]


def make_plan(**schedule: Any) -> Plan:
    recipe = recipe_from_dict(
        {"model": {"name": "any"}, "phases": PHASES, "schedule": {"lr": LR, **schedule}}
    )
    return Plan(recipe, 1_281_167)


def render(plan: Plan, width: int) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(plan_table(plan))
    return capture.get().splitlines()


def test_a_row_says_what_its_phase_does() -> None:
    rows = [" ".join(line.split()) for line in render(make_plan(weight_decay=5e-5), 160)]
    assert rows[0] == "1,281,167 images, 29 epochs, 2,201 steps"
    assert any(
        row.startswith("0 21 128 28,672 28,471 945 0.05 → 8.5 → 1.88")
        and row.endswith("26,904,507")
        for row in rows
    )
    assert any(row.startswith("1 8 224 8,192 8,161 1,256") and "0.9 5e-05" in row for row in rows)
    assert rows[-1] == "all 29 2,201 37,153,843"


def test_numbers_are_whole_in_a_narrow_window() -> None:
    text = "\n".join(render(make_plan(weight_decay=5e-5), 80))
    assert "…" not in text
    for number in ("28,672", "28,471", "1,256", "26,904,507", "37,153,843"):
        assert number in text


def test_the_peak_shows_even_where_a_long_run_is_sampled() -> None:
    recipe = recipe_from_dict(
        {
            "model": {"name": "any"},
            "phases": [{"epochs": 90, "image_px": 224, "batch": 32}],
            "schedule": {
                "lr": [
                    {"until": "1.5%", "linear": [0.0, 1.0]},
                    {"until": "1.5001%", "constant": 7.0},
                    {"until": "end", "linear": [1.0, 0.0]},
                ]
            },
        }
    )
    rows = render(Plan(recipe, 1_281_167), 160)
    assert any("0 → 7 → " in row for row in rows)


def test_the_picture_is_a_png_with_a_panel_more_for_weight_decay(tmp_path: Path) -> None:
    draw_plan(make_plan(), tmp_path / "without.png")
    draw_plan(make_plan(weight_decay=5e-5), tmp_path / "with.png")
    with Image.open(tmp_path / "without.png") as without, Image.open(tmp_path / "with.png") as more:
        assert without.format == more.format == "PNG"
        assert without.width == more.width
        assert more.height > without.height
        assert min(more.convert("L").tobytes()) < 100  # something dark was drawn


def test_a_run_of_one_step_with_no_learning_rate_can_be_drawn(tmp_path: Path) -> None:
    recipe = recipe_from_dict(
        {
            "model": {"name": "any"},
            "phases": [{"epochs": 1, "image_px": 8, "batch": 4}],
            "schedule": {"lr": 0},
        }
    )
    draw_plan(Plan(recipe, 3), tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 0


def test_a_picture_that_can_not_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RaytrainError, match="can't write the picture"):
        draw_plan(make_plan(), tmp_path / "missing" / "plan.png")
