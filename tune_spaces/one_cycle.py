"""Learning rate: up to a peak, then down; the peak, the share of warm-up, and the end."""

from __future__ import annotations

from typing import Any

from ray import tune

from raytrain.orchestrate.sweep import Draw


def space(draw: Draw) -> dict[str, Any]:
    peak = draw("lr peak", tune.loguniform(0.02, 1.0))
    warm_up = f"{draw('lr warm-up %', tune.quniform(5, 40, 5)):g}%"
    end = peak * draw("lr end / peak", tune.loguniform(1e-3, 1e-1))
    return {
        "schedule.lr": [
            {"until": warm_up, "linear": [peak / 10, peak]},
            {"until": "end", "cosine": [peak, end]},
        ]
    }
