"""Results in DAWNBench's own format: a JSON file about the run and a TSV of its validations.

The format is that of https://github.com/stanford-futuredata/dawn-bench-entries: accuracies in
percent, times in hours, and the first row at the target is the entry's time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from raytrain.errors import RaytrainError
from raytrain.run.history import RECIPE, History
from raytrain.run.rows import Summary, meets

COLUMNS = ("epoch", "hours", "top1Accuracy", "top5Accuracy")
KEYS = ("version", "author", "authorEmail", "framework", "model", "hardware", "timestamp", "misc")


@dataclass(frozen=True, slots=True)
class Point:
    """One validation of an entry."""

    epoch: float
    hours: float
    top1: float
    """Percent."""
    top5: float
    """Percent."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One DAWNBench entry, a public one or ours."""

    meta: Mapping[str, Any]
    points: tuple[Point, ...]


def time_to(entry: Entry, *, top1: float | None = None, top5: float | None = 93.0) -> float | None:
    """Hours to the first validation at the target (percent); None where it was not reached.

    Without arguments: DAWNBench's rule for ImageNet, 93 % top-5.
    """
    for point in entry.points:
        if point.top1 >= (top1 or 0.0) and point.top5 >= (top5 or 0.0):
            return point.hours
    return None


def read_entry(json_path: Path, tsv_path: Path) -> Entry:
    """Read an entry's two files; RaytrainError with file and line where they are none."""
    try:
        meta = json.loads(json_path.read_text(encoding="utf-8"))
        table = tsv_path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise RaytrainError(f"{json_path}: not a DAWNBench entry: {error}") from error
    missing = [key for key in KEYS if key not in meta]
    if missing:
        raise RaytrainError(f"{json_path}: not a DAWNBench entry: no key {missing[0]!r}")
    if not table or tuple(table[0].split("\t")) != COLUMNS:
        raise RaytrainError(f"{tsv_path}:1: expected the columns {', '.join(COLUMNS)}")
    points = tuple(_point(row, f"{tsv_path}:{line}") for line, row in enumerate(table[1:], 2))
    return Entry(meta=meta, points=points)


def entry_meta(history: History) -> dict[str, Any]:
    """What the JSON file of a finished run says; author and URL are for the user to fill in."""
    summary = _summary(history)
    versions = summary.versions
    price = {} if summary.price_per_hour is None else {"costPerHour": summary.price_per_hour}
    return {
        "version": "v1.0",
        "author": "",
        "authorEmail": "",
        "framework": f"raytrain {versions['raytrain']}, PyTorch {versions['torch']}",
        "codeURL": "",
        "model": summary.model,
        "hardware": str(summary.hardware),
        **price,
        "timestamp": datetime.now(UTC).date().isoformat(),
        "misc": {
            "target": dict(summary.target),
            "validation clock": summary.validation_clock,
            "workers": list(summary.world_sizes),
            "faults": summary.faults,
            "data": summary.data.uri,
            "data fingerprint": summary.data.fingerprint,
            "git commit": summary.git_commit,
            "versions": dict(versions),
            "recipe": _recipe(history),
        },
        # As in the public entries: no validation image is left out.
        "usedBlacklist": True,
    }


def entry_table(history: History) -> str:
    """The TSV file of a finished run: its validations up to the first at the target."""
    target = _summary(history).target
    lines = ["\t".join(COLUMNS)]
    for row in history.validations:
        hours, top1, top5 = row.seconds / 3600, 100 * row.counted("top1"), 100 * row.counted("top5")
        lines.append(f"{row.epoch:g}\t{hours:.9f}\t{top1:.9g}\t{top5:.9g}")
        if meets(target, row):
            break
    return "\n".join(lines) + "\n"


def _summary(history: History) -> Summary:
    if history.summary is None:
        raise RaytrainError(f"{history.path}: the run has not ended, so it is no entry yet")
    return history.summary


def _recipe(history: History) -> Any:
    path = history.path / RECIPE
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None


def _point(row: str, where: str) -> Point:
    try:
        epoch, hours, top1, top5 = (float(cell) for cell in row.split("\t"))
    except ValueError as error:
        raise RaytrainError(f"{where}: expected {len(COLUMNS)} numbers ({error})") from error
    return Point(epoch, hours, top1, top5)
