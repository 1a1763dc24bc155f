"""The journal of a sweep: every decision in its order, so that a resume can take it up exactly.

    {"kind": "asked", ...}    a trial was given its values
    {"kind": "seen", ...}     a trial was validated, and goes on or is stopped
    {"kind": "ended", ...}    a trial came to its end by itself

What is not in the journal hasn't been decided: samples, rungs and results of a sweep are what its
lines say, and a resumed sweep reads them in again before it decides anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from raytrain.errors import RaytrainError
from raytrain.run.history import read_jsonl
from raytrain.run.record import drop_torn_line, plain
from raytrain.run.rows import Number

JOURNAL = "journal.jsonl"
EndStatus = Literal["finished", "diverged", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A trial was given its values."""

    trial: int
    """Number of the trial, from 0."""
    values: Mapping[str, Any]
    """What was drawn from the space, by the names that it gives."""
    changes: Mapping[str, Any]
    """What that makes of the recipe, by dotted paths."""
    at: float
    """Wall clock in seconds since the epoch."""
    kind: Literal["asked"] = "asked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A trial was validated, and what was decided then."""

    trial: int
    samples: int
    """Images that it has trained on, repeats counted."""
    epoch: float
    """Epochs done."""
    top1: float
    top5: float
    loss: Number
    """Validation loss."""
    seconds: float
    """The trial's training clock."""
    goes_on: bool
    """False: it was stopped here."""
    kind: Literal["seen"] = "seen"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A trial came to its end by itself."""

    trial: int
    status: EndStatus
    """`finished`: all epochs, or the target; `diverged`: its loss wasn't finite; `failed`: else."""
    reason: str
    """One line."""
    at: float
    kind: Literal["ended"] = "ended"


Entry = Asked | Seen | Ended
_ENTRY: TypeAdapter[Entry] = TypeAdapter(Annotated[Entry, Field(discriminator="kind")])


def read_journal(path: Path) -> list[Entry]:
    """All whole lines; none where there is no file.

    Raises:
        RaytrainError: a line is damaged; names it.
    """
    entries: list[Entry] = []
    for line, row in enumerate(read_jsonl(path), 1):
        try:
            entries.append(_ENTRY.validate_python(row))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(str(part) for part in first["loc"])
            raise RaytrainError(f"{path}:{line}: {key}: {first['msg']}") from error
    return entries


class Journal:
    """The single writer of a sweep's journal; each line is on disk when ``write`` returns.

    Args:
        path: of the file; a line that a crash tore is cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        drop_torn_line(path)

    def write(self, entry: Entry) -> None:
        """Append a line."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(plain(asdict(entry))) + "\n")
        except OSError as error:
            raise RaytrainError(
                f"cannot write {self.path}: {error.strerror}; make room and --resume the sweep"
            ) from error
