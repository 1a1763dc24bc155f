"""An exponential moving average of a model's weights."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn

from raytrain.recipe.types import Ema


class WeightAverage:
    """The moving average of a model (Polyak and Juditsky 1992, in its exponential form).

    Update n keeps ``min(decay, (1 + n) / (10 + n))`` of the average, as TensorFlow's
    ExponentialMovingAverage does, so that the first weights are soon forgotten. Which update a
    step makes follows from the step number alone, so a resumed run goes on as if uninterrupted.
    BatchNorm's statistics are averaged too; whole numbers are copied.

    Args:
        model: whose weights the average starts with.
        spec: the recipe's section, with a decay.

    Attributes:
        model: a copy of the model that holds the average.
    """

    def __init__(self, model: nn.Module, spec: Ema) -> None:
        assert spec.decay is not None
        self._decay, self._every_steps = spec.decay, spec.every_steps
        self.model = deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def update(self, model: nn.Module, steps: int) -> None:
        """Take in the model's weights after ``steps`` steps, where an update is due then."""
        n, rest = divmod(steps, self._every_steps)
        if rest:
            return
        keep = min(self._decay, (1 + n) / (10 + n))
        averages: list[Tensor] = []
        values: list[Tensor] = []
        for average, value in zip(_tensors(self.model), _tensors(model), strict=True):
            if value.is_floating_point():
                averages.append(average)
                values.append(value)
            else:
                average.copy_(value)
        torch._foreach_lerp_(averages, values, 1 - keep)


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
