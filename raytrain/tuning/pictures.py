"""The pictures of a sweep: learning curves with the rungs, and what the values decide."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from raytrain.run.format import percent
from raytrain.run.picture import BLUE, GREY, INK, ORANGE, style
from raytrain.tuning.importance import Importance
from raytrain.tuning.rungs import Rungs
from raytrain.tuning.trials import Trial


def draw_curves(trials: Sequence[Trial], rungs: Rungs, best: Trial, path: Path) -> None:
    """Top-1 of each trial over the epochs, with the rungs; a cross where one broke.

    Args:
        trials: of a sweep.
        rungs: where they were compared.
        best: is drawn bold.
        path: of the PNG.
    """
    figure = Figure(figsize=(9, 4.6), dpi=150, layout="constrained")
    axes = figure.subplots()
    style(axes)
    styles = {"stopped": (GREY, 0.9), "finished": (BLUE, 1.3), "running": (BLUE, 0.9)}
    for trial in trials:
        if not trial.rows or trial is best:
            continue
        epochs, top1 = _points(trial)
        color, width = styles.get(trial.status, (ORANGE, 0.9))
        axes.plot(epochs, top1, color=color, lw=width, alpha=0.7)
        axes.plot(epochs[-1:], top1[-1:], "X" if trial.is_broken else ".", color=color, ms=6)
    epochs, top1 = _points(best)
    label = f"trial {best.number}, the best: {percent(best.best_top1)}"
    axes.plot(epochs, top1, color=BLUE, lw=2.6, marker="o", ms=4, zorder=4, label=label)
    for number, samples in enumerate(rungs.samples, 1):
        axes.axvline(samples / rungs.num_images, color=INK, lw=0.8, ls=":", zorder=1)
        axes.annotate(
            f"rung {number}",
            (samples / rungs.num_images, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, -9),
            textcoords="offset points",
            fontsize=8,
            color=INK,
        )
    for status, (color, width) in styles.items():
        if number_of := sum(t.status == status for t in trials):
            axes.plot([], [], color=color, lw=width, label=f"{number_of} {status}")
    if broken := sum(t.is_broken for t in trials):
        axes.plot([], [], "X", color=ORANGE, label=f"{broken} failed or diverged")
    axes.set_xlim(0, rungs.num_epochs * 1.02)
    axes.set_xlabel("epochs")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("validation top-1, %")
    axes.legend(loc="lower right", frameon=False, fontsize=8.5)
    figure.savefig(path, format="png")


def draw_importances(found: Sequence[Importance], path: Path) -> None:
    """How much each value decides, as bars, each with the level that chance alone comes to.

    Args:
        found: the greatest first.
        path: of the PNG; an earlier one goes where there is nothing to show.
    """
    if not found:
        path.unlink(missing_ok=True)
        return
    figure = Figure(figsize=(9, 1.3 + 0.42 * len(found)), dpi=150, layout="constrained")
    axes = figure.subplots()
    style(axes)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x", color="#e6e8ec", lw=0.7)
    for place, one in enumerate(reversed(found)):
        color = BLUE if one.share > one.by_chance else GREY
        axes.barh(place, 100 * one.share, height=0.6, color=color)
        axes.plot([100 * one.by_chance] * 2, [place - 0.4, place + 0.4], color=ORANGE, lw=2)
    axes.plot([], [], color=ORANGE, lw=2, label="95 % of random orders stay below")
    names = [f"{one.name} ({one.trials} trials)" for one in reversed(found)]
    axes.set_yticks(range(len(found)), names)
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of the variance of the trials' ranks, %; grey: no more than chance")
    axes.legend(loc="lower right", frameon=False, fontsize=8.5)
    figure.savefig(path, format="png")


def _points(trial: Trial) -> tuple[list[float], list[float]]:
    return [row.epoch for row in trial.rows], [100 * row.top1 for row in trial.rows]
