"""Losses, summed over the images so that any split of a step adds up to the same."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from raytrain.errors import RaytrainError
from raytrain.recipe.types import Loss

LossFunction = Callable[[Tensor, Tensor], Tensor]


def build_loss(spec: Loss) -> LossFunction:
    """Cross-entropy of each image, with label smoothing (Szegedy et al. 2015, section 7).

    Labels are classes (n,), or the share of each class in each image (n, classes).
    """

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(
            logits, labels, label_smoothing=spec.label_smoothing, reduction="none"
        )

    return loss


def loss_sum(loss: LossFunction, logits: Tensor, labels: Tensor) -> Tensor:
    """The loss summed over a batch, from a function that gives one number an image or their mean.

    Args:
        loss: takes logits (n, classes) and labels (n,); gives shape (n,) or a scalar mean.
        logits: shape (n, classes).
        labels: int64, shape (n,), or with mixup float32, shape (n, classes).

    Raises:
        RaytrainError: the function gave another shape.
    """
    value = loss(logits, labels)
    if value.ndim == 0:
        return value * len(labels)
    if value.shape != labels.shape[:1]:
        raise RaytrainError(
            f"loss: gave shape {tuple(value.shape)} for {len(labels)} images; "
            "it must give their mean or one number an image"
        )
    return value.sum()


def count_correct(logits: Tensor, labels: Tensor, k: int) -> Tensor:
    """How many labels are among the k highest logits (all classes where there are fewer than k).

    Returns:
        int64 scalar on the logits' device.
    """
    k = min(k, logits.shape[1])
    top = logits.topk(k, dim=1).indices
    return (top == labels[:, None]).sum()


def has_batch_statistics(model: nn.Module) -> bool:
    """Whether the model keeps statistics of its batches, as BatchNorm does."""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
