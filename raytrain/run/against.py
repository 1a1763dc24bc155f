"""A picture of runs beside DAWNBench entries, by time and by epoch; and pictures in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raytrain.run.dawnbench import read_entry
from raytrain.run.history import read_history
from raytrain.run.picture import GREY, RUN_COLORS, image_sizes, style


@dataclass(frozen=True)
class Picture:
    """A PNG file, which a notebook shows.

    Attributes:
        path: of the file.
    """

    path: Path

    def _repr_png_(self) -> bytes:
        return self.path.read_bytes()


def draw_against(
    run_dirs: Sequence[str | Path], entries: Sequence[str | Path], path: str | Path
) -> Picture:
    """Draw top-1 of runs and of DAWNBench entries over the time and over the epochs.

    The times of ImageNet on a cluster and of a small set on a laptop are far apart, so the axis of
    time is logarithmic. The image sizes of the first run are shaded.

    Args:
        run_dirs: finished or not.
        entries: JSON files of entries, each with its TSV beside it.
        path: of the PNG.

    Raises:
        RaytrainError: a folder is no run, or a file is no entry.
    """
    figure = Figure(figsize=(10, 4.6), dpi=150, layout="constrained")
    by_time, by_epoch = figure.subplots(1, 2, sharey=True)
    lines = _lines_of_runs(run_dirs) + _lines_of_entries(entries)
    for number, line in enumerate(lines):
        color = RUN_COLORS[number % len(RUN_COLORS)]
        width = 2.4 if number < len(run_dirs) else 1.2
        by_time.plot(line.minutes, line.top1, color=color, lw=width, label=line.name)
        by_epoch.plot(line.epochs, line.top1, color=color, lw=width)
    for axes in (by_time, by_epoch):
        style(axes)
    by_time.set_xscale("log")
    by_time.set_xlabel("minutes")
    by_time.set_ylabel("validation top-1, %")
    by_epoch.set_xlabel("epochs")
    if run_dirs:
        _shade(by_epoch, Path(run_dirs[0]))
    figure.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=8)
    figure.savefig(path, format="png")
    return Picture(Path(path))


@dataclass(frozen=True)
class _Line:
    name: str
    minutes: list[float]
    epochs: list[float]
    top1: list[float]


def _lines_of_runs(run_dirs: Sequence[str | Path]) -> list[_Line]:
    lines: list[_Line] = []
    for history in (read_history(Path(run_dir)) for run_dir in run_dirs):
        rows = history.validations
        lines.append(
            _Line(
                history.name,
                [row.seconds / 60 for row in rows],
                [row.epoch for row in rows],
                [100 * row.counted("top1") for row in rows],
            )
        )
    return lines


def _lines_of_entries(entries: Sequence[str | Path]) -> list[_Line]:
    lines: list[_Line] = []
    for path in map(Path, entries):
        points = [p for p in read_entry(path, path.with_suffix(".tsv")).points if p.hours > 0]
        lines.append(
            _Line(
                path.stem,
                [60 * p.hours for p in points],
                [p.epoch for p in points],
                [p.top1 for p in points],
            )
        )
    return lines


def _shade(axes: Axes, run_dir: Path) -> None:
    """Bands over the epochs of each image size of a run."""
    steps = read_history(run_dir).steps
    begin = 0.0
    for band, (_, end, image_px) in enumerate(image_sizes(steps)):
        epochs = max(row.epoch + 1 for row in steps if row.seconds <= end)
        if band % 2 == 0:
            axes.axvspan(begin, epochs, color="#eef1f5", lw=0, zorder=0)
        axes.text(
            (begin + epochs) / 2,
            1.0,
            f"{image_px} px",
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="bottom",
            fontsize=8,
            color=GREY,
        )
        begin = epochs
