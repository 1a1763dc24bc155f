"""torch.compile with one program for each image size, whatever the batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Compiled(nn.Module):
    """A model whose forward and backward pass torch.compile makes faster.

    The first call with a new image size compiles, which takes a minute or so; later ones don't,
    with however many images. The weights are those of ``model`` itself, which can be called as
    before.

    Args:
        model: on the device.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.program = torch.compile(model, dynamic=False)

    def forward(self, images: Tensor) -> Tensor:
        # all sizes are built in but this one, as the batches of a phase differ by an image
        torch._dynamo.maybe_mark_dynamic(images, 0)
        logits: Tensor = self.program(images)
        return logits


def allow_programs(number: int) -> None:
    """Let torch.compile keep so many programs of one model; by default it gives up after 8."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, number)
