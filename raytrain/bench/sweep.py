"""ASHA beside training every sample to its end, and a sweep beside the same trainings by hand."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from raytrain.api import Sweep, fit, sweep
from raytrain.bench.measure import Spread
from raytrain.recipe.load import load_recipe
from raytrain.recipe.types import Recipe
from raytrain.run.format import percent
from raytrain.run.record import cpu_model, package_versions
from raytrain.tuning.journal import JOURNAL, Asked, Seen, read_journal


@dataclass(frozen=True)
class Comparison:
    """What was measured.

    Attributes:
        seed: of the samples.
        asha: sweep with ASHA.
        full: sweep of the same samples without early stopping.
        hand: seconds of wall clock that some of the trainings took by hand, by trial.
        swept: the same in the full sweep.
        between: of each trial of the full sweep but the first, seconds of wall clock beside those
            on the training's own clock: what the sweep adds.
    """

    seed: int
    asha: Sweep
    full: Sweep
    hand: dict[int, float]
    swept: dict[int, float]
    between: dict[int, float]

    @property
    def points_lost(self) -> float:
        """Best top-1 of the full search minus ASHA's, in points; below 0 where ASHA's is better."""
        return 100 * (_best(self.full) - _best(self.asha))

    @property
    def compute_ratio(self) -> float:
        """Images trained on with ASHA over those of the full search."""
        return self.asha.report.compute_share / self.full.report.compute_share

    @property
    def overheads(self) -> list[float]:
        """Seconds that each trial took longer than by hand."""
        return [self.swept[number] - seconds for number, seconds in self.hand.items()]


def bench_sweep(  # noqa: PLR0913 (the options of the command line)
    recipe: Recipe,
    data: str | Path,
    spaces: Sequence[Path],
    folder: Path,
    *,
    samples: int = 24,
    seeds: Sequence[int] = (0,),
    by_hand: int = 4,
    factor: int = 4,
) -> list[Comparison]:
    """Run both sweeps on the same samples for each seed, one trial at a time.

    Args:
        recipe: what the samples change.
        data: a ShardSet.
        spaces: files with the spaces.
        folder: where everything goes.
        samples: of each sweep.
        seeds: of the samples.
        by_hand: how many of the trainings are also made by hand.
        factor: of ASHA.
    """
    found: list[Comparison] = []
    for seed in seeds:
        sweeps = {
            scheduler: sweep(
                recipe,
                data,
                spaces,
                out=folder / f"{scheduler}-{seed}",
                samples=samples,
                seed=seed,
                factor=factor,
                scheduler=scheduler,
                retrain=0,
                concurrent=1,
            )
            for scheduler in ("asha", "none")
        }
        full = sweeps["none"]
        took = trial_seconds(full.folder)
        trials = [t for t in full.report.trials if t.status == "finished" and t.number > 0]
        hand = {
            t.number: _by_hand(full, t.number, data, folder / f"hand-{seed}")
            for t in trials[:by_hand]
        }
        swept = {number: took[number] for number in hand}
        trained = {t.number: t.seconds for t in full.report.trials if t.number > 0}
        between = {number: took[number] - seconds for number, seconds in trained.items()}
        found.append(Comparison(seed, sweeps["asha"], full, hand, swept, between))
    return found


def trial_seconds(folder: Path) -> dict[int, float]:
    """Wall clock from each trial's values to the next trial's, or to its own end, in seconds.

    Only where one trial runs at a time.
    """
    entries = read_journal(folder / JOURNAL)
    starts = [(e.trial, e.at) for e in entries if isinstance(e, Asked)]
    last = max(e.at for e in entries if not isinstance(e, Seen))
    ends = [at for _, at in starts[1:]] + [last]
    return {number: end - at for (number, at), end in zip(starts, ends, strict=True)}


def _by_hand(full: Sweep, number: int, data: str | Path, folder: Path) -> float:
    """Train a trial's recipe again in this process, as `raytrain train --engine inline` does."""
    torch.set_num_threads(os.cpu_count() or 1)  # what a trial has that runs alone
    recipe = load_recipe(full.folder / f"trials/{number:03d}/recipe.yaml")
    began = time.perf_counter()
    fit(recipe, data, run_dir=folder / f"{number:03d}", engine="inline")
    return time.perf_counter() - began


def _best(done: Sweep) -> float:
    best = done.report.best
    return best.best_top1 if best else 0.0


def tables(found: Sequence[Comparison]) -> Table:
    """The comparisons, one a line."""
    table = Table(box=SIMPLE_HEAD, header_style="bold")
    for name in ("seed", "ASHA", "all to the end", "points lost", "compute"):
        table.add_column(name, justify="right")
    for name in ("seconds between trainings", "longer than by hand"):
        table.add_column(f"{name}, a trial", justify="right")
    for one in found:
        table.add_row(
            str(one.seed),
            percent(_best(one.asha)),
            percent(_best(one.full)),
            f"{one.points_lost:+.2f}",
            percent(one.compute_ratio, 1),
            _spread(list(one.between.values())),
            _spread(one.overheads),
        )
    return table


def _spread(seconds: Sequence[float]) -> str:
    if not seconds:
        return "-"
    spread = Spread.of(seconds)
    return f"{spread.median:.1f} ({spread.low:.1f} to {spread.high:.1f})"


def as_json(found: Sequence[Comparison], command: str) -> str:
    """All numbers, with what they were measured on."""
    values: dict[str, Any] = {
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "versions": package_versions(),
        "comparisons": [
            {
                "seed": one.seed,
                "samples": len(one.full.report.trials),
                "asha_top1": _best(one.asha),
                "full_top1": _best(one.full),
                "points_lost": one.points_lost,
                "compute_ratio": one.compute_ratio,
                "by_hand_s": one.hand,
                "in_the_sweep_s": one.swept,
                "overheads_s": one.overheads,
                "between_trainings_s": one.between,
            }
            for one in found
        ],
    }
    return json.dumps(values, indent=1)
