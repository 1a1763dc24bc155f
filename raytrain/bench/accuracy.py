"""``raytrain bench accuracy``: seconds to a recipe's target, ours and others', run in turn."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from raytrain.bench.measure import this_machine, versions_of
from raytrain.bench.rivals import RIVALS, Settings
from raytrain.data.shards import ShardSet
from raytrain.errors import RaytrainError
from raytrain.recipe.load import dump_recipe, recipe_from_dict
from raytrain.recipe.types import Recipe
from raytrain.run.format import duration

OURS = "raytrain"
ABLATIONS = "ablations"
_LOG = "log.txt"
_VALIDATIONS = "validations.jsonl"
_DROPPED = ("checkpoints", "tensorboard", "model.safetensors", "metrics.jsonl", "convergence.png")
_PACKAGES = ("raytrain", "torch", "torchvision", "timm", "numpy", "opencv-python-headless")


def _same_everywhere(key: str, choose: Callable[[list[Any]], Any]) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        value = choose([phase[key] for phase in data["phases"]])
        for phase in data["phases"]:
            phase[key] = value

    return change


def _set(section: str, key: str, value: Any) -> Callable[[Any], None]:
    return lambda data: data[section].__setitem__(key, value)


_WITHOUT: dict[str, Callable[[Any], None]] = {
    "progressive-resizing": _same_everywhere("image_px", max),
    "dynamic-momentum": _set("schedule", "momentum", 0.9),
    "batch-schedule": _same_everywhere("batch", lambda batches: batches[0]),
    "rectangular-validation": _same_everywhere("rect_val", lambda _: False),
    "ema": _set("ema", "decay", None),
    "label-smoothing": _set("loss", "label_smoothing", 0.0),
}


def ablated(recipe: Recipe, feature: str) -> Recipe:
    """The recipe with one feature off: all images as large as the largest, momentum 0.9, the first
    phase's batch, square validation, no average of the weights, or plain labels."""
    data = recipe.model_dump(mode="json")
    _WITHOUT[feature](data)
    return recipe_from_dict(data)


@dataclass(frozen=True)
class Contender:
    """One that trains to the target.

    Attributes:
        name: ours, ``without FEATURE``, or a rival's with its changes.
        recipe: what it trains, or takes the model and the target from.
        rival: name of a rival in ``raytrain.bench.rivals``; None for a recipe of ours.
        changes: of the rival's settings, ``key=value``.
    """

    name: str
    recipe: Recipe
    rival: str | None = None
    changes: tuple[str, ...] = ()

    def command(self, data: str, folder: Path, seed: int) -> list[str]:
        """What runs it once, in a process of its own."""
        python, recipe = [sys.executable, "-m"], str(folder / "recipe.yaml")
        if self.rival:
            arguments = [self.rival, recipe, data, str(folder), str(seed), *self.changes]
            return [*python, "raytrain.bench.rivals", *arguments]
        run = ["--data", data, "--run-dir", str(folder / "run"), "--set", f"seed={seed}"]
        return [*python, "raytrain", "train", recipe, "--engine", "inline", *run]


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        contender: who.
        seed: of weights, order and crops.
        seconds: training clock at the target or, without it, at the end.
        reached: whether the target was reached.
        epochs: epochs until then.
        top1: of the last validation.
        cpu_seconds: CPU time of the whole process, its start included.
        load: the machine's load average when it ended.
    """

    contender: str
    seed: int
    seconds: float
    reached: bool
    epochs: float
    top1: float
    cpu_seconds: float
    load: float


@dataclass(frozen=True)
class AccuracyReport:
    """All runs, and on what they were made."""

    date: str
    machine: dict[str, str | int | float]
    versions: dict[str, str]
    data: str
    target: float
    no_effect: tuple[str, ...]
    runs: tuple[Run, ...]

    def as_json(self) -> str:
        """All numbers; times in seconds, accuracies as shares."""
        return json.dumps(asdict(self), indent=1)

    def of(self, contender: str) -> list[Run]:
        """A contender's runs, by seed."""
        return sorted((r for r in self.runs if r.contender == contender), key=lambda r: r.seed)

    def table(self) -> Table:
        """For a person: ours first, the others by their times."""
        title = f"seconds to {self.target:.0%} top-1 ({self.machine['cpu']})"
        table = Table(title=title, box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0))
        table.add_column("", overflow="fold")
        for heading in ("hit", "median", "least", "most", "epochs", "top-1", "/ ours", "p"):
            table.add_column(heading, justify="right", no_wrap=True)
        names = list(dict.fromkeys(run.contender for run in self.runs))
        ours = self.of(OURS)
        for name in sorted(names, key=lambda n: (n != OURS, _median(self.of(n)))):
            table.add_row(*self._cells(name, ours))
        if self.no_effect:
            table.caption = f"changes nothing in this recipe: {', '.join(self.no_effect)}"
        return table

    def _cells(self, name: str, ours: list[Run]) -> Iterator[str]:
        runs = self.of(name)
        times = [run.seconds for run in runs]
        reached = sum(run.reached for run in runs)
        bound = ">= " if reached < len(runs) else ""
        yield name
        yield f"{reached}/{len(runs)}"
        yield f"{bound}{statistics.median(times):.1f}"
        yield from (f"{seconds:.1f}" for seconds in (min(times), max(times)))
        yield f"{statistics.median(run.epochs for run in runs):g}"
        yield f"{statistics.median(run.top1 for run in runs):.1%}"
        pairs = [(theirs.seconds, own.seconds) for theirs, own in zip(runs, ours, strict=False)]
        if name == OURS or not pairs:
            yield from ("", "")
            return
        yield f"{bound}{statistics.median(a / b for a, b in pairs):.2f}"
        yield f"{sign_flip_p([math.log(a / b) for a, b in pairs]):.3f}"


def sign_flip_p(differences: Sequence[float]) -> float:
    """Exact two-sided p-value of the paired permutation test (Fisher 1935): the share of all
    choices of signs whose sum is as far from 0 as the one that was seen. With n pairs it is at
    least 2 / 2^n."""
    seen = abs(sum(differences)) * (1 - 1e-12)
    signs = product((-1, 1), repeat=len(differences))
    sums = [abs(sum(s * d for s, d in zip(row, differences, strict=True))) for row in signs]
    return sum(value >= seen for value in sums) / len(sums)


def contenders(recipe: Recipe, against: Sequence[str]) -> tuple[list[Contender], list[str]]:
    """Ours and those that it is compared with.

    Args:
        recipe: ours.
        against: names: ``plain`` or ``timm``, with changes as in ``plain:epochs=20:lr=0.1``;
            ``without-FEATURE``; ``ablations`` for every feature that the recipe uses.

    Returns:
        (the contenders, names of ablations that change nothing).

    Raises:
        RaytrainError: an unknown name, or a recipe without a top-1 target.
    """
    if recipe.target.top1 is None:
        raise RaytrainError("bench accuracy: the recipe has no target.top1; --set target.top1=0.75")
    found, same = [Contender(OURS, recipe)], []
    for text in against:
        name, *changes = text.split(":")
        if name in RIVALS:
            Settings.of(recipe, changes)
            found.append(Contender(text, recipe, name, tuple(changes)))
            continue
        features = list(_WITHOUT) if name == ABLATIONS else [name.removeprefix("without-")]
        for feature in features:
            if feature not in _WITHOUT or changes:
                names = [*RIVALS, ABLATIONS, *(f"without-{known}" for known in _WITHOUT)]
                raise RaytrainError(f"--against {text}: no such rival; known: {', '.join(names)}")
            other = ablated(recipe, feature)
            if other == recipe:
                same.append(feature)
            else:
                found.append(Contender(f"without {feature}", other))
    return found, same


def bench_accuracy(
    recipe: Recipe, data: str, against: Sequence[str], seeds: int, out: Path
) -> AccuracyReport:
    """Train each contender with each seed, one at a time, in an order that turns with the seed.

    Args:
        recipe: ours; it needs a target for top-1.
        data: a ShardSet: a folder or an ``s3://`` address.
        against: see ``contenders``.
        seeds: trainings of each.
        out: an empty or new folder for the report and the logs of all runs.

    Raises:
        RaytrainError: a name or the data is wrong, or a training failed.
    """
    found, same = contenders(recipe, against)
    uri = ShardSet.open(data).uri
    if out.exists() and any(out.iterdir()):
        raise RaytrainError(f"--out {out}: isn't empty; choose a new folder")
    console = Console(stderr=True)
    runs: list[Run] = []
    for seed in range(seeds):
        for contender in found[seed % len(found) :] + found[: seed % len(found)]:
            run = _run(contender, uri, out, seed)
            runs.append(run)
            end = "" if run.reached else ", target missed"
            console.print(f"{run.contender}, seed {seed}: {duration(run.seconds)}{end}")
    report = AccuracyReport(
        date=datetime.now(UTC).date().isoformat(),
        machine=this_machine(),
        versions=versions_of(_PACKAGES),
        data=uri,
        target=recipe.target.top1 or 0.0,
        no_effect=tuple(same),
        runs=tuple(runs),
    )
    (out / "report.json").write_text(report.as_json() + "\n", encoding="utf-8")
    return report


def _run(contender: Contender, data: str, out: Path, seed: int) -> Run:
    folder = out / contender.name.replace(" ", "-").replace(":", "-") / f"seed-{seed}"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(dump_recipe(contender.recipe), encoding="utf-8")
    before = _children_cpu()
    with (folder / _LOG).open("w", encoding="utf-8") as log:
        command = contender.command(data, folder, seed)
        status = subprocess.run(command, stdout=log, stderr=log, check=False).returncode  # noqa: S603
    cpu_seconds = _children_cpu() - before
    run_dir = folder if contender.rival else folder / "run"
    if status not in (0, 3) or not (run_dir / _VALIDATIONS).exists():
        raise RaytrainError(f"{contender.name}, seed {seed}, failed; see {folder / _LOG}")
    rows = [json.loads(line) for line in (run_dir / _VALIDATIONS).read_text().splitlines()]
    _keep_only_logs(run_dir)
    top1s = [row.get("ema_top1") or row["top1"] for row in rows]
    target = contender.recipe.target.top1 or 1.0
    at = next((i for i, top1 in enumerate(top1s) if top1 >= target), len(rows) - 1)
    return Run(
        contender=contender.name,
        seed=seed,
        seconds=rows[at]["seconds"],
        reached=top1s[at] >= target,
        epochs=rows[at]["epoch"],
        top1=top1s[-1],
        cpu_seconds=cpu_seconds,
        load=os.getloadavg()[0],
    )


def _keep_only_logs(run_dir: Path) -> None:
    for name in _DROPPED:
        path = run_dir / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _median(runs: Sequence[Run]) -> float:
    return statistics.median(run.seconds for run in runs)
