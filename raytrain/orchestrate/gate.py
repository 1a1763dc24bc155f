"""A gate that an actor keeps; a module of its own, so that the actor's process imports no more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


@ray.remote(num_cpus=0)
class _Gate:
    """Tells where to begin, and holds back whoever waits for a number until it may pass.

    Args:
        opened: numbers below this one may pass from the start.
    """

    def __init__(self, opened: int) -> None:
        self._opened = opened
        self._changed = asyncio.Event()
        self._beginning = 0
        self._begun = asyncio.Event()

    async def begin(self, at: int) -> None:
        """Say where to begin, once."""
        self._beginning = at
        self._begun.set()

    async def beginning(self) -> int:
        """Where to begin, once that was said."""
        await self._begun.wait()
        return self._beginning

    async def wait(self, number: int) -> int:
        """Returns once ``number`` may pass: all below the result may."""
        while number >= self._opened:
            self._changed.clear()
            await self._changed.wait()
        return self._opened

    async def open(self, below: int) -> None:
        """Let all numbers below this one pass."""
        self._opened = max(self._opened, below)
        self._changed.set()


def gate_beside_me(opened: int) -> Any:
    """Start a gate on this node; it ends with the last handle to it.

    Args:
        opened: numbers below this one may pass from the start.

    Returns:
        The actor's handle, with ``begin(at)``, ``beginning()``, ``wait(number)``, ``open(below)``.
    """
    here = ray.get_runtime_context().get_node_id()
    node = NodeAffinitySchedulingStrategy(here, soft=False)
    make: Callable[..., Any] = _Gate.options(scheduling_strategy=node).remote  # type: ignore[attr-defined]
    return make(opened)
