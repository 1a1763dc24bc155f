"""Which rows each step really used, for who wants to check that none was lost or repeated.

With ``input.audit`` on, each worker writes ``audit/ATTEMPT-RANK-TIME.jsonl``: a line with its rows
when it sets out to make a step, and one when the optimizer made it. An exchange of gradients ends
well only with every worker's part, so where one worker made the step, all rows of that try are in
the weights, also those of a worker that was lost before it could say so. Where a step was made
again, because the weights that it led to were lost, only the last time counts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raytrain.data.order import Rows
from raytrain.errors import RaytrainError


class Audit:
    """Writes one worker's lines.

    Args:
        folder: the run's ``audit`` folder.
        attempt: number of this life of the workers together: the same on all of them, and larger
            than that of any life before.
        rank: the worker's.
        on: whether anything is written at all.
    """

    def __init__(self, folder: Path, attempt: int, rank: int, on: bool) -> None:
        self._on = on
        if on:
            folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{attempt:020d}-{rank:05d}-{time.time_ns()}.jsonl"

    def tries(self, step: int, quorum: int, rows: Rows) -> None:
        """Write down that this worker's part of a step is these rows.

        Args:
            step: number of the step.
            quorum: number of the workers' quorum, which grows.
            rows: int64, shape (n,).
        """
        if self._on:
            self._write({"step": step, "quorum": quorum, "rows": rows.tolist()})

    def made(self, step: int, quorum: int) -> None:
        """Write down that the optimizer made the step with the parts of all."""
        if self._on:
            self._write({"step": step, "quorum": quorum})

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def used_rows(run_dir: Path) -> dict[int, list[int]]:
    """The rows that each step of a run used, sorted, over all workers.

    Raises:
        RaytrainError: the run was made without ``input.audit``.
    """
    files = sorted((run_dir / "audit").glob("*.jsonl"))
    if not files:
        raise RaytrainError(f"{run_dir}: no audit; train with --set input.audit=true")
    tried: dict[tuple[int, int, int], list[int]] = {}
    made: set[tuple[int, int, int]] = set()
    for file in files:
        attempt = int(file.stem.split("-")[0])
        for line in _lines(file):
            key = (attempt, line["quorum"], line["step"])
            if "rows" in line:
                tried.setdefault(key, []).extend(line["rows"])
            else:
                made.add(key)
    used: dict[int, list[int]] = {}
    before: tuple[int, int] | None = None
    for attempt, quorum, step in sorted(made):
        if (attempt, quorum) != before:  # other weights than those that made this step and later
            used = {s: rows for s, rows in used.items() if s < step}
            before = attempt, quorum
        used[step] = sorted(tried[attempt, quorum, step])
    return dict(sorted(used.items()))


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_text().splitlines(keepends=True):
        if line.endswith("\n"):  # a last line without one was cut by a kill
            yield json.loads(line)
