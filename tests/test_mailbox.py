"""What the driver hears of its workers, and of those that were given up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from raytrain.orchestrate.mailbox import Mailbox

STEP = SimpleNamespace(step=0)

pytestmark = pytest.mark.usefixtures("ray_local")


class Asked:
    """A Mailbox whose answers are waited for."""

    def __init__(self) -> None:
        self._actor = Mailbox.remote(0.0, 0)  # type: ignore[attr-defined]
        self._number = -1

    def __call__(self, method: str, *args: Any, **more: Any) -> Any:
        return ray.get(getattr(self._actor, method).remote(*args, **more))

    def kinds(self) -> list[str]:
        return [message.kind for message in self("take") if message.kind != "worker"]

    def start_group(self, world_size: int) -> int:
        self._number += 1
        self("open", self._number)
        group: int = self("enter", self._number, "a machine", 0, 1234, "here")
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


def test_workers_that_are_gone_without_a_word_are_a_fault_and_those_that_hand_over_are_none() -> (
    None
):
    mailbox = Asked()
    mailbox.start_group(2)
    mailbox.start_group(1)
    assert mailbox.kinds() == ["begin", "fault", "begin"]
    mailbox("hand_over")
    assert mailbox("put", 1, "warn", "heard"), "it should stop"
    assert mailbox("ended", 100, failed=False) == (True, False)
    mailbox.start_group(3)
    assert mailbox.kinds() == ["warn", "begin"]
    assert mailbox("ended", 100, failed=False) == (True, True)


def test_a_group_that_ends_without_a_word_is_told_at_once() -> None:
    mailbox = Asked()
    group = mailbox.start_group(2)
    mailbox("put", group, "metrics", [STEP])
    mailbox("ended", 100, failed=True)
    assert mailbox.kinds() == ["begin", "metrics", "fault"]
    mailbox.start_group(2)
    assert mailbox.kinds() == ["begin"], "told once"


def test_only_the_open_group_may_enter() -> None:
    mailbox = Asked()
    mailbox("open", 3)
    assert mailbox("enter", 4, "a machine", 0, 1234, "here") is None
    assert mailbox("enter", 3, "a machine", 0, 1234, "here") == 0
    mailbox("open", None)
    assert mailbox("enter", 3, "a machine", 1, 1235, "here") is None


def test_a_restart_is_told_in_its_parts() -> None:
    mailbox = Asked()
    first = mailbox.start_group(2)
    mailbox("put", first, "metrics", [STEP])
    assert mailbox.kinds() == ["begin", "metrics"]
    mailbox("lost_peer", first)
    second = mailbox.start_group(1)
    mailbox("put", second, "metrics", [STEP])
    mailbox("put", second, "metrics", [STEP])
    messages = {message.kind: message for message in mailbox("take") if message.kind != "worker"}
    assert sorted(messages) == ["begin", "fault", "metrics", "restarted"]
    [parts] = messages["restarted"].args
    assert sorted(parts) == ["begun_s", "entered_s", "opened_s", "stepped_s"]
    assert all(0 <= seconds < 60 for seconds in parts.values())
