"""The workers that share each step, and what they do together.

``FixedTeam``: as many from start to end; when one is lost, all start again from a checkpoint.
``replicas.ReplicaTeam``: one may be lost in any step, and the others make that step again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from raytrain.parallel.share import agree, average_buffers, share_gradients, sum_over_workers
from raytrain.world import World

State = dict[str, Any]
"""Tensors, numbers, texts, and lists and dicts of them."""


class Team(Protocol):
    """What the loop needs of the workers that share each step."""

    @property
    def world(self) -> World:
        """Who this worker is in the step that is being made."""

    @property
    def quorum(self) -> int:
        """Grows whenever the team forms anew."""

    @property
    def forms_in_steps(self) -> bool:
        """Whether ``steps`` forms the team, again and again; else it is there from the start."""

    @property
    def formed_anew(self) -> bool:
        """Whether the team of this step is another than that of the step before."""

    @property
    def is_heir(self) -> bool:
        """Whether this worker is the first of those who made the step before: what another one
        was to do then, and is lost, it does."""

    def prepare(
        self,
        give: Callable[[], State],
        take: Callable[[State], None],
        end: Callable[[], None],
    ) -> None:
        """Say what ``steps`` needs where it forms the team.

        Args:
            give: the state of training, for a worker that joins.
            take: goes on from such a state, when joining.
            end: ends what this worker does for all; the others stay until then.
        """

    def steps(self, start: int, end: int) -> Iterator[int]:
        """The steps to make, in turn; one again where it could not be made."""

    def agree(self, values: list[int]) -> list[int]:
        """The first worker's numbers, told to all that start together."""

    def share_gradients(self, model: nn.Module) -> nn.Module:
        """The model to call, so that gradients are averaged by the end of ``has_made``."""

    def has_made(self, model: nn.Module, tally: Tensor, examined: Sequence[nn.Module]) -> bool:
        """End the exchanges of a step; gives whether the optimizer is to make it.

        Args:
            model: whose gradients are then the mean over the team.
            tally: what this worker counted, summed by the end of ``add_up``.
            examined: models whose buffers are set to their mean over the team.
        """

    def add_up(self, tallies: Tensor) -> Tensor:
        """The tallies of the last steps, summed over the workers that made them."""

    def leave(self) -> None:
        """This worker's part is done."""


class FixedTeam:
    """The workers of torch.distributed's group, or one alone.

    Args:
        world: who this worker is; with more than one, the group must be there.
    """

    quorum = 0
    forms_in_steps = False
    formed_anew = False
    is_heir = False

    def __init__(self, world: World) -> None:
        self.world = world

    def prepare(
        self,
        give: Callable[[], State],
        take: Callable[[State], None],
        end: Callable[[], None],
    ) -> None:
        """Nobody joins, and nobody's part is taken over."""

    def steps(self, start: int, end: int) -> Iterator[int]:
        """All steps, once."""
        yield from range(start, end)

    def agree(self, values: list[int]) -> list[int]:
        """Rank 0's numbers."""
        return agree(values, self.world)

    def share_gradients(self, model: nn.Module) -> nn.Module:
        """The model in DistributedDataParallel."""
        return share_gradients(model, self.world)

    def has_made(self, model: nn.Module, tally: Tensor, examined: Sequence[nn.Module]) -> bool:  # noqa: ARG002 (the backward pass has exchanged the gradients)
        """Average the buffers; an exchange that fails raises."""
        for each in examined:
            average_buffers(each, self.world)
        return True

    def add_up(self, tallies: Tensor) -> Tensor:
        """The sum over the group, in one exchange for all steps."""
        return sum_over_workers(tallies, self.world)

    def leave(self) -> None:
        """Nothing to do: the engine made the group."""
