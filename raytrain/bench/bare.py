"""A training step in plain torch, as short as it can be written: what ours is compared with."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from raytrain.data.reader import Batch
from raytrain.train import Job, build_job_model
from raytrain.world import World

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class BareStep:
    """The model of a recipe with DistributedDataParallel, torch's SGD and cross-entropy.

    The learning rate is fixed; pixels become input as in torchvision's ``ToTensor`` and
    ``Normalize``.

    Args:
        job: whose recipe gives model, precision, loss and normalisation.
        world: this worker; with more than one, torch.distributed's group must be there.

    Attributes:
        model: without the wrapper.
        optimizer: of its parameters.
    """

    def __init__(self, job: Job, world: World) -> None:
        recipe = job.recipe
        self._device = torch.device(world.device)
        torch.manual_seed(recipe.seed)
        channels_last = recipe.precision.channels_last
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        self.model = build_job_model(job).to(self._device).to(memory_format=self._layout)
        shared = DistributedDataParallel(self.model) if world.size > 1 else self.model
        self._shared: nn.Module = shared
        self.optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=0.01,
            momentum=0.9,
            weight_decay=1e-4,
            nesterov=recipe.optimizer.name == "nag",
        )
        self._criterion = nn.CrossEntropyLoss(label_smoothing=recipe.loss.label_smoothing)
        self._mean, self._std = (
            torch.tensor(values, device=self._device).view(1, 3, 1, 1)
            for values in (recipe.normalize.mean, recipe.normalize.std)
        )
        self._dtype = _DTYPES[recipe.precision.dtype]
        self._scaler = torch.amp.GradScaler(self._device.type, enabled=self._dtype is torch.float16)

    def __call__(self, batch: Batch) -> Tensor:
        """Make a step; gives this worker's mean loss."""
        pixels = torch.from_numpy(batch.pixels).to(self._device, non_blocking=True)
        labels = torch.from_numpy(batch.labels).to(self._device, non_blocking=True)
        images = (pixels.permute(0, 3, 1, 2).float() / 255 - self._mean) / self._std
        with torch.autocast(
            self._device.type, self._dtype, enabled=self._dtype is not torch.float32
        ):
            out = self._shared(images.to(memory_format=self._layout))
            loss: Tensor = self._criterion(out, labels)
        self.optimizer.zero_grad()
        self._scaler.scale(loss).backward()
        self._scaler.step(self.optimizer)
        self._scaler.update()
        return loss
