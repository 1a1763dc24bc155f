"""Exact validation: every image counted once, for any number of processes and any batch size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from raytrain.data.reader import Batch
from raytrain.learn.loss import LossFunction, count_correct, loss_sum
from raytrain.learn.precision import Normalizer, NumberFormat
from raytrain.run.feed import Feed


@dataclass(frozen=True, slots=True)
class Score:
    """Sums over validation images; scores of disjoint images add up.

    Attributes:
        images: how many images.
        top1: how many right first guesses.
        top5: how many labels among the first five guesses (or among all classes, if fewer).
        loss: sum of the losses.
    """

    images: float = 0
    top1: float = 0
    top5: float = 0
    loss: float = 0

    def as_list(self) -> list[float]:
        """The sums in the order of the fields."""
        return [self.images, self.top1, self.top5, self.loss]


@dataclass(frozen=True, slots=True)
class Scores:
    """The score of the weights, and of their moving average where there is one."""

    raw: Score
    ema: Score | None = None


@dataclass(frozen=True)
class Examiner:
    """All that scoring needs beside the weights and the images.

    Attributes:
        loss: gives one number an image, or their mean.
        number_format: of the forward pass.
        normalizer: pixels to input.
        device: torch device name.
    """

    loss: LossFunction
    number_format: NumberFormat
    normalizer: Normalizer
    device: str

    @torch.no_grad()
    def score(self, model: nn.Module, batches: Iterator[Batch]) -> Score:
        """Score a model; it is put in evaluation mode for that and then back.

        Args:
            model: on the device.
            batches: the images.
        """
        was_training = model.training
        model.eval()
        sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        feed = Feed(batches, self.device, ahead=2)
        try:
            for batch in feed:
                with self.number_format.autocast():
                    logits = model(self.normalizer(batch.pixels)).float()
                sums[0] += len(batch.labels)
                sums[1] += count_correct(logits, batch.labels, 1)
                sums[2] += count_correct(logits, batch.labels, 5)
                sums[3] += loss_sum(self.loss, logits, batch.labels)
        finally:
            feed.close()
            model.train(was_training)
        return Score(*sums.tolist())
