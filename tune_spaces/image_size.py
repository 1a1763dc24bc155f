"""Image size: smaller images first, how small, and until when.

Both phases keep the batch and the crops of the recipe's last one; its image size is that of the
second.
"""

from __future__ import annotations

from typing import Any

from ray import tune

from raytrain.orchestrate.sweep import Draw


def space(draw: Draw) -> dict[str, Any]:
    epochs = draw.recipe.num_epochs
    last = draw.recipe.phases[-1].model_dump(mode="json")
    share = draw("first size", tune.choice([0.5, 0.75, 1.0]))
    if share == 1.0 or epochs < 2:
        return {"phases": [{**last, "epochs": epochs}]}
    first = max(1, min(epochs - 1, round(epochs * draw("size changes at", tune.uniform(0.2, 0.8)))))
    return {
        "phases": [
            {**last, "epochs": first, "image_px": round(last["image_px"] * share)},
            {**last, "epochs": epochs - first},
        ]
    }
