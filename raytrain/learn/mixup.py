"""Mixup: images and labels mixed in pairs (Zhang et al. 2017, https://arxiv.org/abs/1710.09412)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from raytrain.recipe.plan import Plan, Step
from raytrain.world import World


@dataclass(frozen=True)
class Mixup:
    """Mixes images 2k and 2k + 1 of a step's order, each with the other.

    How much is a function of the recipe's seed, the step and k, and a worker's share holds its
    pairs whole (``Plan.share_of``), so a step's images are the same for every number of workers.
    Neighbours are a random pair, as blocks hold their images in random order.

    Attributes:
        plan: the run. Shares are drawn from Beta(a, a), with a the recipe's ``augment.mixup``;
            the larger share is the image's own.
        num_classes: of the labels.
    """

    plan: Plan
    num_classes: int

    def __call__(
        self, pixels: Tensor, labels: Tensor, step: Step, world: World
    ) -> tuple[Tensor, Tensor]:
        """Mix a worker's share of a step.

        Args:
            pixels: uint8, shape (n, s, s, 3).
            labels: int64, shape (n,).
            step: the step.
            world: the worker.

        Returns:
            The mixed pixels, rounded, and the share of each class in each image, float32 of shape
            (n, num_classes). An image without a neighbour, at the step's end, stays as it is.
        """
        number, device = len(labels), labels.device
        own = torch.from_numpy(self._own_shares(step, world)).to(device, non_blocking=True)
        other = (torch.arange(number, device=device) ^ 1).clamp_(max=number - 1)
        mixed = pixels[other].float().lerp_(pixels.float(), own.view(-1, 1, 1, 1))
        classes = functional.one_hot(labels, self.num_classes).float()
        shares = classes[other].lerp_(classes, own.view(-1, 1))
        return mixed.round_().to(torch.uint8), shares

    def _own_shares(self, step: Step, world: World) -> NDArray[np.float32]:
        """How much of each of a worker's images is its own, 0.5 to 1."""
        recipe = self.plan.recipe
        rng = np.random.default_rng((recipe.seed, step.index))
        first = rng.beta(recipe.augment.mixup, recipe.augment.mixup, -(-step.count // 2))
        offset, size = self.plan.share_of(step, world.rank, world.size)
        own = np.maximum(first, 1 - first).repeat(2)[offset : offset + size]
        return own.astype(np.float32)
