"""Momentum: constant, a cycle against the learning rate, or two pieces.

The cycle is that of MoXing's record: momentum falls while the learning rate rises, from 0.98 to
0.90 there, and comes back while it falls (L. Smith, https://arxiv.org/abs/1803.09820).
"""

from __future__ import annotations

from typing import Any

from ray import tune

from raytrain.orchestrate.sweep import Draw


def space(draw: Draw) -> dict[str, Any]:
    shape = draw("momentum", tune.choice(["constant", "cycle", "two pieces"]))
    high = draw("momentum high", tune.uniform(0.90, 0.98))
    if shape == "constant":
        return {"schedule.momentum": high}
    low = draw("momentum low", tune.uniform(0.75, 0.92))
    draw.require(low < high, "momentum low is above momentum high")
    turn = f"{draw('momentum turns at %', tune.quniform(10, 50, 5)):g}%"
    if shape == "cycle":
        pieces = [{"until": turn, "linear": [high, low]}, {"until": "end", "cosine": [low, high]}]
    else:
        pieces = [{"until": turn, "constant": low}, {"until": "end", "constant": high}]
    return {"schedule.momentum": pieces}
