"""Workers of which any may be lost in any step: torchft's replica groups of one worker each.

Before each step the workers that are there form a quorum (torchft's Lighthouse finds it), which
says who each one is in this step. Where a worker is lost on the way, the exchange fails for all,
nobody's optimizer steps, and those left form the next quorum and make the same step again, with
its images divided among them anew. A worker that comes, or was left behind, is given the state of
training by a peer as it joins.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain.errors import RaytrainError
from raytrain.parallel.team import State
from raytrain.world import World

if TYPE_CHECKING:
    from torchft import Manager
    from torchft.process_group import ProcessGroup

HEARTBEAT_S = 0.1
LOST_AFTER_S = 0.4
"""Seconds without a heartbeat after which the Lighthouse counts a worker as lost."""
TICK_S = 0.02
"""Seconds between two looks of the Lighthouse at who is there."""
_MOST_TRIES = 50  # of one step


@dataclass(frozen=True)
class Waits:
    """Most seconds of each wait of a worker for others.

    Attributes:
        exchange_s: for a peer's part of an exchange: after this, a peer that is there but doesn't
            move counts as hung.
        quorum_s: for enough workers to form a quorum.
    """

    exchange_s: float
    quorum_s: float

    def lighthouse(self, fewest: int) -> dict[str, int]:
        """The Lighthouse's settings.

        Args:
            fewest: workers without which no step is made.
        """
        return {
            "min_replicas": fewest,
            "join_timeout_ms": round(1000 * self.exchange_s),
            "quorum_tick_ms": round(1000 * TICK_S),
            "heartbeat_timeout_ms": round(1000 * LOST_AFTER_S),
        }


def check_torchft() -> None:
    """Refuse where torchft isn't installed.

    Raises:
        RaytrainError: with what to install.
    """
    if find_spec("torchft") is None:
        raise RaytrainError(
            "faults.elastic: step needs torchft, which isn't installed; "
            "pip install 'raytrain[elastic]', or use --elastic restart"
        )


class ReplicaTeam:
    """This worker as one of torchft's replica groups.

    A store of its own (``MASTER_ADDR``, ``MASTER_PORT``) and the Lighthouse
    (``TORCHFT_LIGHTHOUSE``) must be there, as Ray's TorchftConfig makes them.

    Args:
        world: this worker's seat: its rank is its place among all that there may be.
        waits: how long it waits for others.

    Attributes:
        world: who this worker is in the step that is being made.
        quorum: number of the quorum that makes the step; it grows.
        formed_anew: whether that is another quorum than the last step's.
        is_heir: whether this worker is the first of those in it who made the step before.
    """

    forms_in_steps = True

    def __init__(self, world: World, waits: Waits) -> None:
        self.world = world
        self.quorum = -1
        self.formed_anew = self.is_heir = False
        self._made_last = False
        self._waits = waits
        self._manager: Manager | None = None
        self._give: Callable[[], State] = dict
        self._take: Callable[[State], None] = lambda _state: None
        self._end: Callable[[], None] = lambda: None

    def prepare(
        self,
        give: Callable[[], State],
        take: Callable[[State], None],
        end: Callable[[], None],
    ) -> None:
        """Say how the state goes from peer to peer, and what each worker ends with."""

        def join(state: State) -> None:
            self._made_last = False
            take(state)

        self._give, self._take, self._end = give, join, end

    def steps(self, start: int, end: int) -> Iterator[int]:
        """The steps to make, each as often as it takes; who joins begins where the others are."""
        group = _process_group(self.world.device, self._waits)
        self._manager = manager = self._join(group)
        manager.load_state_dict({"step": start, "batches_committed": start})
        while True:
            manager.start_quorum()
            if manager.errored() is not None:  # a peer went while the quorum's group was made
                manager.should_commit()
                continue
            rank, size = manager.participating_rank(), manager.num_participants()
            assert rank is not None
            self.world = replace(self.world, rank=rank, size=size)
            self.formed_anew, self.quorum = self.quorum != group.quorum, group.quorum
            self.is_heir = self.formed_anew and self._inherits()
            if manager.current_step() < end:
                yield manager.current_step()
            elif self._has_ended():
                return

    def agree(self, values: list[int]) -> list[int]:
        """This worker's own numbers: if it is behind the others, it learns so as it joins."""
        return values

    def share_gradients(self, model: nn.Module) -> nn.Module:
        """The model as it is: ``has_made`` exchanges the gradients."""
        return model

    @torch.no_grad()
    def has_made(self, model: nn.Module, tally: Tensor, examined: Sequence[nn.Module]) -> bool:
        """Exchange all that a step needs, and commit to the step if no worker was lost in it."""
        manager = self._there()
        parameters = [p for p in model.parameters() if p.requires_grad]
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        buffers = [b for m in examined for b in m.buffers() if b.is_floating_point()]
        values = [*gradients, *buffers]
        flat = torch.cat([v.detach().float().reshape(-1) for v in values])
        total = tally.clone()
        for work in (
            manager.allreduce(flat, reduce_op=dist.ReduceOp.AVG),
            manager.allreduce(total, reduce_op=dist.ReduceOp.SUM),
        ):
            work.wait()
        if not manager.should_commit():
            return False
        self._made_last = True
        tally.copy_(total)
        for value, mean in zip(values, flat.split([v.numel() for v in values]), strict=True):
            value.copy_(mean.view_as(value))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return True

    def add_up(self, tallies: Tensor) -> Tensor:
        """The tallies, which are sums already: a worker that is lost later takes nothing away."""
        return tallies

    def leave(self) -> None:
        """Take this worker out of the next quorum."""
        if self._manager is not None:
            self._manager.shutdown(wait=False)
            self._manager = None

    def _has_ended(self) -> bool:
        """Wait for what the others still do for all; False where one was lost over that."""
        manager = self._there()
        self._end()
        manager.allreduce(torch.zeros(1, device=self.world.device)).wait()
        return bool(manager.should_commit())

    def _inherits(self) -> bool:
        """Whether no worker before this one made the step before. All of the quorum call this."""
        manager = self._there()
        made = torch.zeros(self.world.size, device=self.world.device)
        made[self.world.rank] = float(self._made_last)
        manager.allreduce(made, reduce_op=dist.ReduceOp.SUM).wait()
        if manager.errored() is not None:  # then the step fails too, and the next quorum asks
            return False
        return self._made_last and not made[: self.world.rank].any()

    def _there(self) -> Manager:
        assert self._manager is not None, "steps() has not begun"
        return self._manager

    def _join(self, group: ProcessGroup) -> Manager:
        from torchft import Manager  # noqa: PLC0415 (an extra, and slow to import)

        exchange = timedelta(seconds=self._waits.exchange_s)
        return Manager(
            pg=group,
            load_state_dict=self._take,
            state_dict=self._give,
            min_replica_size=1,  # the Lighthouse knows how many there must be
            use_async_quorum=False,
            timeout=exchange,
            quorum_timeout=timedelta(seconds=self._waits.quorum_s),
            connect_timeout=exchange,
            rank=0,
            world_size=1,
            replica_id=f"worker_{self.world.rank:05d}",
            hostname=os.environ["MASTER_ADDR"],
            heartbeat_interval=timedelta(seconds=HEARTBEAT_S),
            checkpoint_transport=_transport(group, self.world.device),
            init_sync=False,  # the seed or the checkpoint gives all the same weights
            max_retries=_MOST_TRIES,
        )


def _process_group(device: str, waits: Waits) -> Any:
    """torchft's group on NCCL or Gloo, which also notes the number of its quorum."""
    from torchft import ProcessGroupGloo, ProcessGroupNCCL  # noqa: PLC0415 (as above)

    kind = ProcessGroupNCCL if torch.device(device).type == "cuda" else ProcessGroupGloo

    class Noted(kind):  # type: ignore[misc,valid-type]
        quorum = -1

        def configure(
            self,
            store_addr: str,
            replica_id: str,
            rank: int,
            world_size: int,
            quorum_id: int | None = None,
            *more: Any,
        ) -> None:
            self.quorum = -1 if quorum_id is None else quorum_id
            super().configure(store_addr, replica_id, rank, world_size, quorum_id, *more)

    return Noted(timeout=timedelta(seconds=waits.exchange_s))


def _transport(group: ProcessGroup, device: str) -> Any:
    """How a peer's state comes: through the workers' own group, read with ``weights_only``.

    torchft's own transports unpickle whatever they get, and one of them listens for HTTP.
    """
    from torchft.checkpointing import CheckpointTransport  # noqa: PLC0415 (as above)

    class Transport(CheckpointTransport[State]):  # type: ignore[misc]
        def metadata(self) -> str:
            return ""

        def send_checkpoint(
            self, dst_ranks: list[int], step: int, state_dict: State, timeout: timedelta
        ) -> None:
            buffer = io.BytesIO()
            torch.save(state_dict, buffer)
            content = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8).to(device)
            header = torch.tensor([step, len(content)], device=device)
            works = [
                group.send([tensor], rank, tag)
                for rank in dst_ranks
                for tag, tensor in enumerate((header, content), 1)
            ]
            for work in works:
                work.wait(timeout)

        def recv_checkpoint(
            self,
            src_rank: int,
            metadata: str,  # noqa: ARG002 (torchft's signature)
            step: int,
            timeout: timedelta,
        ) -> State:
            header = torch.zeros(2, dtype=torch.int64, device=device)
            group.recv([header], src_rank, 1).wait(timeout)
            told, size = header.tolist()
            if told != step:
                raise ValueError(f"a peer sent the state after step {told}, not {step}")
            content = torch.empty(size, dtype=torch.uint8, device=device)
            group.recv([content], src_rank, 2).wait(timeout)
            state: State = torch.load(
                io.BytesIO(content.cpu().numpy().tobytes()), map_location="cpu", weights_only=True
            )
            return state

    return Transport()
