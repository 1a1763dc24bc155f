"""Learning rate, momentum and batch together: each as in its own file."""

from __future__ import annotations

from typing import Any

from raytrain.orchestrate.sweep import Draw

from . import batch_schedule, momentum, one_cycle


def space(draw: Draw) -> dict[str, Any]:
    return {**one_cycle.space(draw), **momentum.space(draw), **batch_schedule.space(draw)}
