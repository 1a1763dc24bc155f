"""Which group of workers follows which, on a real mailbox, with groups that only pretend."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.train

from raytrain.errors import RaytrainError
from raytrain.orchestrate import groups
from raytrain.orchestrate.cluster import Placement
from raytrain.orchestrate.groups import Groups, Watch
from raytrain.orchestrate.mailbox import Mailbox
from raytrain.recipe.load import recipe_from_dict

pytestmark = pytest.mark.usefixtures("ray_local")

STEPS = 100
PLACEMENT = Placement((1, 2), nodes=1, use_gpu=False, validator_gpu=False, beside=True)


class Play:
    """A run whose groups play parts of a script, one after another.

    Args:
        monkeypatch: takes the place of the machines.
        parts: what each group does, given the play.
        room: workers that the machines have slots for.
        changes: of the recipe.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        parts: list[Callable[[Play], None]],
        changes: dict[str, Any] | None = None,
    ) -> None:
        recipe = recipe_from_dict(
            {
                "model": {"name": "small_cnn"},
                "phases": [{"epochs": 1, "image_px": 16, "batch": 8}],
                "schedule": {"lr": 0.1},
            }
            | (changes or {})
        )
        self.room = 2
        self.leaving: dict[str, int] = {}
        self.said: list[str] = []
        self.sizes: list[int] = []
        self._parts = parts
        self.mailbox: Any = Mailbox.remote(0.0, 0)  # type: ignore[attr-defined]
        self.session: Any = SimpleNamespace(
            job=SimpleNamespace(recipe=recipe, plan=SimpleNamespace(num_steps=STEPS)),
            should_stop=False,
            say=self.said.append,
            hand_over=self.said.append,
            world_size=1,
            seconds_left=1000.0,
            startup_seconds=10.0,
        )
        monkeypatch.setattr(groups, "room_for_workers", lambda _: self.room)
        monkeypatch.setattr(groups, "draining_nodes", lambda: self.leaving)
        monkeypatch.setattr(groups, "LOOK_SECONDS", 0.01)

    def run(self) -> None:
        Groups(self.session, PLACEMENT, self.mailbox, self._trainer).run()

    def ask(self, method: str, *args: Any) -> Any:
        return ray.get(getattr(self.mailbox, method).remote(*args))

    def start(self, *nodes: str) -> int:
        """The group's workers have started and made steps."""
        for rank, node in enumerate(nodes):
            group: int = self.ask("enter", node, rank, 100 + rank, "here")
        self.ask("begin", group, 0, len(nodes))
        self.ask("put", group, "metrics", [SimpleNamespace(step=10)])
        return group

    def _trainer(self, workers: int) -> Any:
        self.sizes.append(workers)
        part = self._parts[len(self.sizes) - 1]
        return SimpleNamespace(fit=lambda: part(self))


def finishes(play: Play) -> None:
    play.start("a")


def hands_over(play: Play) -> None:
    play.start("a", "b")
    play.ask("hand_over")
    play.room = 1


def dies(play: Play) -> None:
    play.start("a", "b")
    raise ray.train.WorkerGroupError("lost", {0: RuntimeError("out of memory")})


def never_starts(play: Play) -> None:
    play.room = 1  # the machine that was lost is known by now
    raise ray.train.ControllerError(RuntimeError("the group didn't start in 10 s"))


def test_the_next_group_is_as_large_as_the_machines_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play(monkeypatch, [hands_over, finishes])
    play.run()
    assert play.sizes == [2, 1]


def test_a_loss_while_a_group_forms_is_no_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play(monkeypatch, [dies, never_starts, finishes], {"faults": {"max_restarts": 1}})
    play.run()
    assert play.sizes == [2, 2, 1]
    assert "no group" in play.said[0]


def test_restarts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play(monkeypatch, [dies, dies, dies], {"faults": {"max_restarts": 1}})
    with pytest.raises(RaytrainError, match="RuntimeError: out of memory"):
        play.run()
    assert play.sizes == [2, 2]


@pytest.mark.parametrize("room", [0, 1])
def test_the_wait_for_a_group_is_bounded(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """With too few machines, and with machines on which no group ever starts."""
    play = Play(monkeypatch, [never_starts] * 1000, {"faults": {"wait_s": 0.3}})
    play.room = room
    with pytest.raises(RaytrainError, match=r"no group of at least 1 workers has started for 0"):
        play.run()


def test_a_notice_is_seen_where_workers_run(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play(monkeypatch, [])
    play.ask("open")
    group = play.start("a", "b")
    watch = Watch(play.session, PLACEMENT, play.mailbox)
    play.room, play.leaving = 1, {"elsewhere": 0}
    watch.look()
    assert not play.ask("put", group, "say", "more")
    play.leaving = {"b": 0}
    watch._next_look = 0.0
    watch.look()
    assert play.said == ["machine b is about to leave the cluster"]
    assert play.ask("put", group, "say", "more"), "the group should stop"


@pytest.mark.parametrize(("min_gain", "resizes"), [(50.0, True), (50.1, False)])
def test_more_workers_are_taken_in_when_it_pays(
    monkeypatch: pytest.MonkeyPatch, min_gain: float, resizes: bool
) -> None:
    """1000 s are left: a second worker saves 500; the start took 10."""
    resize = {"min_gain": min_gain, "settle_s": 0, "rest_s": 0}
    play = Play(monkeypatch, [], {"resize": resize})
    Watch(play.session, PLACEMENT, play.mailbox).look()
    assert bool(play.said) is resizes
