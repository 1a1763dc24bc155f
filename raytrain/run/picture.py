"""The convergence picture: accuracy, loss and number of workers over the training clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from raytrain.run.format import duration, goal, percent
from raytrain.run.history import History
from raytrain.run.rows import Shares, StepRow, ValidationRow, first_at_target

BLUE, ORANGE, GREY, INK = "#1b62a5", "#d9822b", "#8a8f98", "#2b2f36"
RUN_COLORS = (BLUE, ORANGE, "#2a8f6d", "#b03a5b", "#6f56a8", "#7a6a3a", "#3aa6b9", "#55606e")
EVENT_COLORS = {
    "fault": "#c62828",
    "resize": "#7b4fb5",
    "recovery": "#2e9e5b",
    "resume": "#2e9e5b",
}
VALIDATION_TOP5: dict[str, Any] = {"lw": 1.3, "ls": (0, (4, 2)), "alpha": 0.75}
TRAINING: dict[str, Any] = {"lw": 0.9, "alpha": 0.7, "zorder": 1.5}
ACCURACY_TOP = 108  # leaves room above 100 % for the image sizes
CLASSES_FOR_TOP5 = 6  # with five classes or fewer every top-5 is 100 %


@dataclass(frozen=True)
class Clock:
    """The unit in which a picture's time axis is read."""

    unit: str
    seconds: float

    @classmethod
    def for_runs(cls, runs: Iterable[History]) -> Clock:
        longest = max((run.last_seconds for run in runs), default=0.0)
        if longest < 180:
            return cls("seconds", 1.0)
        return cls("minutes", 60.0) if longest < 3 * 3600 else cls("hours", 3600.0)

    def of(self, rows: Iterable[StepRow | ValidationRow]) -> list[float]:
        return [row.seconds / self.seconds for row in rows]


def draw_convergence(runs: Sequence[History], path: Path) -> None:
    """Draw one or several runs over time into a PNG.

    Above: top-1 and, with more than five classes, top-5 of validation, thin the training top-1,
    and the targets with the time at which each was reached. Below: the training loss and, where
    it changed, the number of workers. A single run also shows its image sizes and events.
    """
    clock = Clock.for_runs(runs)
    elastic = any(len(run.world_sizes) > 1 for run in runs)
    heights = [3.2, 1.2, 0.6] if elastic else [3.2, 1.2]
    figure = Figure(figsize=(9, 1.5 + 1.1 * sum(heights)), dpi=150, layout="constrained")
    panels = list(
        figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    )
    for panel in panels:
        style(panel)
    alone = len(runs) == 1
    for run, color in zip(runs, _colors(len(runs)), strict=True):
        _draw_accuracy(panels[0], run, clock, color, alone=alone)
        _draw_loss(panels[1], run, clock, ORANGE if alone else color, alone=alone)
        if elastic:
            _draw_workers(panels[2], run, clock, INK if alone else color)
    _draw_targets(panels[0], runs, clock)
    if alone:
        _drawimage_sizes(panels, runs[0].steps, clock)
        _draw_events(panels, runs[0], clock)
    _finish(figure, panels, runs, clock)
    figure.savefig(path, format="png")


def _draw_accuracy(axes: Axes, run: History, clock: Clock, color: str, *, alone: bool) -> None:
    rows = run.validations
    times, top1 = clock.of(rows), [100 * row.counted("top1") for row in rows]
    label = "validation top-1" if alone else _label(run)
    marker = "o" if len(rows) <= 60 else ""
    axes.plot(times, top1, color=color, lw=2, marker=marker, ms=4, zorder=3, label=label)
    if _shows_top5(run):
        top5 = [100 * row.counted("top5") for row in rows]
        label5 = "validation top-5" if alone else None
        axes.plot(times, top5, **VALIDATION_TOP5, color=color, label=label5)
    if run.steps:
        training = _smooth([100 * row.top1 for row in run.steps])
        style, label1 = (GREY, "training top-1") if alone else (color, None)
        axes.plot(clock.of(run.steps), training, **TRAINING, color=style, label=label1)


def _shows_top5(run: History) -> bool:
    return run.facts is not None and run.facts.data.num_classes >= CLASSES_FOR_TOP5


def _draw_loss(axes: Axes, run: History, clock: Clock, color: str, *, alone: bool) -> None:
    if not run.steps:
        return
    times, losses = clock.of(run.steps), [row.loss for row in run.steps]
    if alone:
        axes.plot(times, losses, color=color, lw=0.7, alpha=0.25)
    axes.plot(times, _smooth(losses), color=color, lw=1.4)


def _draw_workers(axes: Axes, run: History, clock: Clock, color: str) -> None:
    times, sizes = clock.of(run.steps), [row.world_size for row in run.steps]
    # A row tells of the step that ended at its time, so its workers stand to the left of it.
    axes.step(times, sizes, where="pre", color=color, lw=1.4)


def _draw_targets(axes: Axes, runs: Sequence[History], clock: Clock) -> None:
    """Each target as a line; on each run, a star where it first met all of its targets."""
    for key, share in {item for run in runs for item in _target(run).items()}:
        axes.axhline(100 * share, color=INK, lw=1, ls=(0, (1, 2)), zorder=1)
        axes.annotate(
            f"target\n{goal({key: share})}",
            (1, 100 * share),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=INK,
        )
    for run, color in zip(runs, _colors(len(runs)), strict=True):
        target = _target(run)
        row = first_at_target(target, run.validations)
        if row is None:
            continue
        time = row.seconds / clock.seconds
        heights = [100 * row.counted(key) for key in target]
        axes.plot([time] * len(heights), heights, "*", color=color, ms=13, mec="white", zorder=4)
        axes.vlines(time, 0, max(heights), color=color, lw=0.9, ls=":", zorder=1)
        if len(runs) == 1:
            early = row.seconds < 0.5 * run.last_seconds
            axes.annotate(
                duration(row.seconds),
                (time, 0),
                xytext=(5 if early else -5, 5),
                textcoords="offset points",
                ha="left" if early else "right",
                fontsize=9,
                color=color,
            )


def _drawimage_sizes(panels: Sequence[Axes], steps: Sequence[StepRow], clock: Clock) -> None:
    """Bands of alternating shade over the time of each image size."""
    longest = steps[-1].seconds if steps else 0.0
    for band, (begin, end, image_px) in enumerate(image_sizes(steps)):
        left, right = begin / clock.seconds, end / clock.seconds
        if band % 2:
            for panel in panels:
                panel.axvspan(left, right, color="#eef1f5", lw=0, zorder=0)
        if end - begin > 0.045 * longest:
            panels[0].text(
                (left + right) / 2,
                (100 + ACCURACY_TOP) / 2,
                f"{image_px} px",
                ha="center",
                va="center",
                fontsize=8,
                color=GREY,
            )


def image_sizes(steps: Sequence[StepRow]) -> Iterator[tuple[float, float, int]]:
    """(begin, end, image size) of each stretch of steps at one size, in seconds."""
    begin = 0.0
    for index, row in enumerate(steps):
        following = steps[index + 1 : index + 2]
        if not following or following[0].image_px != row.image_px:
            yield begin, row.seconds, row.image_px
            begin = row.seconds


def _draw_events(panels: Sequence[Axes], run: History, clock: Clock) -> None:
    named: set[str] = set()
    for event in run.events:
        color = EVENT_COLORS.get(event.kind)
        if color is None:
            continue
        for panel in panels:
            # The accuracy panel has the image sizes above 100 %.
            top = 100 / ACCURACY_TOP if panel is panels[0] else 1.0
            time = event.seconds / clock.seconds
            panel.axvline(time, ymax=top, color=color, lw=0.9, alpha=0.6)
        if event.kind not in named:
            named.add(event.kind)
            panels[0].plot([], [], color=color, lw=1.2, label=event.kind)


def _finish(figure: Figure, panels: Sequence[Axes], runs: Sequence[History], clock: Clock) -> None:
    accuracy, loss = panels[:2]
    accuracy.set_ylim(0, ACCURACY_TOP)
    accuracy.set_yticks(range(0, 101, 20))
    accuracy.set_ylabel("accuracy, %")
    loss.set_ylabel("training loss")
    if len(panels) > 2:
        panels[2].set_ylabel("workers")
        panels[2].set_ylim(0, 1.25 * max(max(run.world_sizes, default=1) for run in runs))
        panels[2].yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    longest = max(run.last_seconds for run in runs) / clock.seconds
    panels[-1].set_xlabel(f"training time, {clock.unit}")
    panels[-1].set_xlim(0, 1.02 * longest or 1.0)
    if len(runs) > 1:
        if any(map(_shows_top5, runs)):
            accuracy.plot([], [], **VALIDATION_TOP5, color=GREY, label="top-5")
        accuracy.plot([], [], **TRAINING, color=GREY, label="training top-1")
    accuracy.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=7 if len(runs) == 1 else 5,
        frameon=False,
        fontsize=8.5,
        borderaxespad=0.2,
        handlelength=1.6,
        columnspacing=1.4,
    )
    title = _title(runs[0]) if len(runs) == 1 else _title_of_several(runs)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11.5, color=INK)


def _title(run: History) -> str:
    target = _target(run)
    row = first_at_target(target, run.validations)
    parts = [run.name]
    if run.facts:
        parts.append(run.facts.model)
    if row:
        parts.append(f"{goal(target)} in {duration(row.seconds)}")
    elif target:
        parts.append(f"{goal(target)} not reached")
    elif run.validations:
        parts.append(f"top-1 {percent(run.validations[-1].counted('top1'))}")
    if run.summary is None:
        parts.append("not ended")
    return "  ·  ".join(parts)


def _title_of_several(runs: Sequence[History]) -> str:
    reached = any(first_at_target(_target(run), run.validations) for run in runs)
    return f"{len(runs)} runs" + (" (time to the target)" if reached else "")


def _label(run: History) -> str:
    """A run's name among several, with its time to the target."""
    row = first_at_target(_target(run), run.validations)
    return f"{run.name} ({duration(row.seconds)})" if row else run.name


def _target(run: History) -> Shares:
    return run.facts.target if run.facts else {}


def _colors(count: int) -> list[str]:
    return [RUN_COLORS[index % len(RUN_COLORS)] for index in range(count)]


def _smooth(values: Sequence[float]) -> list[float]:
    """Mean over a window of one fiftieth of the run around each step."""
    kernel = np.ones(max(1, len(values) // 50))
    weight = np.convolve(np.ones(len(values)), kernel, mode="same")
    return list(np.convolve(np.asarray(values), kernel, mode="same") / weight)


def style(axes: Axes) -> None:
    """Give axes the look of raytrain's pictures."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#c4c8ce")
    axes.tick_params(color="#c4c8ce", labelcolor=INK, labelsize=8.5)
    axes.yaxis.label.set(color=INK, fontsize=9)
    axes.xaxis.label.set(color=INK, fontsize=9)
    axes.grid(axis="y", color="#e6e8ec", lw=0.7)
    axes.set_axisbelow(True)
