"""Sweeps without a running Ray: spaces, rungs, journal, decisions, report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray import tune

from raytrain.errors import RaytrainError
from raytrain.orchestrate.sweep.conductor import Asha, Conductor, Halving
from raytrain.orchestrate.sweep.search import RandomSearch, Search, TpeSearch
from raytrain.orchestrate.sweep.space import Draw, Setting, Space
from raytrain.recipe.load import load_recipe, recipe_from_dict
from raytrain.recipe.types import Recipe
from raytrain.tuning.importance import importances
from raytrain.tuning.journal import JOURNAL, Journal, Seen, read_journal
from raytrain.tuning.options import Settings, SweepOptions
from raytrain.tuning.report import SweepReport, write_report
from raytrain.tuning.rungs import Rungs
from raytrain.tuning.trials import Trial, Trials, ranked

IMAGES = 640
SPACES = Path(__file__).parents[1] / "tune_spaces"


def base_recipe(epochs: int = 8) -> Recipe:
    return recipe_from_dict(
        {
            "model": {"name": "small_cnn"},
            "phases": [{"epochs": epochs, "image_px": 16, "batch": 64}],
            "schedule": {"lr": 0.1},
        }
    )


def setting(workers: int = 1) -> Setting:
    return Setting(base_recipe(), IMAGES, workers)


def write_space(folder: Path, body: str, name: str = "mine") -> Path:
    path = folder / f"{name}.py"
    lines = ["from ray import tune", "def space(draw):", *(f"    {s}" for s in body.split("\n"))]
    path.write_text("\n".join(lines))
    return path


def draw_many(path: Path, number: int = 60, workers: int = 1) -> list[Recipe]:
    search = RandomSearch(Space([path], setting(workers)), seed=3)
    return [search.sample(i).recipe for i in range(number)]


# Spaces


@pytest.mark.parametrize(
    "name", ["momentum", "batch_schedule", "one_cycle", "image_size", "all_schedules"]
)
def test_each_space_of_the_project_varies_the_recipe(name: str) -> None:
    recipes = draw_many(SPACES / f"{name}.py", workers=2)
    assert len({r.model_dump_json() for r in recipes}) > (5 if name == "image_size" else 30)
    assert all(r.num_epochs == 8 for r in recipes)


def test_the_cycle_of_momentum_runs_against_the_learning_rate() -> None:
    search = RandomSearch(Space([SPACES / "momentum.py"], setting()), seed=0)
    samples = [search.sample(i) for i in range(60)]
    cycles = [s for s in samples if s.values["momentum"] == "cycle"]
    constant = [s for s in samples if s.values["momentum"] == "constant"]
    assert cycles
    assert constant
    assert all("momentum low" not in s.values for s in constant)  # conditional
    for sample in cycles:
        curve = sample.recipe.schedule.momentum.resolve(8)
        turn = curve.spans[0].end
        assert curve.at(0) == curve.at(8) == sample.values["momentum high"]
        assert curve.at(turn) == sample.values["momentum low"] < curve.at(0)  # constrained


def test_domains_may_stand_in_what_a_space_returns(tmp_path: Path) -> None:
    body = (
        'return {"schedule.lr": [{"until": "end", "linear": [tune.uniform(0.1, 0.2), 0.0]}],\n'
        '        "optimizer.decay_norm_and_bias": tune.choice([True, False]),\n'
        '        "phases.0.batch": tune.sample_from(lambda values: 32)}'
    )
    search = RandomSearch(Space([write_space(tmp_path, body)], setting()), seed=0)
    sample = search.sample(0)
    assert 0.1 <= sample.values["schedule.lr.0.linear.0"] <= 0.2
    assert sample.recipe.schedule.lr.root[0].values[0] == sample.values["schedule.lr.0.linear.0"]
    assert sample.recipe.phases[0].batch == 32


def test_a_random_sample_is_a_function_of_seed_and_number() -> None:
    def values(seed: int, numbers: list[int]) -> dict[int, Any]:
        search = RandomSearch(Space([SPACES / "one_cycle.py"], setting()), seed)
        return {i: search.sample(i).values for i in numbers}

    assert values(1, [0, 1, 2])[2] == values(1, [2])[2]
    assert values(1, [2])[2] != values(2, [2])[2] != values(2, [1])[1]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ('return {"schedule.momentun": tune.uniform(0, 1)}', "did you mean 'momentum'"),
        ('return {"schedule.momentum": tune.uniform(0.9, 1.3)}', r"must be >= 0 and < 1, is 1\."),
        ('return {"phases.0.batch": tune.choice([1, 2])}', "too few for 4 workers"),
        ('return {"phases.0.epochs": tune.choice([8, 9])}', "makes 9 epochs of 8"),
        ('return {"phases.3.batch": 64}', r"there is no \[3\]"),
        ('draw.require(False, "it is Tuesday")', "the last one because it is Tuesday"),
        ("return [1]", "must return a dict"),
        ("return {}[1]", r"KeyError: 1 \(.*mine.py:3"),
    ],
)
def test_a_space_that_cannot_work_is_one_line(tmp_path: Path, body: str, told: str) -> None:
    with pytest.raises(RaytrainError, match=told) as caught:
        draw_many(write_space(tmp_path, body), workers=4)
    assert "mine.py" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_spaces_may_not_change_the_same(tmp_path: Path) -> None:
    one = write_space(tmp_path, 'return {"schedule.lr": 0.1}')
    two = write_space(tmp_path, 'return {"schedule.lr": 0.2}', "other")
    with pytest.raises(RaytrainError, match="another space changes it too"):
        RandomSearch(Space([one, two], setting()), 0).sample(0)


# Rungs


def test_rungs_are_at_ends_of_epochs() -> None:
    rungs = Rungs(num_images=100, num_epochs=18, grace_epochs=2, factor=3)
    assert rungs.samples == (200, 600)
    assert [rungs.reached(s) for s in (199, 200, 599, 600, 1800)] == [0, 1, 1, 2, 2]
    recipe = load_recipe("digits", ["validation.every_epochs=3"])
    assert rungs.validated(recipe).validation.every_epochs == 1
    assert Rungs(100, 18, 6, 3).validated(recipe).validation.every_epochs == 3


@pytest.mark.parametrize(("grace", "factor"), [(0, 3), (19, 3), (1, 1)])
def test_rungs_that_cannot_be_are_refused(grace: int, factor: int) -> None:
    with pytest.raises(RaytrainError, match=r"--(grace-epochs|factor)"):
        Rungs(100, 18, grace, factor)


# Decisions


class Trainings:
    """Made-up trainings, which run one or several at a time in a fixed order of turns."""

    def __init__(self, conductor: Conductor, rungs: Rungs, broken: tuple[int, ...] = ()) -> None:
        self._conductor, self._rungs, self._broken = conductor, rungs, broken

    def run(self, at_a_time: int = 1, most_turns: int = 10**6) -> None:
        running: list[Trial] = []
        for _ in range(most_turns):
            while len(running) < at_a_time and (trial := self._conductor.next_trial()):
                running.append(trial)
            if not running:
                return
            trial = running.pop(0)
            if self._turn(trial):
                running.append(trial)

    def _turn(self, trial: Trial) -> bool:
        epoch = round(trial.samples / IMAGES) + 1
        if trial.number in self._broken and epoch == 3:
            self._conductor.ended(trial.number, "diverged", "the loss is nan")
            return False
        row = {
            "samples": epoch * IMAGES,
            "epoch": float(epoch),
            "top1": quality(trial) * epoch / (epoch + 1),
            "top5": 1.0,
            "loss": float("nan") if epoch == 1 else 1.0,
            "seconds": 1.0 * epoch,
        }
        if not self._conductor.seen(trial.number, row):
            return False
        if epoch == self._rungs.num_epochs:
            self._conductor.ended(trial.number, "finished", "all 8 epochs ran")
            return False
        return True


def quality(trial: Trial) -> float:
    return float(max(0.0, 1.0 - abs(trial.values["lr peak"] - 0.2)))


RUNGS = Rungs(IMAGES, 8, 1, 2)


def conductor(
    path: Path, samples: int = 12, search: str = "random", halving: Halving | None = None
) -> Conductor:
    space = Space([SPACES / "one_cycle.py"], setting())
    kinds: dict[str, Callable[[Space, int], Search]] = {"random": RandomSearch, "tpe": TpeSearch}
    return Conductor(
        samples, kinds[search](space, 5), halving or Asha(RUNGS), Journal(path), lambda _: None
    )


def outcome(path: Path) -> list[tuple[int, int, str, Any]]:
    return [
        (t.number, t.samples, t.status, dict(t.values)) for t in Trials.of(read_journal(path)).all
    ]


@pytest.mark.parametrize("search", ["random", "tpe"])
@pytest.mark.parametrize("turns", [1, 9, 20])
def test_a_killed_sweep_goes_on_as_if_it_had_not_been(
    tmp_path: Path, search: str, turns: int
) -> None:
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    Trainings(conductor(whole, search=search), RUNGS, broken=(0,)).run()
    Trainings(conductor(killed, search=search), RUNGS, broken=(0,)).run(most_turns=turns)
    with killed.open("a") as file:
        file.write('{"kind": "seen", "tri')  # torn by the kill
    Trainings(conductor(killed, search=search), RUNGS, broken=(0,)).run()
    assert outcome(killed) == outcome(whole)
    assert {status for _, _, status, _ in outcome(whole)} == {"finished", "stopped", "diverged"}


def test_several_at_a_time_all_get_their_end(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL
    Trainings(conductor(path), RUNGS).run(at_a_time=3, most_turns=11)
    cut_off = [t.number for t in Trials.of(read_journal(path)).all if t.status == "running"]
    assert len(cut_off) == 3
    again = conductor(path)
    assert again.remaining == 12 - len(Trials.of(read_journal(path)).all) + 3
    Trainings(again, RUNGS).run(at_a_time=3)
    assert all(status in ("finished", "stopped") for _, _, status, _ in outcome(path))
    assert len(outcome(path)) == 12


def test_halving_spends_less_and_finds_the_best(tmp_path: Path) -> None:
    made = conductor(tmp_path / JOURNAL, samples=40)
    Trainings(made, RUNGS).run()
    assert made.trials.samples < 0.5 * 40 * RUNGS.most_samples
    best = ranked(made.trials.all, "accuracy", {})[0]
    assert best.status == "finished"
    assert quality(best) >= sorted(quality(t) for t in made.trials.all)[-3]


def test_a_broken_trial_ranks_last_and_leaves_the_rungs_as_they_were(tmp_path: Path) -> None:
    best = ranked(_run_all(tmp_path / "a").trials.all, "accuracy", {})[0]
    broken = _run_all(tmp_path / "b", broken=(best.number,))
    assert ranked(broken.trials.all, "accuracy", {})[-1].number == best.number
    assert ranked(broken.trials.all, "accuracy", {})[0].status == "finished"


def _run_all(path: Path, broken: tuple[int, ...] = ()) -> Conductor:
    made = conductor(path)
    Trainings(made, RUNGS, broken).run()
    return made


def test_a_changed_space_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL
    Trainings(conductor(path), RUNGS).run(most_turns=3)
    space = Space([SPACES / "momentum.py"], setting())
    with pytest.raises(RaytrainError, match="undo the change to the space"):
        Conductor(12, RandomSearch(space, 5), Asha(RUNGS), Journal(path), print)


def test_a_damaged_journal_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_text('{"kind": "seen"}\n')
    with pytest.raises(RaytrainError, match=r"journal.jsonl:1: .*trial"):
        read_journal(tmp_path / JOURNAL)


def test_tpe_learns(tmp_path: Path) -> None:
    made = conductor(tmp_path / JOURNAL, samples=40, search="tpe")
    Trainings(made, RUNGS).run()
    trials = made.trials.all
    early = sum(quality(t) for t in trials[:10]) / 10
    late = sum(quality(t) for t in trials[-10:]) / 10
    assert late > early


def test_tpe_says_what_it_cannot_draw(tmp_path: Path) -> None:
    path = write_space(tmp_path, 'return {"schedule.lr": tune.randn(1, 0.1)}')
    with pytest.raises(RaytrainError, match="--search tpe can't draw from"):
        TpeSearch(Space([path], setting()), 0).sample(0)


# Options


@pytest.mark.parametrize("search", ["bohb", "pb2"])
def test_a_search_that_cannot_work_is_refused_with_the_reason(search: str) -> None:
    with pytest.raises(RaytrainError, match=f"--search {search}: .*use tpe|with tpe"):
        SweepOptions.model_validate({"search": search}).check()


def test_settings_come_back_as_they_were(tmp_path: Path) -> None:
    made = settings(objective="seconds")
    made.write(tmp_path)
    assert Settings.read(tmp_path) == made
    with pytest.raises(RaytrainError, match="holds no sweep"):
        Settings.read(tmp_path / "elsewhere")


def settings(**options: Any) -> Settings:
    return Settings(
        recipe=base_recipe().model_dump(mode="json"),
        spaces=("x.py",),
        data="set",
        fingerprint="0",
        device="cpu",
        options=SweepOptions(samples=12, **options),
    )


# Report


def report_of(made: Conductor, **options: Any) -> SweepReport:
    return SweepReport(settings(**options), RUNGS, made.trials.all, [], {"top1": 0.7})


def test_the_report_is_ready_to_train(tmp_path: Path) -> None:
    made = _run_all(tmp_path / JOURNAL, broken=(1,))
    report = report_of(made)
    assert report.best is not None
    write_report(report, made.recipes[report.best.number], tmp_path)
    best = load_recipe(tmp_path / "best.yaml")
    assert best == made.recipes[report.best.number]
    assert best.schedule.lr.root[0].values[1] == report.best.values["lr peak"]
    told = json.loads((tmp_path / "sweep.json").read_text())
    assert told["best_trial"] == report.best.number
    assert told["trials"][-1]["status"] == "diverged"
    assert told["trials"][-1]["reason"] == "the loss is nan"
    assert told["compute_share"] == made.trials.samples / (12 * RUNGS.most_samples)
    for name in ("curves.png", "importance.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert yaml.safe_load((tmp_path / "best.yaml").read_text())["model"]["name"] == "small_cnn"
    assert report.table().row_count == 12


def test_seconds_to_target_rank_before_accuracy(tmp_path: Path) -> None:
    report = report_of(_run_all(tmp_path / JOURNAL), objective="seconds")
    seconds = [t.seconds_to(report.target) for t in report.ranked]
    reached = [s for s in seconds if s is not None]
    assert reached
    assert seconds[: len(reached)] == sorted(reached)


def test_winners_curse_is_told(tmp_path: Path) -> None:
    made = _run_all(tmp_path / JOURNAL)
    again = _run_all(tmp_path / "again").trials.all[:2]
    report = SweepReport(settings(), RUNGS, made.trials.all, again, {})
    assert report.best is not None
    mean = sum(t.best_top1 for t in again) / 2
    assert f"{100 * (report.best.best_top1 - mean):+.2f} points" in report.winners_curse()


def test_importance_tells_what_decides_from_what_does_not() -> None:
    trials = []
    for number in range(30):
        values = {"decides": number / 30, "idle": (number * 7) % 30, "same": 1}
        rows = [_row(number, top1=number / 30)]
        trials.append(Trial(number, values, {}, rows, status="finished"))
    found = {i.name: i for i in importances(trials, RUNGS)}
    assert set(found) == {"decides", "idle"}
    assert found["decides"].share > 0.8 > found["decides"].by_chance
    assert found["idle"].share < found["idle"].by_chance


def _row(number: int, top1: float) -> Seen:
    return Seen(
        trial=number,
        samples=IMAGES,
        epoch=1.0,
        top1=top1,
        top5=1.0,
        loss=1.0,
        seconds=1.0,
        goes_on=True,
    )


def test_draw_gives_one_value_a_name() -> None:
    draw = Draw(lambda _name, domain: domain.sample(), setting())
    first = draw("lr", tune.uniform(0, 1))
    assert draw("lr", tune.uniform(0, 1)) == first == draw.values["lr"]
    assert draw("fixed", 3) == 3
