"""Which rows each step really used, for who wants to check that none was lost or repeated.

With ``input.audit`` on, each worker writes ``audit/ATTEMPT-FIRST_STEP-RANK.jsonl``, a line a step.
An attempt is one life of the group of workers; where two attempts ran a step, because the first
died after its last checkpoint, only the later one's weights live on, and only it counts.
"""

from __future__ import annotations

import json
from pathlib import Path

from raytrain.data.order import Rows
from raytrain.errors import RaytrainError
from raytrain.world import World


class Audit:
    """Writes one worker's lines.

    Args:
        folder: the run's ``audit`` folder.
        attempt: number that grows from attempt to attempt; the same on all workers.
        start: first step of the attempt.
        world: the worker.
    """

    def __init__(self, folder: Path, attempt: int, start: int, world: World) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{attempt:020d}-{start:08d}-{world.rank:05d}.jsonl"

    def step(self, index: int, rows: Rows) -> None:
        """Write down that the optimizer stepped on these rows."""
        with self._path.open("a") as file:
            file.write(json.dumps({"step": index, "rows": rows.tolist()}) + "\n")


def used_rows(run_dir: Path) -> dict[int, list[int]]:
    """The rows that each step of a run used, sorted, over all workers.

    Raises:
        RaytrainError: the run was made without ``input.audit``.
    """
    files = sorted((run_dir / "audit").glob("*.jsonl"))
    if not files:
        raise RaytrainError(f"{run_dir}: no audit; train with --set input.audit=true")
    starts = sorted({tuple(int(part) for part in f.stem.split("-")[:2]) for f in files})
    used: dict[int, list[int]] = {}
    for attempt, start in starts:
        for step in [s for s in used if s >= start]:
            del used[step]
        for file in (f for f in files if int(f.stem.split("-")[0]) == attempt):
            for line in file.read_text().splitlines(keepends=True):
                if line.endswith("\n"):  # a last line without one was cut by a kill
                    row = json.loads(line)
                    used.setdefault(row["step"], []).extend(row["rows"])
    return {step: sorted(rows) for step, rows in sorted(used.items())}
