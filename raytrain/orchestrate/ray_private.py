"""The one use of what Ray doesn't promise to keep: which machines are about to leave.

The public ``ray.train.get_preemption_info`` is a meeting of all workers, at every step, and comes
with a controller that waits for the end of the notice. ``tests/test_resize.py`` drains a machine,
and so fails when Ray changes this.
"""

from __future__ import annotations

from typing import Any

import ray

KNOWN_VERSIONS = ((2, 55), (2, 60))
"""The first and the last version of Ray in which this was seen to work."""


def draining_nodes() -> dict[str, int]:
    """Machines that are being drained, and when they end.

    Returns:
        Node ID -> UNIX time in ms, 0 where no time was said. Empty in versions of Ray that don't
        tell: there, a machine that leaves is a machine that was lost.
    """
    if not notices_are_seen():
        return {}
    told: dict[str, int] = _state().get_draining_nodes()
    return told


def notices_are_seen() -> bool:
    """Whether this version of Ray tells."""
    return hasattr(_state(), "get_draining_nodes")


def _state() -> Any:
    return getattr(getattr(ray._private, "state", None), "state", None)
