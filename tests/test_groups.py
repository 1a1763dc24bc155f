"""Which group of workers follows which, on a real mailbox, with groups that only pretend."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.train
import torch

from raytrain.errors import RaytrainError
from raytrain.orchestrate import groups
from raytrain.orchestrate.cluster import Placement
from raytrain.orchestrate.groups import Groups, Turn, Watch
from raytrain.orchestrate.mailbox import Mailbox
from raytrain.recipe.load import recipe_from_dict
from raytrain.run.checkpoint import CheckpointFolder, MemoryCopier, Packed, Snapshot

pytestmark = pytest.mark.usefixtures("ray_local")

STEPS = 100
STANDBY = {"standby": True, "max_restarts": 1}
PLACEMENT = Placement((1, 2), nodes=1, use_gpu=False, validator_gpu=False, beside=True)


def wait_for(ask: Callable[[], bool]) -> None:
    while not ask():
        time.sleep(0.02)


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
        self.turns: list[Turn] = []
        self.entered: list[int | None] = []
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

        session: Any = self.session
        self.groups = Groups(session, PLACEMENT, self.mailbox, self._trainer)

    def run(self) -> None:
        self.groups.run()

    def ask(self, method: str, *args: Any) -> Any:
        return ray.get(getattr(self.mailbox, method).remote(*args))

    def start(self, *nodes: str) -> int:
        """The group's workers have started and made steps."""
        turn = self.turns[-1]
        for rank, node in enumerate(nodes):
            group: int = self.ask("enter", turn.number, node, rank, 100 + rank, "here")
        self.ask("begin", group, 0, len(nodes))
        self.ask("put", group, "metrics", [SimpleNamespace(step=10)])
        return group

    def _trainer(self, workers: int, turn: Turn) -> Any:
        self.sizes.append(workers)
        self.turns.append(turn)
        part = self._parts[len(self.sizes) - 1]
        return SimpleNamespace(fit=lambda: part(self))


def finishes(play: Play) -> None:
    play.start("a")


def finishes_in(play: Play, turn: Turn) -> None:
    """What is left to do for a group whose workers have entered."""
    play.ask("begin", turn.number, 0, 1)


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


def stands_by(play: Play) -> None:
    """Like run_worker: wait for the turn, then go on if still wanted."""
    turn = play.turns[-1]
    play.ask("stand_by", turn.number, "a", 1)
    ray.get(turn.gate.wait.remote(turn.number))
    play.entered.append(play.ask("enter", turn.number, "a", 0, 100, "here"))
    if play.entered[-1] is not None:
        finishes_in(play, turn)


def dies_once_others_stand_by(play: Play) -> None:
    play.start("a")
    play.groups.hear("metrics")
    wait_for(lambda: play.ask("standing_by", 1) == ["a"])
    raise ray.train.WorkerGroupError("lost", {0: RuntimeError("killed")})


def test_those_who_stand_by_go_on_when_others_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play(monkeypatch, [dies_once_others_stand_by, stands_by], {"faults": STANDBY})
    play.room = 1
    play.run()
    assert play.sizes == [1, 1]
    assert play.entered == [1]
    assert [turn.gate is None for turn in play.turns] == [True, False]


def test_those_who_stand_by_are_given_up_where_their_machine_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def leaves(play: Play) -> None:
        play.start("a")
        play.groups.hear("metrics")
        wait_for(lambda: play.ask("standing_by", 1) == ["a"])
        play.ask("hand_over")
        play.leaving = {"a": 0}

    play = Play(monkeypatch, [leaves, stands_by, finishes], {"faults": STANDBY})
    play.room = 1
    play.run()
    assert play.entered == [None]
    assert play.sizes == [1, 1, 1]


def test_without_room_for_others_to_stand_by_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def dies_alone(play: Play) -> None:
        play.start("a")
        play.groups.hear("metrics")
        wait_for(lambda: len(play.sizes) == 2)
        raise ray.train.WorkerGroupError("lost", {0: RuntimeError("killed")})

    play = Play(monkeypatch, [dies_alone, never_starts, finishes], {"faults": STANDBY})
    play.room = 1
    play.run()
    assert play.sizes == [1, 1, 1]
    assert "no workers stood by" in play.said[0]


def test_a_loss_while_a_group_forms_is_no_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play(monkeypatch, [dies, never_starts, finishes], {"faults": {"max_restarts": 1}})
    play.run()
    assert play.sizes == [2, 2, 1]
    assert "no group" in play.said[0]


def snapshot(step: int) -> Snapshot:
    weight = {"weight": torch.full((2,), float(step))}
    return Snapshot(
        step=step, epoch=0.5, seconds=1.0, validate=False, model=weight, training={"scaler": {}}
    )


class Keeping(Play):
    """A run whose first group leaves states in memory, then is lost; 11 steps are recorded.

    Args:
        monkeypatch: as for Play.
        run_dir: of the run.
        states: (number of the group, steps done) of each.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, run_dir: Path, *states: tuple[int, int]
    ) -> None:
        changes = {"checkpoint": {"memory_steps": 2}}
        super().__init__(monkeypatch, [self._dies, finishes], changes)
        self.session.job.checkpoints = CheckpointFolder(run_dir / "checkpoints", keep=2)
        self._states = states

    def _dies(self, play: Play) -> None:
        self.leave_states()
        dies(play)

    def leave_states(self) -> None:
        for group, step in self._states:
            copier = MemoryCopier(partial(self._keep, group))
            copier.copy(snapshot(step))
            while copier.is_sending():
                time.sleep(0.01)

    def _keep(self, group: int, state: Packed) -> None:
        keeper: Any = self.groups.keeper
        ray.get(keeper.keep.remote(group, state.about, state.validates, state.files))


def test_a_restart_goes_on_from_the_state_in_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    play = Keeping(monkeypatch, tmp_path, (1, 8), (1, 10), (0, 11))
    play.session.job.checkpoints.write(snapshot(6))
    play.run()
    newest = play.session.job.checkpoints.newest(play.said.append)
    assert newest.step == 10, "the last of the newest group"
    assert torch.equal(newest.load_model()["weight"], torch.tensor([10.0, 10.0]))
    assert not newest.validation_due
    told = [message.args for message in play.ask("take") if message.kind == "checkpoint"]
    assert told == [(asdict(newest),)]
    assert play.said == []


@pytest.mark.parametrize(
    ("stored", "kept"), [(10, 8), (6, 12)], ids=["older than the storage's", "not recorded"]
)
def test_a_state_in_memory_that_is_of_no_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stored: int, kept: int
) -> None:
    play = Keeping(monkeypatch, tmp_path, (0, kept))
    play.session.job.checkpoints.write(snapshot(stored))
    play.run()
    assert play.session.job.checkpoints.newest(play.said.append).step == stored
    assert play.said == []


def test_without_a_storage_the_run_goes_on_without_the_state_in_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    play = Keeping(monkeypatch, tmp_path / "away", (0, 10))
    play.run()
    assert play.sizes == [2, 2]
    (line,) = play.said
    assert line.startswith("warning: the copy of the state in memory is lost: can't write")


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), RaytrainError("can't set step-1 aside")]
)
def test_a_storage_that_can_t_be_read_ends_no_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    play = Keeping(monkeypatch, tmp_path, (0, 10))

    def fails(_told: Callable[[str], None]) -> None:
        raise error

    monkeypatch.setattr(play.session.job.checkpoints, "newest", fails)
    play.run()
    assert play.sizes == [2, 2]
    (line,) = play.said
    assert line == f"warning: the copy of the state in memory is lost: {error}"


def test_a_keeper_that_is_lost_ends_no_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It holds most, so it is what a machine without memory kills; the next state is kept again."""
    play = Keeping(monkeypatch, tmp_path, (0, 10))
    keeper: Any = play.groups.keeper

    def loses_it_too(play: Play) -> None:
        ray.get(keeper.step.remote())  # it is there
        ray.kill(keeper, no_restart=False)
        dies(play)

    monkeypatch.setattr(play, "_parts", [loses_it_too, finishes])
    play.run()
    assert play.sizes == [2, 2]
    assert all("the copy of the state in memory is lost" in line for line in play.said)
    wait_for(lambda: steps_kept(keeper) == 0)
    play.leave_states()
    assert steps_kept(keeper) == 10


def steps_kept(keeper: Any) -> int | None:
    """Steps done of the state in memory; None: nobody answers."""
    try:
        steps: int = ray.get(keeper.step.remote())
    except ray.exceptions.RayError:
        return None
    return steps


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
    play.turns.append(Turn(0))
    play.ask("open", 0)
    group = play.start("a", "b")
    watch = Watch(play.session, PLACEMENT, play.mailbox, play.groups)
    play.room, play.leaving = 1, {"elsewhere": 0}
    watch.look()
    assert not play.ask("put", group, "say", "more")
    play.leaving = {"b": 0}
    watch._next_look = 0.0
    watch.look()
    assert play.said == ["machine b is about to leave the cluster"]
    assert play.ask("put", group, "say", "more"), "the group should stop"


@pytest.mark.parametrize(
    ("workers", "min_gain", "resizes"), [(1, 50.0, True), (1, 50.1, False), (2, 0.0, False)]
)
def test_more_workers_are_taken_in_when_it_pays(
    monkeypatch: pytest.MonkeyPatch, workers: int, min_gain: float, resizes: bool
) -> None:
    """1000 s are left: a second worker saves 500; the start took 10.

    A group of two, of which one is there (with ``elastic: step``), waits for its own second.
    """
    resize = {"min_gain": min_gain, "settle_s": 0, "rest_s": 0}
    play = Play(monkeypatch, [], {"resize": resize})
    play.groups.workers = workers
    Watch(play.session, PLACEMENT, play.mailbox, play.groups).look()
    assert bool(play.said) is resizes
