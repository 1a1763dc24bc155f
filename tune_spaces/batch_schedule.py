"""Batch: a first one, a factor that it grows by, and where; with a rule for the learning rate.

Growing the batch does what lowering the learning rate does (S. Smith et al.,
https://arxiv.org/abs/1711.00489). The phases of the recipe are replaced by two that differ in batch
alone; image size and crops are those of its last phase.
"""

from __future__ import annotations

from typing import Any

from ray import tune

from raytrain.orchestrate.sweep import Draw


def space(draw: Draw) -> dict[str, Any]:
    epochs = draw.recipe.num_epochs
    draw.require(epochs >= 2, "a batch that grows needs at least 2 epochs")
    last = draw.recipe.phases[-1].model_dump(mode="json")
    least = max(1, last["batch"] // 4)
    batch = draw("first batch", tune.choice([least, 2 * least, 4 * least]))
    factor = draw("batch grows by", tune.choice([1, 2, 4]))
    first = max(1, min(epochs - 1, round(epochs * draw("batch grows at", tune.uniform(0.2, 0.8)))))
    draw.require(batch >= 2 * draw.workers, f"{draw.workers} workers need larger batches")
    draw.require(batch * factor <= draw.num_images, "the batch grows beyond an epoch")
    rule = draw("lr follows batch", tune.choice([True, False]))
    return {
        "phases": [
            {**last, "epochs": first, "batch": batch},
            {**last, "epochs": epochs - first, "batch": batch * factor},
        ],
        "schedule.lr_for_batch": last["batch"] if rule else None,
    }
