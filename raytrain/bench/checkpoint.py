"""How long a checkpoint keeps the training loop, beside other ways to write the same state."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn
from torch.distributed import checkpoint

from raytrain.bench.measure import Spread
from raytrain.learn.models import build_model
from raytrain.learn.optim import optimizer_state
from raytrain.recipe.types import Model
from raytrain.run.checkpoint import CheckpointFolder, CheckpointWriter, Snapshot

_TICK_SECONDS = 0.001
dcp: Any = checkpoint  # some of its public names are missing from its types

OURS, SYNC, TORCH, DCP = (
    "raytrain, in a thread",
    "raytrain, in the loop",
    "torch.save, in the loop",
    "torch.distributed.checkpoint, in a thread",
)


@dataclass(frozen=True)
class Cost:
    """What one checkpoint costs, in seconds of wall time.

    Attributes:
        blocked: the loop waits before it may change its weights again.
        stall: longest time after that in which the loop, which then does nothing but look at the
            clock every millisecond, couldn't.
        total: until all is on the disk (torch.save: in the system's cache, unchecked).
    """

    blocked: float
    stall: float
    total: float


@dataclass(frozen=True)
class CheckpointReport:
    """Repeated costs of rivals that took turns.

    Attributes:
        megabytes: of the state, in 1e6 bytes.
        load: other processes that wanted a core in the last minute, on average, at the end.
        costs: of each rival, a Cost a turn.
    """

    megabytes: float
    load: float
    costs: dict[str, list[Cost]]

    def as_json(self) -> str:
        """All numbers."""
        return json.dumps(asdict(self), indent=1)

    def table(self) -> Table:
        """For a person."""
        table = Table(
            title=f"a checkpoint of {self.megabytes:.0f} MB, seconds: median (least to most); "
            f"load {self.load:.1f} on {os.cpu_count()} cores"
        )
        for heading in ("", "loop blocked", "longest stall after", "total"):
            table.add_column(heading, justify="right" if heading else "left")
        for name, costs in self.costs.items():
            cells = [
                Spread.of(getattr(cost, key) for cost in costs)
                for key in ("blocked", "stall", "total")
            ]
            table.add_row(name, *(f"{c.median:.3f} ({c.low:.3f} to {c.high:.3f})" for c in cells))
        return table


def bench_checkpoint(
    model: str, folder: Path | None, repeats: int, device: str
) -> CheckpointReport:
    """Measure checkpoints of a model with momentum; rivals take turns, after one round unmeasured.

    Args:
        model: name as in a recipe.
        folder: where to write; None: the system's folder for temporary files.
        repeats: turns of each rival.
        device: torch device name.
    """
    snapshot, weights = _state(model, device)
    with tempfile.TemporaryDirectory(dir=folder, prefix="raytrain-bench-") as place:
        rivals = _rivals(snapshot, Path(place))
        for measure in rivals.values():
            measure()
        costs: dict[str, list[Cost]] = {name: [] for name in rivals}
        for _ in range(repeats):
            for name, measure in rivals.items():
                costs[name].append(measure())
    return CheckpointReport(weights / 1e6, os.getloadavg()[0], costs)


def _state(name: str, device: str) -> tuple[Snapshot, int]:
    network = build_model(Model(name=name), 1000).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    snapshot = Snapshot(
        step=1,
        epoch=0.0,
        seconds=0.0,
        validate=False,
        model=network.state_dict(),
        training={"optimizer": optimizer_state(optimizer, network), "scaler": {}},
    )
    return snapshot, _bytes(network, optimizer)


def _bytes(network: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    buffers = [v for of in optimizer.state.values() for v in of.values() if torch.is_tensor(v)]
    tensors = [*network.state_dict().values(), *buffers]
    return sum(t.numel() * t.element_size() for t in tensors)


def _rivals(snapshot: Snapshot, place: Path) -> dict[str, Callable[[], Cost]]:
    folder = CheckpointFolder(place / "checkpoints", keep=1)
    writer = CheckpointWriter(folder, lambda _: None, _fail)
    state = {"model": snapshot.model, "training": snapshot.training}
    flat = snapshot.model | {
        f"{name}.{key}": value
        for name, of in snapshot.training["optimizer"]["state"].items()
        for key, value in of.items()
    }

    def in_a_thread() -> Cost:
        began = time.perf_counter()
        writer.write(snapshot, needed=True)
        blocked = time.perf_counter() - began
        stall = _longest_stall(writer.is_writing)
        writer.finish()
        return Cost(blocked, stall, time.perf_counter() - began)

    rivals = {
        OURS: in_a_thread,
        SYNC: lambda: _in_loop(lambda: folder.write(snapshot)),
        TORCH: lambda: _in_loop(lambda: torch.save(state, place / "state.pt")),
    }
    if hasattr(dcp, "HuggingFaceStorageWriter"):
        rivals[DCP] = lambda: _with_dcp(flat, place / "dcp")
    return rivals


def _in_loop(write: Callable[[], object]) -> Cost:
    began = time.perf_counter()
    write()
    spent = time.perf_counter() - began
    return Cost(spent, 0.0, spent)


def _with_dcp(flat: dict[str, torch.Tensor], place: Path) -> Cost:
    began = time.perf_counter()
    future = dcp.async_save(
        flat, storage_writer=dcp.HuggingFaceStorageWriter(str(place)), no_dist=True
    )
    blocked = time.perf_counter() - began
    stall = _longest_stall(lambda: not future.done())
    future.result()
    return Cost(blocked, stall, time.perf_counter() - began)


def _longest_stall(going_on: Callable[[], bool]) -> float:
    """Longest time that this thread was kept from its next look while something goes on."""
    longest, last = 0.0, time.perf_counter()
    while going_on():
        time.sleep(_TICK_SECONDS)
        now = time.perf_counter()
        longest, last = max(longest, now - last - _TICK_SECONDS), now
    return longest


def _fail(step: int, reason: str) -> None:
    raise RuntimeError(f"step {step}: {reason}")
