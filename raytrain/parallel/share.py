"""How workers share gradients, sums and buffers: torch.distributed (NCCL or Gloo), or alone."""

from __future__ import annotations

import inspect
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from raytrain.world import World


def share_gradients(model: nn.Module, world: World) -> nn.Module:
    """The model, with its gradients averaged over the workers in the backward pass.

    Uses DistributedDataParallel, which exchanges gradients in buckets while the backward pass
    still runs (Li et al. 2020). The process group must be there when ``world.size`` > 1.
    Buffers aren't exchanged at each step: ``average_buffers`` does it when somebody looks.
    """
    if world.size == 1:
        return model
    device = torch.device(world.device)
    ids = [device] if device.type == "cuda" else None
    # torch 2.14 renamed the switch and warns of the old name; torch 2.7 has only that one
    known = inspect.signature(DistributedDataParallel).parameters
    switch = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {switch: False, "gradient_as_bucket_view": True}
    return DistributedDataParallel(model, device_ids=ids, **options)


def without_exchange(model: nn.Module) -> AbstractContextManager[object]:
    """A context in which backward passes only add up gradients (all passes but a step's last)."""
    if isinstance(model, DistributedDataParallel):
        return model.no_sync()
    return nullcontext()


def sum_over_workers(values: Tensor, world: World) -> Tensor:
    """Sum a tensor over the workers, in place; every worker gets the sum."""
    if world.size > 1:
        dist.all_reduce(values)
    return values


def time_exchange(world: World, megabytes: int, repeats: int = 3) -> float:
    """Seconds of an all-reduce over the workers, the least of some.

    The first one, which makes the connections, isn't counted.

    Args:
        world: of two workers or more; all of them call this.
        megabytes: of fp32 numbers, 1e6 bytes each.
        repeats: how many are timed.
    """
    values = torch.zeros(megabytes * 250_000, device=world.device)
    times = []
    for _ in range(repeats + 1):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(values)
        if values.is_cuda:
            torch.cuda.synchronize(values.device)
        times.append(time.perf_counter() - began)
    return min(times[1:])


@torch.no_grad()
def average_buffers(model: nn.Module, world: World) -> None:
    """Set each floating-point buffer (BatchNorm's statistics) to its mean over the workers.

    Each worker has seen other images; the mean has seen them all. One exchange for all buffers.
    """
    buffers = [b for b in model.buffers() if b.is_floating_point()]
    if world.size == 1 or not buffers:
        return
    flat = torch.cat([b.float().reshape(-1) for b in buffers])
    dist.all_reduce(flat)
    flat /= world.size
    for buffer, mean in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(mean.view_as(buffer))


def agree(values: list[int], world: World) -> list[int]:
    """Rank 0's numbers, told to every worker."""
    if world.size == 1:
        return values
    told = torch.tensor(values, dtype=torch.int64, device=world.device)
    dist.broadcast(told, src=0)
    return [int(v) for v in told.tolist()]
