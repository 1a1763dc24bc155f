"""What a person sees while a run goes on: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from raytrain.recipe.plan import Plan
from raytrain.run.format import duration, goal, number, percent, rate
from raytrain.run.rows import EventRow, Shares, StepRow, Summary, ValidationRow

RECENT_STEPS = 100
INPUT_BOUND = 0.25
"""Share of the time spent waiting for images from which a run is called input-bound."""
QUIET_EVENTS = (
    "start",
    "startup",
    "worker",
    "exchange",
    "checkpoint",
    "validation",
    "restarted",
    "standing_by",
    "end",
)


class Progress:
    """Shows a run from its rows. Use as a context; the panel goes when it ends.

    Not a terminal: one line at most every `interval_s` seconds, and one for each validation and
    event.
    """

    def __init__(
        self, plan: Plan, console: Console | None = None, *, interval_s: float = 5.0
    ) -> None:
        self._plan = plan
        self._console = console or Console()
        self._interval_s = interval_s
        self._state = State(plan)
        self._began = time.monotonic()
        self._printed = float("-inf")
        self._live: Live | None = None

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self._panel,
                console=self._console,
                refresh_per_second=4,
                transient=True,
            )
            self._live.start(refresh=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def steps(self, rows: Sequence[StepRow]) -> None:
        """Take in training steps, in order."""
        if not rows:
            return
        self._state.steps(rows)
        now = time.monotonic()
        if self._live is None and now - self._printed >= self._interval_s:
            self._printed = now
            self._print(self._state.line())

    def validation(self, row: ValidationRow) -> None:
        """Take in a validation."""
        self._state.validations.append(row)
        average = "" if row.ema_top1 is None else f"average's top-1 {percent(row.ema_top1)}  "
        self._print(
            f"epoch {row.epoch:g}: top-1 {percent(row.top1)}  top-5 {percent(row.top5)}  "
            f"{average}loss {number(row.loss)}  at {duration(row.seconds)}"
        )

    def event(self, row: EventRow) -> None:
        """Tell of an event; the frequent and the silent kinds are left to events.jsonl."""
        if row.kind in QUIET_EVENTS:
            return
        parts = [f"{row.kind.replace('_', ' ')} at step {row.step:,}"]
        if "world_size" in row.detail:
            parts.append(f"{row.detail['world_size']} workers")
        if "reason" in row.detail:
            parts.append(str(row.detail["reason"]))
        self._print(": ".join(parts))

    def seconds_left(self) -> float | None:
        """Estimated clock until the last step; None before there is something to go by."""
        return self._state.seconds_left()

    def say(self, line: str) -> None:
        """Print a line, above the panel where there is one."""
        self._print(line)

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)

    def _panel(self) -> Panel:
        if self._state.last is None:
            waited = duration(time.monotonic() - self._began)
            body: Text | Group = Text(f"starting the workers, {waited}")
        else:
            body = self._state.table()
        return Panel(body, title=Text(self._plan.recipe.model.name), title_align="left")


class State:
    """What is known of the run so far, and what it says about the rest."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.target: Shares = plan.recipe.target.model_dump(exclude_none=True)
        self.recent: deque[StepRow] = deque(maxlen=RECENT_STEPS)
        self.validations: list[ValidationRow] = []

    @property
    def last(self) -> StepRow | None:
        return self.recent[-1] if self.recent else None

    def steps(self, rows: Sequence[StepRow]) -> None:
        """Take in steps; those that run again after a fault replace what they were."""
        if self.last is not None and rows[0].step <= self.last.step:
            self.recent.clear()
        self.recent.extend(rows)

    @property
    def images_per_s(self) -> float:
        """Of the recent steps together."""
        return sum(row.batch for row in self.recent) / self._step_seconds()

    @property
    def wait_share(self) -> float:
        """Share of the recent steps' time in which they waited for their images."""
        return sum(row.data_wait_s for row in self.recent) / self._step_seconds()

    def seconds_left(self) -> float | None:
        """Estimated clock until the last step; None before there is something to go by.

        The recent pace in pixels a second, pauses included, over the pixels of the steps to come:
        a phase with larger images takes longer.
        """
        rows = list(self.recent)
        seconds = rows[-1].seconds - rows[0].seconds if rows else 0.0
        if seconds <= 0:
            return None
        pixels = sum(row.batch * row.image_px**2 for row in rows[1:])
        return self._pixels_left(rows[-1].step + 1) / pixels * seconds

    def seconds_to_target(self) -> float | None:
        """Estimated clock until the target: as if the error went on falling by the same factor.

        The factor is that of the last two validations; a straight line would promise too much.
        None without a target, once it is reached, and where it would be reached after the end.
        """
        left = self.seconds_left()
        if left is None or len(self.validations) < 2:
            return None
        before, now = self.validations[-2:]
        waits = [0.0]
        for key, share in self.target.items():
            past, error, allowed = (1 - v for v in (before.counted(key), now.counted(key), share))
            if error <= allowed:
                continue
            if error >= past or allowed <= 0:
                return None
            steepness = math.log(past / error) / (now.seconds - before.seconds)
            waits.append(math.log(error / allowed) / steepness)
        ahead = now.seconds + max(waits) - self.recent[-1].seconds
        return ahead if 0 < ahead <= left else None

    def line(self) -> str:
        """The newest step as one plain line."""
        row = self.recent[-1]
        parts = [
            f"step {row.step + 1:,}/{self.plan.num_steps:,}",
            f"epoch {row.epoch + 1}/{self.plan.num_epochs}",
            f"{row.image_px} px",
            f"batch {row.batch:,}",
            f"lr {number(row.lr)}",
            f"momentum {number(row.momentum)}",
            f"loss {number(row.loss)}",
            f"{rate(self.images_per_s)} images/s",
            f"workers {row.world_size}",
            f"data wait {self._wait()}",
            f"at {duration(row.seconds)}",
            f"left {_about(self.seconds_left())}",
        ]
        to_target = self.seconds_to_target()
        if to_target is not None:
            parts.append(f"target in {_about(to_target)}")
        return "  ".join(parts)

    def table(self) -> Group:
        """The newest step as a bar and a table."""
        row = self.recent[-1]
        done = row.step + 1
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column(ratio=1)
        head.add_column(justify="right")
        head.add_row(
            ProgressBar(total=self.plan.num_steps, completed=done),
            f"step {done:,}/{self.plan.num_steps:,}",
        )
        body = Table.grid(padding=(0, 2), expand=True)
        for _ in range(3):
            body.add_column(style="dim", no_wrap=True)
            body.add_column(ratio=1, no_wrap=True)
        cells = self._cells(row)
        for first in range(0, len(cells), 3):
            body.add_row(*(part for cell in cells[first : first + 3] for part in cell))
        return Group(head, body)

    def _cells(self, row: StepRow) -> list[tuple[str, Text]]:
        newest = self.validations[-1] if self.validations else None
        wait_style = "bold red" if self.wait_share > INPUT_BOUND else ""
        cells = [
            ("epoch", f"{row.epoch + 1}/{self.plan.num_epochs}", ""),
            ("image", f"{row.image_px} px", ""),
            ("batch", f"{row.batch:,}", ""),
            ("lr", number(row.lr), ""),
            ("momentum", number(row.momentum), ""),
            ("loss", number(row.loss), ""),
            ("images/s", rate(self.images_per_s), ""),
            ("workers", str(row.world_size), ""),
            ("data wait", self._wait(), wait_style),
            ("top-1", percent(newest.counted("top1") if newest else None), "bold"),
            ("top-5", percent(newest.counted("top5") if newest else None), "bold"),
            ("target", goal(self.target) or "none", ""),
            ("elapsed", duration(row.seconds), ""),
            ("left", _about(self.seconds_left()), ""),
            ("target in", _about(self.seconds_to_target()), ""),
        ]
        return [(label, Text(text, style=style)) for label, text, style in cells]

    def _wait(self) -> str:
        note = " (input-bound)" if self.wait_share > INPUT_BOUND else ""
        return f"{percent(self.wait_share, 0)}{note}"

    def _step_seconds(self) -> float:
        return sum(row.batch / row.images_per_s for row in self.recent)

    def _pixels_left(self, done: int) -> float:
        pixels = 0.0
        for span in self.plan.phases:
            steps = min(span.num_steps, max(0, span.first_step + span.num_steps - done))
            images = steps * self.plan.num_images / span.steps_per_epoch
            pixels += images * span.phase.image_px**2
        return pixels


def closing(summary: Summary, run_dir: Path) -> str:
    """The last lines of a run: how it ended, how good and how fast, and where the files are."""
    lines = [f"{summary.status.replace('_', ' ')}: {summary.reason}"]
    if summary.top1 is not None:
        lines.append(
            f"  accuracy   top-1 {percent(summary.top1)}, top-5 {percent(summary.top5)} "
            f"(best {percent(summary.best_top1)}, {percent(summary.best_top5)})"
        )
    if summary.seconds_to_target is not None:
        lines.append(
            f"  to target  {duration(summary.seconds_to_target)} "
            f"({goal(summary.target)}, validation time {summary.validation_clock})"
        )
    speed = "" if summary.images_per_s is None else f", {rate(summary.images_per_s)} images/s"
    lines += [
        f"  training   {duration(summary.seconds)}, {summary.epochs:g} epochs, "
        f"{summary.steps:,} steps{speed}",
        f"  picture    {run_dir / 'convergence.png'}",
        f"  files      {run_dir}",
    ]
    return "\n".join(lines)


def _about(seconds: float | None) -> str:
    return "-" if seconds is None else f"~{duration(seconds)}"
