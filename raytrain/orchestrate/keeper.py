"""The newest state of a run in memory beside the driver, where no lost worker takes it along.

A module of its own, so that the actor's process imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


@ray.remote(num_cpus=0)
class Keeper:
    """Holds one state: the last that it was given.

    Its machine has room for two: the one that is held, and the one on its way in Ray's object
    store, which is copied once the one before is let go. Where the process is lost another one
    takes its place, without a state.
    """

    def __init__(self) -> None:
        self._group = 0
        self._kept: tuple[Any, ...] | None = None

    def keep(
        self, group: int, about: dict[str, Any], validates: bool, files: dict[str, Any]
    ) -> None:
        """Take a state, unless it is of an earlier group than the last: one that Ray gave up.

        Its bytes are copied: those that Ray hands over go with the worker that sent them.

        Args:
            group: number of the workers' group among those that began.
            about, validates, files: fields of ``raytrain.run.checkpoint.Packed``.
        """
        if group < self._group:
            return
        self._group, self._kept = group, None  # not two here beside the one in Ray's store
        own = {name: (header, np.array(numbers)) for name, (header, numbers) in files.items()}
        self._kept = (about, validates, own)

    def step(self) -> int:
        """Steps done of the state, 0 without one."""
        return 0 if self._kept is None else int(self._kept[0]["step"])

    def kept(self) -> tuple[Any, ...] | None:
        """The state, or None."""
        return self._kept


def keeper_beside_me() -> Any:
    """A Keeper on this machine."""
    here = ray.get_runtime_context().get_node_id()
    node = NodeAffinitySchedulingStrategy(here, soft=False)
    options = Keeper.options(scheduling_strategy=node, max_restarts=-1)  # type: ignore[attr-defined]
    make: Callable[..., Any] = options.remote
    return make()
