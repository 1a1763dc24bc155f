"""Faults as data: what shall go wrong in a run, when, and what makes it go wrong.

A schedule is a YAML list, or drawn from a seed:

    - {at_step: 40, do: kill, worker: 1}             # SIGKILL
    - {at_step: 60, do: hang, worker: 0, for_s: 5}   # SIGSTOP, and SIGCONT after for_s, if given
    - {at_s: 30, do: slow, worker: 2, for_s: 5}      # stopped half of the time
    - {at_step: 80, do: exception, worker: 1}        # needs a model from ``raises_when_told``
    - {at_step: 90, do: add}                         # a machine joins the cluster
    - {at_step: 95, do: drain, node: 1, for_s: 30}   # it is told that it ends in for_s seconds
    - {at_step: 99, do: remove_node, node: 1}        # it is gone

All is done from outside, by what a run leaves in its directory: steps in metrics.jsonl, processes
in events.jsonl. A schedule works on a run whose machines are all this one, such as those of
``ray.cluster_utils.Cluster``.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    ValidationError,
    model_validator,
)
from torch import Tensor, nn

from raytrain.errors import RaytrainError
from raytrain.recipe.types import Section
from raytrain.run.history import EVENTS, METRICS, read_jsonl

Kind = Literal["kill", "hang", "exception", "slow", "add", "drain", "remove_node"]
_OF_WORKERS: tuple[Kind, ...] = ("kill", "hang", "exception", "slow")
_OF_NODES: tuple[Kind, ...] = ("drain", "remove_node")
_TIMED: tuple[Kind, ...] = ("hang", "slow", "drain")
_POLL_S = 0.02
_PULSE_S = 0.1


class Fault(Section):
    """One thing that goes wrong."""

    do: Kind
    """What happens."""
    at_step: NonNegativeInt | None = None
    """When that many steps are in the record; this or `at_s`."""
    at_s: NonNegativeFloat | None = None
    """When that many seconds have gone since the first step was recorded; this or `at_step`."""
    worker: NonNegativeInt | None = None
    """Rank, for kill, hang, exception and slow."""
    node: NonNegativeInt | None = None
    """Number of a machine in the order of its joining, for drain and remove_node."""
    for_s: PositiveFloat | None = None
    """hang, slow, drain: how many seconds. null: a hang lasts."""

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if (self.at_step is None) == (self.at_s is None):
            raise ValueError("give at_step or at_s, one of them")
        if (self.worker is not None) != (self.do in _OF_WORKERS):
            raise ValueError(f"worker is for {', '.join(_OF_WORKERS)}, which need it")
        if (self.node is not None) != (self.do in _OF_NODES):
            raise ValueError(f"node is for {', '.join(_OF_NODES)}, which need it")
        if self.for_s is not None and self.do not in _TIMED:
            raise ValueError(f"for_s is for {', '.join(_TIMED)}")
        if self.for_s is None and self.do in ("slow", "drain"):
            raise ValueError(f"{self.do} needs for_s")
        return self


Schedule = Sequence[Fault]


def read_schedule(path: Path) -> list[Fault]:
    """Read a schedule.

    Raises:
        RaytrainError: what is wrong, in which file, item and key.
    """
    try:
        items = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RaytrainError(f"{path}: can't be read: {' '.join(str(error).split())}") from error
    if not isinstance(items, list):
        raise RaytrainError(f"{path}: must be a list of faults, such as - {{at_step: 40, do: add}}")
    faults: list[Fault] = []
    for index, item in enumerate(items):
        try:
            faults.append(Fault.model_validate(item))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(str(part) for part in first["loc"])
            where = f"[{index}].{key}" if key else f"[{index}]"
            raise RaytrainError(f"{path}: {where}: {first['msg']}") from error
    return faults


def random_schedule(
    seed: int, count: int, per_minute: float, kinds: Sequence[Kind], workers: int
) -> list[Fault]:
    """Faults of workers at random times (a Poisson process), to random workers.

    Args:
        seed: decides all.
        count: how many.
        per_minute: mean rate.
        kinds: what may happen, each as likely.
        workers: ranks are below this.
    """
    rng = random.Random(seed)  # noqa: S311 (not for secrets)
    at_s, faults = 0.0, []
    for _ in range(count):
        at_s += rng.expovariate(per_minute / 60)
        do, worker = rng.choice(kinds), rng.randrange(workers)
        for_s = round(rng.uniform(0.5, 3), 2) if do in _TIMED else None
        faults.append(Fault(do=do, at_s=round(at_s, 2), worker=worker, for_s=for_s))
    return faults


@dataclass(frozen=True)
class Applied:
    """A fault that was made.

    Attributes:
        fault: which.
        at: time.time() then.
        step: steps in the record then.
        pid: process that it was done to, if to one.
    """

    fault: Fault
    at: float
    step: int
    pid: int | None


class RunWatch:
    """What a run's directory tells while it goes on.

    Args:
        run_dir: of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def steps(self) -> int:
        """Steps in the record."""
        try:
            with (self._run_dir / METRICS).open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - 4096))
                lines = file.read().split(b"\n")[:-1]
        except FileNotFoundError:
            return 0
        return int(json.loads(lines[-1])["step"]) + 1 if lines else 0

    def pid(self, rank: int) -> int | None:
        """The newest process of a worker; None before there is one."""
        of_rank = [
            int(event["pid"])
            for event in read_jsonl(self._run_dir / EVENTS)
            if event["kind"] == "worker" and event["rank"] == rank
        ]
        return of_rank[-1] if of_rank else None


class FaultMaker:
    """Makes a schedule's faults in a run that goes on, in a thread. Use as a context.

    Args:
        schedule: what, when.
        run_dir: of the run.
        cluster: a ``ray.cluster_utils.Cluster``, for faults of machines; made with
            ``shutdown_at_exit=False``, as another thread adds to it.
        node_args: what ``add`` gives to its ``add_node``.
        pid_of: gives the process of a rank, where events.jsonl doesn't.
    """

    def __init__(
        self,
        schedule: Schedule,
        run_dir: Path,
        cluster: Any = None,
        node_args: dict[str, Any] | None = None,
        pid_of: Callable[[int], int | None] | None = None,
    ) -> None:
        self.applied: list[Applied] = []
        self._schedule = list(schedule)
        self._run_dir = run_dir
        self._watch = RunWatch(run_dir)
        self._pid_of = pid_of or self._watch.pid
        self._cluster = cluster
        self._nodes: list[Any] = list(cluster.worker_nodes) if cluster is not None else []
        self._node_args = node_args or {"num_cpus": 1}
        self._ended = threading.Event()
        self._stopped: list[tuple[float, int]] = []  # when to go on, process
        self._thread = threading.Thread(target=self._run, name="raytrain-faults", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        for _, pid in self._stopped:
            _signal(pid, signal.SIGCONT)

    def _run(self) -> None:
        began: float | None = None
        waiting = list(self._schedule)
        while not self._ended.wait(_POLL_S):
            steps = self._watch.steps()
            began = began or (time.monotonic() if steps else None)
            seconds = time.monotonic() - began if began else 0.0
            self._let_go()
            for fault in list(waiting):
                due = (
                    steps >= fault.at_step
                    if fault.at_step is not None
                    else (began is not None and seconds >= (fault.at_s or 0.0))
                )
                if due and self._make(fault, steps):
                    waiting.remove(fault)

    def _let_go(self) -> None:
        now = time.monotonic()
        for until, pid in [s for s in self._stopped if s[0] <= now]:
            _signal(pid, signal.SIGCONT)
            self._stopped.remove((until, pid))

    def _make(self, fault: Fault, steps: int) -> bool:
        """Whether it could be made: a worker that was lost just now isn't there to be hit."""
        pid = None
        if fault.worker is not None:
            pid = self._pid_of(fault.worker)
            if pid is None or not _is_there(pid):
                return False
            self._hit(fault, pid)
        elif self._cluster is None:
            raise RaytrainError(f"do: {fault.do} needs a cluster of several machines")
        elif fault.do == "add":
            self._nodes.append(self._cluster.add_node(**self._node_args))
        else:
            self._end_node(fault)
        self.applied.append(Applied(fault, time.time(), steps, pid))
        return True

    def _hit(self, fault: Fault, pid: int) -> None:
        if fault.do == "kill":
            _signal(pid, signal.SIGKILL)
        elif fault.do == "exception":
            trigger(self._run_dir, pid)
        elif fault.do == "slow":
            threading.Thread(target=_pulse, args=(pid, fault.for_s), daemon=True).start()
        else:
            _signal(pid, signal.SIGSTOP)
            if fault.for_s is not None:
                self._stopped.append((time.monotonic() + fault.for_s, pid))

    def _end_node(self, fault: Fault) -> None:
        assert fault.node is not None
        if fault.node >= len(self._nodes):
            raise RaytrainError(f"do: {fault.do}: there are {len(self._nodes)} machines to end")
        node = self._nodes[fault.node]
        if fault.do == "remove_node":
            self._cluster.remove_node(node, allow_graceful=False)
            return
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node"]
        command += ["--address", self._cluster.address, "--node-id", node.node_id]
        command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
        command += ["--deadline-remaining-seconds", f"{fault.for_s:.0f}"]
        subprocess.run(command, check=True, capture_output=True)  # noqa: S603 (our own words)


def raises_when_told(
    model: Callable[[int], nn.Module], run_dir: Path
) -> Callable[[int], nn.Module]:
    """A maker of the same models, whose forward pass raises where a schedule says so."""
    return _Raising(model, run_dir)


@dataclass(frozen=True)
class _Raising:
    model: Callable[[int], nn.Module]
    run_dir: Path

    def __call__(self, num_classes: int) -> nn.Module:
        return _RaisingModel(self.model(num_classes), self.run_dir)


class _RaisingModel(nn.Module):
    def __init__(self, body: nn.Module, run_dir: Path) -> None:
        super().__init__()
        self.body = body
        self._run_dir = run_dir

    def forward(self, x: Tensor) -> Tensor:
        told = _trigger_file(self._run_dir, os.getpid())
        if self.training and told.exists():
            told.unlink()
            raise RuntimeError("a fault schedule asked for this exception")
        out: Tensor = self.body(x)
        return out


def trigger(run_dir: Path, pid: int) -> None:
    """Let the model of a process raise in its next forward pass."""
    _trigger_file(run_dir, pid).touch()


def _trigger_file(run_dir: Path, pid: int) -> Path:
    return run_dir.parent / f"{run_dir.name}-raise-{pid}"


def _pulse(pid: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        _signal(pid, signal.SIGSTOP)
        time.sleep(_PULSE_S)
        _signal(pid, signal.SIGCONT)
        time.sleep(_PULSE_S)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it was lost meanwhile
        os.kill(pid, number)


def _is_there(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
