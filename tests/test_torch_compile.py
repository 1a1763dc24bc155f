"""torch.compile: one program for each image size, made before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain import train as loop
from raytrain.data.shards import ShardSet
from raytrain.inline import run_inline
from raytrain.recipe.load import recipe_from_dict
from raytrain.run.history import read_jsonl
from raytrain.train import Job

Shape = tuple[int, ...]


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Shape]]:
    """The image shapes that programs were made for; Inductor's work, a minute, is left out.

    Once all are made ahead, one more is an error.
    """
    made: list[Shape] = []
    compile_model, compile_ahead = torch.compile, loop.compile_ahead

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        images = (x for x in inputs if isinstance(x, torch.Tensor) and x.ndim == 4)
        made.extend(tuple(x.shape[2:]) for x in images if x.shape[1] == 3 and x.shape[2] > 3)
        return graph.forward

    def ahead(*args: Any) -> None:
        compile_ahead(*args)
        torch.compiler.set_stance("fail_on_recompile")

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", lambda m, **k: compile_model(m, backend=backend, **k))
    monkeypatch.setattr(loop, "compile_ahead", ahead)
    yield made
    torch.compiler.set_stance("default")
    torch.compiler.reset()


def test_a_program_for_each_size_to_come_and_the_same_losses(
    drawn_set: Path, tmp_path: Path, programs: list[Shape]
) -> None:
    """Batches of 47 to 83 images at two sizes; BatchNorm's statistics aren't touched ahead."""
    rows = {}
    for name, compiled in (("plain", False), ("compiled", True)):
        recipe = recipe_from_dict(
            {
                "model": {"name": "small_cnn", "args": {"width": 4}},
                "phases": [
                    {"epochs": 1, "image_px": 16, "batch": 64},
                    {"epochs": 1, "image_px": 24, "batch": 100},
                    {"epochs": 1, "image_px": 16, "batch": 50},
                ],
                "schedule": {"lr": 0.05},
                "compile": compiled,
            }
        )
        run_inline(Job(recipe, ShardSet.open(drawn_set), tmp_path / name), "cpu", None)
        files = ("metrics.jsonl", "validations.jsonl")
        rows[name] = [row["loss"] for file in files for row in read_jsonl(tmp_path / name / file)]
    assert programs == [(16, 16), (24, 24)]
    assert rows["compiled"] == pytest.approx(rows["plain"], rel=1e-6)
