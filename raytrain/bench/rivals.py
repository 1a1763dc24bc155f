"""Training as others do it, to compare seconds to a target with: plain torch loops.

Each rival trains the model of a recipe of ours on the same images and cores, at one image size with
one batch size, with a DataLoader that decodes and crops by Pillow and torchvision. They are given
what costs them nothing: JPEG files in memory, the recipe's memory format, and a validation after
every epoch that ends the run at the target.

- ``plain`` is torchvision's reference for classification: SGD with momentum 0.9, weight decay
  1e-4, a linear warm-up over 5 epochs from 1 % and a cosine to 0
  (https://github.com/pytorch/vision/tree/main/references/classification).
- ``timm`` is timm's train.py with its defaults, by timm's own functions: SGD with Nesterov's
  momentum 0.9, weight decay 2e-5, label smoothing 0.1, colour jitter, a warm-up over 5 epochs from
  1e-5 and a cosine to 0, set once an epoch.

Both take 0.1 as the learning rate of 256 images and scale it with the batch.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from raytrain.data.shards import ShardSet
from raytrain.errors import RaytrainError
from raytrain.learn.models import build_model
from raytrain.recipe.load import load_recipe
from raytrain.recipe.types import Recipe

RIVALS = ("plain", "timm")
_WARM_UP = 5  # epochs, in both references


@dataclass(frozen=True)
class Settings:
    """What a user may tune of a rival.

    Attributes:
        epochs: of the whole run.
        px: side of the images.
        batch: images of a step.
        lr: learning rate after the warm-up; None for 0.1 * batch / 256.
        crop: least share of the area that a random crop keeps.
    """

    epochs: int
    px: int
    batch: int
    lr: float | None = None
    crop: float = 0.08

    @classmethod
    def of(cls, recipe: Recipe, changes: Sequence[str]) -> Settings:
        """The epochs, largest image size and first batch of a recipe, with changes ``key=value``.

        Raises:
            RaytrainError: an unknown key, or a value that is no number.
        """
        settings = cls(
            epochs=recipe.num_epochs,
            px=max(phase.image_px for phase in recipe.phases),
            batch=recipe.phases[0].batch,
        )
        kinds = {"epochs": int, "px": int, "batch": int, "lr": float, "crop": float}
        for change in changes:
            key, _, value = change.partition("=")
            if key not in kinds:
                known = ", ".join(kinds)
                raise RaytrainError(f"--against: {change}: unknown key; known here: {known}")
            try:
                settings = replace(settings, **{key: kinds[key](value)})
            except ValueError as error:
                raise RaytrainError(f"--against: {change}: {value!r} is no number") from error
        return settings

    @property
    def peak_lr(self) -> float:
        """The learning rate after the warm-up."""
        return 0.1 * self.batch / 256 if self.lr is None else self.lr


@dataclass(frozen=True)
class Method:
    """What differs between the rivals.

    Attributes:
        optimizer: of the model's parameters.
        criterion: the training loss.
        augment: of a training image.
        after_epoch: sets the learning rate of the next epoch, given the number of epochs done.
    """

    optimizer: Optimizer
    criterion: nn.Module
    augment: Callable[[Image.Image], Tensor]
    after_epoch: Callable[[int], None]


def torchvision_reference(model: nn.Module, recipe: Recipe, settings: Settings) -> Method:
    """The rival ``plain``."""
    optimizer = SGD(model.parameters(), lr=settings.peak_lr, momentum=0.9, weight_decay=1e-4)
    warm_up = min(_WARM_UP, settings.epochs - 1)
    cosine = CosineAnnealingLR(optimizer, T_max=settings.epochs - warm_up)
    schedule: Any = cosine
    if warm_up:
        first = LinearLR(optimizer, start_factor=0.01, total_iters=warm_up)
        schedule = SequentialLR(optimizer, [first, cosine], milestones=[warm_up])
    augment = transforms.Compose(
        [
            transforms.RandomResizedCrop(settings.px, scale=(settings.crop, 1.0)),
            transforms.RandomHorizontalFlip(),
            *_to_input(recipe),
        ]
    )
    return Method(optimizer, nn.CrossEntropyLoss(), augment, lambda _done: schedule.step())


def timm_default(model: nn.Module, recipe: Recipe, settings: Settings) -> Method:
    """The rival ``timm``."""
    from timm.data import create_transform  # type: ignore[attr-defined]  # noqa: PLC0415 (an extra)
    from timm.optim import create_optimizer_v2  # type: ignore[attr-defined]  # noqa: PLC0415
    from timm.scheduler import CosineLRScheduler  # type: ignore[attr-defined]  # noqa: PLC0415

    lr = settings.peak_lr
    optimizer = create_optimizer_v2(model, opt="sgd", lr=lr, weight_decay=2e-5, momentum=0.9)
    schedule = CosineLRScheduler(
        optimizer,
        t_initial=settings.epochs,
        warmup_t=min(_WARM_UP, settings.epochs - 1),
        warmup_lr_init=1e-5,
    )
    augment = create_transform(
        settings.px,
        is_training=True,
        scale=(settings.crop, 1.0),
        color_jitter=0.4,
        interpolation="bilinear",
        mean=recipe.normalize.mean,
        std=recipe.normalize.std,
    )
    schedule.step(0)
    return Method(optimizer, nn.CrossEntropyLoss(label_smoothing=0.1), augment, schedule.step)


METHODS = {"plain": torchvision_reference, "timm": timm_default}


class StoredJpegs(Dataset[tuple[Tensor, int]]):
    """A split of a ShardSet as JPEG files in memory, decoded by Pillow when asked for.

    Args:
        shards: the set; its largest stored size is used.
        split: which split.
        transform: of a Pillow image.
    """

    def __init__(
        self, shards: ShardSet, split: str, transform: Callable[[Image.Image], Tensor]
    ) -> None:
        self._transform = transform
        self._rows = [
            (row["image"], row["label"])
            for block in shards.blocks(split)
            for row in shards.read_block(split, shards.sizes[-1], block)
            .select(["image", "label"])
            .to_pylist()
        ]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        jpeg, label = self._rows[index]
        return self._transform(Image.open(io.BytesIO(jpeg)).convert("RGB")), label


def train_rival(
    name: str, recipe: Recipe, shards: ShardSet, settings: Settings, seed: int
) -> Iterator[dict[str, float]]:
    """Train a rival to the recipe's target or to its last epoch.

    Yields:
        After each epoch ``epoch``, ``seconds`` since the start, ``top1`` as a share, ``loss``.
    """
    began = time.perf_counter()
    torch.manual_seed(seed)
    layout = torch.channels_last if recipe.precision.channels_last else torch.contiguous_format
    model = build_model(recipe.model, len(shards.classes)).to(memory_format=layout)
    method = METHODS[name](model, recipe, settings)
    cores = os.cpu_count() or 1
    training = DataLoader(
        StoredJpegs(shards, "train", method.augment),
        settings.batch,
        shuffle=True,
        num_workers=cores,
        persistent_workers=True,
    )
    centre = transforms.Compose(
        [
            transforms.Resize(round(settings.px / recipe.validation.crop_ratio)),
            transforms.CenterCrop(settings.px),
            *_to_input(recipe),
        ]
    )
    validation = DataLoader(
        StoredJpegs(shards, "val", centre),
        recipe.validation.batch,
        num_workers=cores,
        persistent_workers=True,
    )
    for epoch in range(settings.epochs):
        model.train()
        losses = 0.0
        for images, labels in training:
            loss = method.criterion(model(images.to(memory_format=layout)), labels)
            method.optimizer.zero_grad()
            loss.backward()
            method.optimizer.step()
            losses += loss.item() * len(labels)
        method.after_epoch(epoch + 1)
        top1 = _accuracy(model, validation, layout)
        yield {
            "epoch": epoch + 1,
            "seconds": time.perf_counter() - began,
            "top1": top1,
            "loss": losses / shards.num_images("train"),
        }
        if recipe.target.top1 and top1 >= recipe.target.top1:
            return


@torch.no_grad()
def _accuracy(model: nn.Module, validation: DataLoader[Any], layout: torch.memory_format) -> float:
    model.eval()
    right = images = 0
    for pixels, labels in validation:
        right += int((model(pixels.to(memory_format=layout)).argmax(1) == labels).sum())
        images += len(labels)
    return right / images


def _to_input(recipe: Recipe) -> list[Callable[[Any], Any]]:
    return [
        transforms.ToTensor(),
        transforms.Normalize(recipe.normalize.mean, recipe.normalize.std),
    ]


def main(arguments: Sequence[str]) -> None:
    """``python -m raytrain.bench.rivals NAME RECIPE SET OUT SEED [KEY=VALUE ...]``.

    Writes a line for each epoch to ``validations.jsonl`` in the folder OUT.
    """
    name, recipe_name, address, out, seed, *changes = arguments
    recipe = load_recipe(recipe_name)
    settings = Settings.of(recipe, changes)
    with Path(out, "validations.jsonl").open("w", encoding="utf-8") as file:
        for row in train_rival(name, recipe, ShardSet.open(address), settings, int(seed)):
            file.write(json.dumps(row) + "\n")
            file.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
