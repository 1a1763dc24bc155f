"""`raytrain report`: several runs side by side, as a table and as one picture."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from raytrain.errors import RaytrainError
from raytrain.run.dawnbench import first_point_at, read_entry
from raytrain.run.format import duration, goal, percent, rate
from raytrain.run.history import EVENTS, METRICS, History, is_run, read_history, summarize
from raytrain.run.rows import Shares, Summary, first_at_target


def only_runs(folders: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Split folders, such as those of ``runs/*``, into runs and others.

    Where none is a run, all are kept, so that reading them says what is wrong.
    """
    runs = [folder for folder in folders if is_run(folder)]
    others = [folder for folder in folders if not is_run(folder)]
    return (runs, others) if runs else (others, [])


def report(run_dirs: Sequence[str | Path], picture: Path | None = None) -> Table:
    """Compare runs, finished or not; with `picture`, also draw them together into that PNG.

    Raises RaytrainError for a folder that is no run, a damaged file, or a picture that cannot be
    written.
    """
    from raytrain.run.picture import draw_convergence  # noqa: PLC0415 - matplotlib is slow

    histories = [read_history(Path(run_dir)) for run_dir in run_dirs]
    if picture is not None:
        try:
            draw_convergence(histories, picture)
        except OSError as error:
            raise RaytrainError(
                f"cannot draw the picture {picture}: {error.strerror}; give another --out"
            ) from error
    return runs_table(histories)


def comparison(run_dirs: Sequence[str | Path], entries: Sequence[str | Path]) -> Table:
    """Runs beside DAWNBench entries: time, epochs and cost to the same accuracy.

    The accuracy is the first run's target, or DAWNBench's 93 % top-5 where that has none.

    Args:
        run_dirs: finished runs or not.
        entries: JSON files of entries, each with its TSV file beside it.

    Raises:
        RaytrainError: a folder is no run, or a file is no entry.
    """
    histories = [read_history(Path(run_dir)) for run_dir in run_dirs]
    facts = histories[0].facts
    target = facts.target if facts and facts.target else {"top5": 0.93}
    table = Table(box=SIMPLE_HEAD, header_style="bold", title=f"to {goal(target)}")
    table.add_column("run or entry", overflow="fold")
    table.add_column("model", overflow="fold")
    for column in ("time", "epochs", "cost"):
        table.add_column(column, justify="right")
    for history in histories:
        row = first_at_target(target, history.validations)
        facts = history.facts
        cost = _cost(facts.price_per_hour if facts else None, row.seconds if row else None)
        table.add_row(
            Text(history.name),
            Text(facts.model if facts else "-"),
            *((duration(row.seconds), f"{row.epoch:g}") if row else ("not reached", "-")),
            cost,
        )
    for path in map(Path, entries):
        table.add_row(*_entry_cells(path, target))
    return table


def _entry_cells(path: Path, target: Shares) -> list[Text]:
    entry = read_entry(path, path.with_suffix(".tsv"))
    percents = {key: 100 * share for key, share in target.items()}
    point = first_point_at(entry, percents.get("top1", 0.0), percents.get("top5", 0.0))
    seconds = point.hours * 3600 if point else None
    return [
        Text(path.stem),
        Text(str(entry.meta["model"])),
        Text(duration(seconds) if seconds is not None else "not reached"),
        Text(f"{point.epoch:g}" if point else "-"),
        Text(_cost(entry.meta.get("costPerHour"), seconds)),
    ]


def _cost(price_per_hour: float | None, seconds: float | None) -> str:
    if price_per_hour is None or seconds is None:
        return "-"
    return f"${price_per_hour * seconds / 3600:,.2f}"


def runs_table(histories: Sequence[History]) -> Table:
    """Two lines a run, so that the table fits a terminal of 80 columns."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", leading=1, padding=(0, 1, 0, 0))
    table.add_column("run\nmodel", overflow="fold")
    table.add_column("status\nvalidation", overflow="fold")
    table.add_column("best top-1\nbest top-5", justify="right")
    table.add_column("time\nto target", justify="right")
    table.add_column("epochs\nsteps", justify="right")
    table.add_column("images/s\ncost", justify="right")
    table.add_column("workers\nrestarts", justify="right")
    names = [history.name for history in histories]
    for history in histories:
        ambiguous = names.count(history.name) > 1
        table.add_row(*_cells(history, str(history.path) if ambiguous else history.name))
    return table


def _cells(history: History, name: str) -> list[Text]:
    """The cells of a run's row; as Text, so that a name with brackets is no markup."""
    if history.facts is None:
        return [Text(name), Text(f"not started\nsilent {_silence(history)}")]
    # A run without a summary is summed up as if it ended now.
    summary = history.summary or summarize(
        history, "interrupted", "", seconds=history.last_seconds, startup_seconds=None
    )
    if history.summary:
        status = f"{summary.status.replace('_', ' ')}\n{summary.validation_clock}"
    else:
        status = f"running or dead\nsilent {_silence(history)}"
    speed = "-" if summary.images_per_s is None else rate(summary.images_per_s)
    cost = "-" if summary.cost is None else f"${summary.cost:,.2f}"
    cells = [
        f"{name}\n{summary.model}",
        status,
        f"{percent(summary.best_top1)}\n{percent(summary.best_top5)}",
        f"{duration(summary.seconds)}\n{_to_target(summary)}",
        f"{summary.epochs:g}\n{summary.steps:,}",
        f"{speed}\n{cost}",
        f"{_workers(summary.world_sizes)}\n{summary.restarts}",
    ]
    return [Text(cell) for cell in cells]


def _to_target(summary: Summary) -> str:
    if not summary.target:
        return "no target"
    if summary.seconds_to_target is None:
        return "missed" if summary.status == "target_missed" else "-"
    return duration(summary.seconds_to_target)


def _workers(sizes: Sequence[int]) -> str:
    if len(sizes) <= 1:
        return str(*sizes)
    return f"{min(sizes)} to {max(sizes)}"


def _silence(history: History) -> str:
    """How long ago the run wrote its last row, for a person to tell running from dead."""
    files = [history.path / name for name in (METRICS, EVENTS)]
    newest = max(file.stat().st_mtime for file in files if file.exists())
    return duration(max(0.0, time.time() - newest))
