"""What the driver hears of its workers, and of those that were given up."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from raytrain.orchestrate.mailbox import Mailbox

pytestmark = pytest.mark.usefixtures("ray_local")


class Asked:
    """A Mailbox whose answers are waited for."""

    def __init__(self) -> None:
        self._actor = Mailbox.remote(0.0, 0)  # type: ignore[attr-defined]

    def __call__(self, method: str, *args: Any, **more: Any) -> Any:
        return ray.get(getattr(self._actor, method).remote(*args, **more))

    def kinds(self) -> list[str]:
        return [message.kind for message in self("take")]

    def start_group(self, world_size: int) -> int:
        group: int = self("enter")
        self("begin", group, 0, world_size)
        return group


def test_a_group_that_was_given_up_is_not_heard() -> None:
    mailbox = Asked()
    lost = mailbox.start_group(2)
    assert not mailbox("put", lost, "warn", "heard")
    now = mailbox.start_group(1)
    mailbox("take")
    assert mailbox("put", lost, "warn", "late"), "it should stop"
    mailbox("lost_peer", lost)
    mailbox("fault", lost, "can't read its data", final=True)
    assert mailbox.kinds() == []
    assert mailbox("final_faults") == []
    assert not mailbox("put", now, "warn", "heard")
    assert mailbox.kinds() == ["warn"]


def test_workers_that_are_gone_without_a_word_are_a_fault_and_more_workers_are_none() -> None:
    mailbox = Asked()
    mailbox.start_group(2)
    mailbox.start_group(1)
    assert mailbox.kinds() == ["begin", "fault", "begin"]
    mailbox.start_group(3)
    assert mailbox.kinds() == ["begin"]
