"""Where trials are compared with each other: rungs of successive halving, in samples seen."""

from __future__ import annotations

import math
from dataclasses import dataclass

from raytrain.errors import RaytrainError
from raytrain.recipe.load import change_recipe
from raytrain.recipe.types import Recipe


@dataclass(frozen=True)
class Rungs:
    """Rungs at ``grace_epochs * factor^k`` epochs.

    An epoch has the same number of images for every batch and image size, so a rung at the end of
    an epoch is at the same number of samples for every trial.

    Attributes:
        num_images: training images.
        num_epochs: epochs of a whole trial.
        grace_epochs: epochs before the first rung.
        factor: about one of this many trials passes a rung; also the ratio of rungs.
    """

    num_images: int
    num_epochs: int
    grace_epochs: int
    factor: int

    def __post_init__(self) -> None:
        if not 1 <= self.grace_epochs <= self.num_epochs:
            raise RaytrainError(
                f"--grace-epochs {self.grace_epochs}: a trial has {self.num_epochs} epochs; "
                f"give 1 to {self.num_epochs}"
            )
        if self.factor < 2:
            raise RaytrainError(f"--factor {self.factor}: must be at least 2")

    @property
    def most_samples(self) -> int:
        """Images that a whole trial sees, repeats counted."""
        return self.num_images * self.num_epochs

    @property
    def samples(self) -> tuple[int, ...]:
        """The rungs below a whole trial, ascending, in samples seen."""
        rungs: list[int] = []
        epochs = self.grace_epochs
        while epochs < self.num_epochs:
            rungs.append(epochs * self.num_images)
            epochs *= self.factor
        return tuple(rungs)

    def reached(self, samples: int) -> int:
        """How many rungs a trial has come to after so many samples."""
        return sum(samples >= rung for rung in self.samples)

    def validated(self, recipe: Recipe) -> Recipe:
        """The recipe with validations no rarer than before, and one at each rung."""
        every = math.gcd(recipe.validation.every_epochs, self.grace_epochs)
        return change_recipe(recipe, {"validation.every_epochs": every}, "sweep")
