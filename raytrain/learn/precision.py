"""Number formats: autocast for the forward pass, fp16's loss scale, tf32."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from raytrain.recipe.types import Precision

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class NumberFormat:
    """How a worker computes: the recipe's dtype under autocast, weights kept in fp32.

    Mixed precision after Micikevicius et al. 2017. fp16 has an adaptive loss scale (torch's
    GradScaler), whose state is part of the checkpoint; the other formats have scale 1. tf32 is
    set for the whole process.

    Args:
        spec: the recipe's section.
        device: torch device name.
    """

    def __init__(self, spec: Precision, device: str) -> None:
        self._device_type = torch.device(device).type
        self._dtype = _DTYPES[spec.dtype]
        self.channels_last = spec.channels_last
        self.scaler = torch.amp.GradScaler(
            self._device_type, init_scale=spec.loss_scale, enabled=spec.dtype == "fp16"
        )
        self._one = torch.ones((), device=device)
        if self._device_type == "cuda":
            allow_tf32(spec.tf32)

    def autocast(self) -> AbstractContextManager[object]:
        lower = self._dtype is not torch.float32
        return torch.autocast(self._device_type, dtype=self._dtype, enabled=lower)

    def scale(self) -> Tensor:
        """The loss scale, a scalar on the device: to look at it would wait for the device."""
        return self.scaler.scale(self._one)

    def step(self, optimizer: Optimizer, clip_norm: float | None = None) -> None:
        """Make the optimizer's step and clear the gradients.

        With fp16, a step whose gradients overflowed is left out, and the scale goes down.

        Args:
            optimizer: whose gradients are those of the whole step, so the mean over all workers.
            clip_norm: most that the norm of all gradients may be; larger ones are scaled down
                (Pascanu et al. 2012).
        """
        if clip_norm is not None:
            self.scaler.unscale_(optimizer)
            params = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(params, clip_norm)
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()

    def place(self, model: nn.Module, device: str) -> nn.Module:
        """The model on the device, in the memory format of the recipe."""
        layout = torch.channels_last if self.channels_last else torch.preserve_format
        return model.to(device=device, memory_format=layout)  # type: ignore[call-overload,no-any-return]


def allow_tf32(allowed: bool) -> None:
    """Let GPUs round the inputs of fp32 matrix products and convolutions to 10 bits, or not."""
    torch.backends.cudnn.allow_tf32 = allowed
    torch.set_float32_matmul_precision("high" if allowed else "highest")


class Normalizer:
    """uint8 images to the model's input: ``(pixel / 255 - mean) / std``, on the device.

    Args:
        mean: of R, G, B in 0 to 1.
        std: of R, G, B in 0 to 1.
        device: torch device name.
        channels_last: memory format of the result.
    """

    def __init__(
        self,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
        device: str,
        channels_last: bool,
    ) -> None:
        shape = (1, 3, 1, 1)
        self._shift = torch.tensor(mean, device=device).mul(255).view(shape)
        self._scale = torch.tensor(std, device=device).mul(255).reciprocal().view(shape)
        self._channels_last = channels_last

    def __call__(self, pixels: Tensor) -> Tensor:
        """uint8 (n, s, s, 3) -> float32 (n, 3, s, s)."""
        images = (pixels.permute(0, 3, 1, 2) - self._shift) * self._scale
        return images if self._channels_last else images.contiguous()
