"""``raytrain bench elastic``: what faults cost, in both of our modes and with plain Ray Train.

One machine plays a cluster: a raylet for the driver and one for each worker. Each contender trains
the same recipe; faults are made one after another, each once all workers are back and have made
some steps.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from raytrain.bench.measure import Spread, this_machine, versions_of
from raytrain.data.shards import ShardSet
from raytrain.errors import RaytrainError
from raytrain.orchestrate.cluster import bound_ends
from raytrain.orchestrate.faults import Fault, FaultMaker, Kind
from raytrain.recipe.load import change_recipe, dump_recipe
from raytrain.recipe.types import Recipe
from raytrain.run.audit import used_rows
from raytrain.run.history import EVENTS, METRICS, read_jsonl

Contender = Literal["step", "restart", "standby", "ray"]
CONTENDERS: tuple[Contender, ...] = ("step", "restart", "standby", "ray")
FAULTS: tuple[Kind, ...] = ("kill", "hang", "drain", "remove_node")
"""What can be measured; a machine that is taken away is replaced by another at once."""
_OF_NODES = ("drain", "remove_node")
_CHECKPOINT_STEPS = 20  # where the recipe has none
_CALM_STEPS = 10  # by all workers, before the next fault
_PAUSE = 3.0  # what a step takes beyond so many times the usual is a pause
_NOTICE_S = 120.0
_POLL_S = 0.1
_END_S = 60.0


@dataclass(frozen=True)
class ElasticOptions:
    """What to measure.

    Attributes:
        workers: of each contender, at full strength.
        contenders: ``step`` and ``restart``, our modes; ``standby``, ``restart`` with workers that
            stand by, on machines of their own; ``ray``, plain Ray Train.
        faults: kinds, made in this order; the first fault hits the first worker, the next one
            another, and so on.
        repeats: how often.
        patience_s: most seconds to wait for full strength after a fault.
        minutes: of a last part with a worker killed each minute, for the goodput; 0: none.
    """

    workers: int = 3
    contenders: tuple[Contender, ...] = CONTENDERS
    faults: tuple[Kind, ...] = ("kill",)
    repeats: int = 3
    patience_s: float = 300.0
    minutes: float = 0.0


@dataclass(frozen=True)
class Cost:
    """What one fault cost, in seconds of wall time.

    Attributes:
        fault: its kind.
        detected_s: until the run told of it; None where it doesn't tell.
        paused_s: longest time between two steps from the fault on, less the usual time of a step.
        joined_s: pause of those that had gone on when the last one came back, less a step's usual
            time; None where none had gone on.
        full_s: until all workers made a step.
        steps_lost: made before and made again.
    """

    fault: Kind
    detected_s: float | None
    paused_s: float
    joined_s: float | None
    full_s: float
    steps_lost: int


@dataclass
class Found:
    """What was measured of one contender.

    Attributes:
        step_s: usual time of a step by all workers, in seconds.
        costs: of each fault, in their order.
        images_wrong: images of whole epochs that were left out or used twice in the steps that
            count; None where the contender keeps no account.
        goodput: share of the time that went into steps that count, with a fault a minute; of a step
            up to three times the usual counts, what is beyond is a pause.
        pace: share of the steps that would have been made at the usual time of each.
        gave_up: why not all faults were made; empty where they were.
    """

    step_s: float = 0.0
    costs: list[Cost] = field(default_factory=list)
    images_wrong: int | None = None
    goodput: float | None = None
    pace: float | None = None
    gave_up: str = ""


@dataclass(frozen=True)
class ElasticReport:
    """All that was measured, on what."""

    machine: dict[str, str | int | float]
    versions: dict[str, str]
    workers: int
    checkpoint_steps: int | None
    found: dict[Contender, Found]

    def as_json(self) -> str:
        """All numbers."""
        return json.dumps(asdict(self), indent=1)

    def tables(self) -> Group:
        """For a person."""
        return Group(self._faults(), *([self._goodputs()] if self._minutes_measured else []))

    def _faults(self) -> Table:
        title = f"a fault among {self.workers} workers, seconds: median (least-most)"
        table = _table(title, "", "fault", "told", "paused", "joined", "all back", "steps lost")
        for contender, found in self.found.items():
            for kind in dict.fromkeys(cost.fault for cost in found.costs):
                costs = [cost for cost in found.costs if cost.fault == kind]
                table.add_row(
                    _NAMES[contender],
                    kind,
                    _spread([c.detected_s for c in costs]),
                    _spread([c.paused_s for c in costs]),
                    _spread([c.joined_s for c in costs]),
                    _spread([c.full_s for c in costs]),
                    _spread([float(c.steps_lost) for c in costs], 0),
                )
            if found.gave_up:
                table.add_row(_NAMES[contender], found.gave_up)
        return table

    @property
    def _minutes_measured(self) -> bool:
        return any(found.goodput is not None for found in self.found.values())

    def _goodputs(self) -> Table:
        table = _table("a kill a minute", "", "goodput", "pace")
        for contender, found in self.found.items():
            if found.goodput is not None and found.pace is not None:
                table.add_row(_NAMES[contender], f"{found.goodput:.2f}", f"{found.pace:.2f}")
        return table

    def images(self) -> str:
        """A line about the images that were left out or used twice."""
        wrong = {c: f.images_wrong for c, f in self.found.items() if f.images_wrong is not None}
        counts = ", ".join(f"{_NAMES[contender]} {count}" for contender, count in wrong.items())
        return f"images left out or used twice: {counts or 'not known'}"


def _table(title: str, *names: str) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, justify="right" if name else "left")
    return table


_NAMES: dict[Contender, str] = {
    "step": "step",
    "restart": "restart",
    "standby": "stand-by",
    "ray": "Ray Train",
}


def _spread(values: Sequence[float | None], digits: int = 1) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    of = Spread.of(known)
    if len(known) == 1:
        return f"{of.median:.{digits}f}"
    return f"{of.median:.{digits}f} ({of.low:.{digits}f}-{of.high:.{digits}f})"


def bench_elastic(
    recipe: Recipe, data: str, folder: Path, options: ElasticOptions
) -> ElasticReport:
    """Measure one contender after another.

    Args:
        recipe: what all train; its first phase, for as long as it takes.
        data: a ShardSet.
        folder: where the runs go; must not hold any.
        options: what to measure.

    Raises:
        RaytrainError: a contender ended before its time, with where its log is.
    """
    if folder.exists() and any(folder.iterdir()):
        raise RaytrainError(f"--out {folder}: isn't empty; name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    endless = _endless(recipe)
    (folder / "recipe.yaml").write_text(dump_recipe(endless), encoding="utf-8")
    ShardSet.open(data, endless.input).check_files()
    found: dict[Contender, Found] = {}
    for contender in options.contenders:
        machines = options.workers * (2 if contender == "standby" else 1)
        with _machines(machines, head_slots=int(contender == "step")) as cluster:
            run = _Run(contender, cluster, data, folder / contender, options)
            try:
                found[contender] = run.measure()
            finally:
                run.end()
        kept = json.dumps(asdict(found[contender]), indent=1)
        (folder / f"{contender}.json").write_text(kept + "\n", encoding="utf-8")
    return ElasticReport(
        machine=this_machine(),
        versions=versions_of(("raytrain", "ray", "torch", "torchft")),
        workers=options.workers,
        checkpoint_steps=endless.checkpoint.every_steps,
        found=found,
    )


def _endless(recipe: Recipe) -> Recipe:
    """The recipe's first phase without an end, with an account of images, joining at once."""
    epochs = 100_000
    phase = recipe.phases[0].model_dump(mode="json") | {"epochs": epochs}
    changes: dict[str, Any] = {
        "phases": [phase],
        "schedule": {"lr": 0.01, "momentum": 0.9},
        "validation.every_epochs": epochs,
        "target": {},
        "input.audit": True,
        "faults.max_restarts": 1000,
        "checkpoint.every_steps": recipe.checkpoint.every_steps or _CHECKPOINT_STEPS,
        "resize": {"min_gain": 0, "settle_s": 0.5, "rest_s": 0},
    }
    return change_recipe(recipe, changes, "bench elastic")


@contextmanager
def _machines(number: int, head_slots: int) -> Iterator[Any]:
    """A cluster on this machine: a raylet for the driver (and torchft's Lighthouse, which takes a
    slot), and others, each with a slot for a worker."""
    from ray.cluster_utils import Cluster  # noqa: PLC0415 (slow to import)

    bound_ends()
    health = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}
    head = {"num_cpus": head_slots, "include_dashboard": False}
    cluster = Cluster(
        initialize_head=True,
        head_node_args=head | {"_system_config": health},
        shutdown_at_exit=False,  # its hooks are for the main thread; faults add machines in another
    )
    try:
        for _ in range(number):
            cluster.add_node(num_cpus=1)
        yield cluster
    finally:
        cluster.shutdown()


class _Run:
    """A contender under way."""

    def __init__(
        self, contender: Contender, cluster: Any, data: str, folder: Path, options: ElasticOptions
    ) -> None:
        self._contender = contender
        self._cluster = cluster
        self._options = options
        self._folder = folder
        self._log = folder.with_suffix(".log")
        self._process = self._start(folder.parent / "recipe.yaml", data)

    def _start(self, recipe: Path, data: str) -> subprocess.Popen[bytes]:
        workers = self._options.workers
        if self._contender == "ray":
            rest = ["raytrain.bench.plain_ray", str(recipe), data, str(self._folder), str(workers)]
        else:
            rest = ["raytrain", "train", str(recipe), "--data", data, "--workers", f"1:{workers}"]
            rest += ["--elastic", "step" if self._contender == "step" else "restart"]
            rest += ["--run-dir", str(self._folder)]
            if self._contender == "standby":
                rest += ["--set", "faults.standby=true"]
        with self._log.open("wb") as log:
            return subprocess.Popen(  # noqa: S603 (our own words)
                [sys.executable, "-m", *rest],
                env=os.environ | {"RAY_ADDRESS": self._cluster.address},
                stdout=log,
                stderr=log,
            )

    def measure(self) -> Found:
        """Make all faults and see what they cost."""
        found = Found()
        faults = list(self._options.faults) * self._options.repeats
        try:
            self._wait(self._is_calm, "the start")
            for number, kind in enumerate(faults):
                found.costs.append(self._make(kind, number % self._options.workers))
            if self._options.minutes:
                found.goodput, found.pace = self._goodput()
            found.step_s = usual_step(self._rows(), self._options.workers)
        except TimeoutError as error:
            found.gave_up = str(error)
        self.end()
        if self._contender != "ray":
            found.images_wrong = images_wrong(self._folder)
        return found

    def end(self) -> None:
        """Stop it as a user would, and for good if it doesn't."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _make(self, kind: Kind, target: int) -> Cost:
        """Make one fault, and wait until all workers are back."""
        before = self._rows()[-1]["step"]
        of_node = kind in _OF_NODES
        fault = Fault(
            do=kind,
            at_step=0,
            worker=None if of_node else target,
            node=target if of_node else None,
            for_s=_NOTICE_S if kind == "drain" else None,
        )
        schedule = [fault, Fault(do="add", at_step=0)] if of_node else [fault]
        leaving = list(self._cluster.worker_nodes)[target] if kind == "drain" else None
        with FaultMaker(schedule, self._folder, self._cluster) as maker:
            self._wait(lambda: len(maker.applied) == len(schedule), f"the {kind}")
            at = maker.applied[0].at
            self._wait(lambda: self._is_whole_since(at), kind)
            self._wait(self._is_calm, kind)
        if leaving is not None:
            self._cluster.remove_node(leaving)
        rows = self._rows()
        step_s = usual_step(rows, self._options.workers)
        return cost_of(kind, at, before, rows, self._events(), step_s)

    def _goodput(self) -> tuple[float, float]:
        began, first = time.monotonic(), self._rows()[-1]["seconds"]
        for minute in range(round(self._options.minutes)):
            kill = [Fault(do="kill", at_step=0, worker=minute % self._options.workers)]
            with FaultMaker(kill, self._folder):
                while time.monotonic() - began < 60 * (minute + 1):
                    self._look()
                    time.sleep(_POLL_S)
        last = first + time.monotonic() - began
        return goodput_of(self._rows(), first, last, self._options.workers)

    def _is_calm(self) -> bool:
        last = self._rows()[-_CALM_STEPS:]
        if [row["world_size"] for row in last] != [self._options.workers] * _CALM_STEPS:
            return False
        return self._contender != "standby" or self._others_stand_by()

    def _is_whole_since(self, moment: float) -> bool:
        """Whether all workers have made steps since a worker was replaced after a moment of UNIX
        time: until then, a machine that is about to leave is still there."""
        events = self._events()
        replaced = [e["seconds"] for e in events if e["kind"] == "worker" and _unix(e) > moment]
        if not replaced:
            return False
        fault = moment - clock_offset(events)
        return back_after(self._rows(), max(fault, replaced[0]), self._options.workers)

    def _others_stand_by(self) -> bool:
        """Whether all that is to stand by does so since the last group began."""
        kinds = [event["kind"] for event in self._events()]
        return "standing_by" in kinds[::-1][: kinds[::-1].index("worker")]

    def _wait(self, until: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + self._options.patience_s
        while not until():
            self._look()
            if time.monotonic() > end:
                seconds = self._options.patience_s
                raise TimeoutError(f"{what}: not all workers were back after {seconds:.0f} s")
            time.sleep(_POLL_S)

    def _look(self) -> None:
        if self._process.poll() is not None:
            raise RaytrainError(
                f"bench elastic: {_NAMES[self._contender]} ended by itself; its log: {self._log}"
            )

    def _rows(self) -> list[dict[str, Any]]:
        return read_jsonl(self._folder / METRICS)

    def _events(self) -> list[dict[str, Any]]:
        return read_jsonl(self._folder / EVENTS)


def clock_offset(events: Sequence[dict[str, Any]]) -> float:
    """UNIX time at which a run's clock was zero: events are told late, never early."""
    return min(_unix(event) - float(event["seconds"]) for event in events)


def _unix(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["time"]).timestamp()


def back_after(rows: Sequence[dict[str, Any]], fault: float, workers: int) -> bool:
    """Whether steps have been made after a fault and the last one by all workers.

    Args:
        rows: of metrics.jsonl.
        fault: when, on the run's clock, in seconds.
        workers: at full strength.
    """
    after = [row for row in rows if row["seconds"] > fault]
    return bool(after) and full_again(after, fault, workers) is not None


def full_again(after: Sequence[dict[str, Any]], fault: float, workers: int) -> float | None:
    """When all workers made a step again, on the run's clock; None: not yet.

    A step that was under way may still end with all workers, so what counts is the first one by all
    after the longest time without a step.
    """
    times = [fault, *(row["seconds"] for row in after)]
    gaps = [b - a for a, b in pairwise(times)]
    longest = gaps.index(max(gaps))
    few = [i for i, row in enumerate(after) if row["world_size"] < workers]
    first = max(longest, few[-1] + 1 if few else 0)
    return after[first]["seconds"] if first < len(after) else None


def usual_step(rows: Sequence[dict[str, Any]], workers: int) -> float:
    """Median time of a step by all workers, in seconds.

    Args:
        rows: of metrics.jsonl.
        workers: at full strength.
    """
    both = ((a, b) for a, b in pairwise(rows) if a["world_size"] == b["world_size"] == workers)
    return float(statistics.median(b["seconds"] - a["seconds"] for a, b in both))


def goodput_of(
    rows: Sequence[dict[str, Any]], since: float, until: float, workers: int
) -> tuple[float, float]:
    """Goodput and pace, as in ``Found``, between two moments of the run's clock.

    Args:
        rows: of metrics.jsonl; of a step that was made again, the last one counts.
        since: the first moment, in seconds.
        until: the last one.
        workers: at full strength.
    """
    counted = sorted({row["step"]: row for row in rows}.values(), key=lambda row: row["seconds"])
    part = [row for row in counted if since <= row["seconds"] <= until]
    usual = usual_step(part, workers)
    times = [since, *(row["seconds"] for row in part)]
    useful = sum(min(b - a, _PAUSE * usual) for a, b in pairwise(times))
    return useful / (until - since), len(part) * usual / (until - since)


def cost_of(
    kind: Kind,
    at: float,
    before: int,
    rows: Sequence[dict[str, Any]],
    events: Sequence[dict[str, Any]],
    step_s: float,
) -> Cost:
    """What a fault cost, from a run's record.

    Args:
        kind: of the fault.
        at: UNIX time of the fault.
        before: last step in the record then.
        rows: of metrics.jsonl, until all workers were back.
        events: of events.jsonl.
        step_s: usual time of a step.
    """
    fault = at - clock_offset(events)
    after = [row for row in rows if row["seconds"] > fault]
    workers = after[-1]["world_size"]
    full = full_again(after, fault, workers)
    assert full is not None
    times = [fault, *(row["seconds"] for row in after if row["seconds"] <= full)]
    pause = max(b - a for a, b in pairwise(times))
    told = [e for e in events if e["kind"] in ("fault", "hand_over") and _unix(e) >= at]
    back = [e for e in events if e["kind"] == "recovery" and _unix(e) >= at]
    dropped = sum(event["rows_dropped"] for event in back)
    last = next(i for i, row in enumerate(after) if row["seconds"] == full)
    joins = last > 0 and after[last - 1]["world_size"] < workers
    joined = full - after[last - 1]["seconds"] - step_s if joins else None
    again = max(0, before + 1 - min(row["step"] for row in after))
    return Cost(
        fault=kind,
        detected_s=_unix(told[0]) - at if told else None,
        paused_s=max(0.0, pause - step_s),
        joined_s=None if joined is None else max(0.0, joined),
        full_s=full - fault,
        steps_lost=max(dropped, again),
    )


def images_wrong(run_dir: Path) -> int:
    """Images of whole epochs that the steps which count left out or used more than once."""
    used = used_rows(run_dir)
    rows = read_jsonl(run_dir / METRICS)
    by_epoch: dict[int, Counter[int]] = {}
    for row in rows:
        by_epoch.setdefault(row["epoch"], Counter()).update(used.get(row["step"], []))
    whole = [by_epoch[epoch] for epoch in sorted(by_epoch)[:-1]]
    everything = set().union(*whole)
    return sum(abs(counts[image] - 1) for counts in whole for image in everything)
