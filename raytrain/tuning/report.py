"""What a sweep hands back: sweep.json, a table, pictures, and the best recipe to train."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from raytrain.recipe.load import dump_recipe
from raytrain.recipe.types import Recipe
from raytrain.run.format import duration, goal, number, percent
from raytrain.run.record import plain
from raytrain.run.rows import Shares
from raytrain.tuning.importance import Importance, importances
from raytrain.tuning.options import Settings
from raytrain.tuning.pictures import draw_curves, draw_importances
from raytrain.tuning.rungs import Rungs
from raytrain.tuning.trials import Trial, ranked

SWEEP, BEST, CURVES, IMPORTANCES = "sweep.json", "best.yaml", "curves.png", "importance.png"


@dataclass(frozen=True)
class SweepReport:
    """A sweep that has ended, or was cut off.

    Attributes:
        settings: what was asked for.
        rungs: where trials were compared.
        trials: in the order of their numbers.
        retrained: the best recipe with new seeds; empty where that wasn't done.
        target: of the recipe; empty without one.
        ended_by: ``interrupted``, ``time budget``, or empty where all trials ran.
    """

    settings: Settings
    rungs: Rungs
    trials: Sequence[Trial]
    retrained: Sequence[Trial]
    target: Shares
    ended_by: str = ""

    @property
    def ranked(self) -> list[Trial]:
        """From best to worst; broken ones last."""
        return ranked(self.trials, self.settings.options.objective, self.target)

    @property
    def best(self) -> Trial | None:
        """The best trial; None where none came to a result."""
        usable = [t for t in self.ranked if not t.is_broken and t.rows]
        return usable[0] if usable else None

    @property
    def broken(self) -> list[Trial]:
        """Trials that failed or diverged."""
        return [t for t in self.trials if t.is_broken]

    @property
    def compute_share(self) -> float:
        """Images that the trials trained on, as a share of what all would to their ends."""
        full = self.rungs.most_samples * self.settings.options.samples
        return sum(t.samples for t in self.trials) / full

    @property
    def importances(self) -> list[Importance]:
        """How much each drawn value decides."""
        return importances(self.trials, self.rungs)

    def table(self) -> Table:
        """The trials from best to worst."""
        table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0))
        table.add_column("trial", justify="right")
        table.add_column("values", overflow="fold", ratio=1)
        table.add_column("rung", justify="right")
        table.add_column("top-1", justify="right")
        table.add_column("time", justify="right")
        table.add_column("ended", overflow="fold", ratio=1)
        most = len(self.rungs.samples) + 1
        for trial in self.ranked:
            rung = self.rungs.reached(trial.samples) + (trial.samples >= self.rungs.most_samples)
            cells = (
                str(trial.number),
                shown(trial.values),
                f"{rung}/{most}",
                percent(trial.best_top1 if trial.rows else None),
                duration(trial.seconds),
                f"{trial.status}: {trial.reason}" if trial.reason else trial.status,
            )
            table.add_row(*(Text(cell) for cell in cells))
        return table

    def closing(self, folder: Path) -> str:
        """The last lines for a person."""
        best, lines = self.best, []
        if self.ended_by:
            lines.append(f"ended by the {self.ended_by}: {len(self.trials)} trials were begun")
        if best is not None:
            lines.append(
                f"best: trial {best.number}, {self._result_of(best)}: {shown(best.values)}"
            )
        if self.retrained:
            lines.append(f"again: {self.winners_curse()}")
        lines += [
            f"compute: {percent(self.compute_share, 0)} of training all "
            f"{self.settings.options.samples} samples to their ends; {len(self.broken)} broken",
            f"files: {folder} ({SWEEP}, {BEST}, {CURVES}, {IMPORTANCES})",
        ]
        return "\n".join(lines)

    def winners_curse(self) -> str:
        """The best recipe's results with new seeds, beside the one that it was chosen for."""
        best, whole = self.best, [t for t in self.retrained if not t.is_broken and t.rows]
        if best is None or not whole:
            return "no training with a new seed came to a result"
        again = [t.best_top1 for t in whole]
        mean = statistics.mean(again)
        text = (
            f"{len(again)} new seeds reach {', '.join(percent(v) for v in again)}, mean "
            f"{percent(mean)}; {percent(best.best_top1)} in the sweep, "
            f"{100 * (best.best_top1 - mean):+.2f} points more than the mean: the winner's luck"
        )
        missing = len(self.retrained) - len(whole)
        return text + (f"; {missing} broken" if missing else "")

    def as_dict(self) -> dict[str, Any]:
        """What sweep.json holds."""
        best = self.best
        return {
            "settings": self.settings.model_dump(mode="json"),
            "ended_by": self.ended_by or "all trials",
            "rungs_samples": list(self.rungs.samples),
            "most_samples": self.rungs.most_samples,
            "best_trial": best.number if best else None,
            "best_top1": best.best_top1 if best else None,
            "compute_share": self.compute_share,
            "trials": [self._trial(t) for t in self.ranked],
            "retrained": [self._trial(t) for t in self.retrained],
            "retrained_mean_top1": self.retrained_mean,
            "importance": [
                {"name": i.name, "share": i.share, "by_chance": i.by_chance, "trials": i.trials}
                for i in self.importances
            ],
        }

    @property
    def retrained_mean(self) -> float | None:
        """Mean best top-1 of the new seeds."""
        values = [t.best_top1 for t in self.retrained if not t.is_broken and t.rows]
        return statistics.mean(values) if values else None

    def _trial(self, trial: Trial) -> dict[str, Any]:
        return {
            "trial": trial.number,
            "values": trial.values,
            "changes": trial.changes,
            "status": trial.status,
            "reason": trial.reason,
            "rungs": self.rungs.reached(trial.samples),
            "samples": trial.samples,
            "top1": trial.best_top1 if trial.rows else None,
            "seconds": trial.seconds,
            "seconds_to_target": trial.seconds_to(self.target),
        }

    def _result_of(self, trial: Trial) -> str:
        seconds = trial.seconds_to(self.target)
        if self.settings.options.objective == "seconds" and seconds is not None:
            return f"{goal(self.target)} in {duration(seconds)}"
        return f"top-1 {percent(trial.best_top1)}"


def shown(values: Mapping[str, Any]) -> str:
    """Drawn values in one line: ``high 0.9512, low 0.85``."""
    return ", ".join(
        f"{name} {number(value) if isinstance(value, float) else value}"
        for name, value in values.items()
    )


def write_report(report: SweepReport, best: Recipe | None, folder: Path) -> None:
    """Write sweep.json, best.yaml and the pictures; files of an earlier report are replaced.

    Args:
        report: of the sweep.
        best: recipe of the best trial, where there is one.
        folder: the sweep's.
    """
    _replace(folder / SWEEP, json.dumps(plain(report.as_dict()), indent=1) + "\n")
    if best is None or report.best is None:
        return
    head = f"# found by raytrain sweep: trial {report.best.number}, {shown(report.best.values)}\n"
    head += f"# top-1 {percent(report.best.best_top1)} in the sweep\n"
    if report.retrained:
        head += f"# {report.winners_curse()}\n"
    _replace(folder / BEST, head + dump_recipe(best))
    draw_curves(report.trials, report.rungs, report.best, folder / CURVES)
    draw_importances(report.importances, folder / IMPORTANCES)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
