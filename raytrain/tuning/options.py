"""What a user asks of a sweep, as it is kept in its directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from raytrain.errors import RaytrainError

Search = Literal["random", "tpe", "bohb", "pb2"]
Scheduler = Literal["asha", "none"]
Objective = Literal["accuracy", "seconds"]
SETTINGS = "settings.json"

_REFUSED: dict[str, str] = {
    "bohb": "Ray's TuneBOHB is built on hpbandster, last released in 2018, and pauses trials by "
    "rounds, which --resume couldn't repeat; use tpe, which with ASHA also models the stopped "
    "trials",
    "pb2": "it changes hyperparameters in the middle of a trial, so what it finds is no recipe "
    "that could be trained again; search over curves instead, with tpe or random",
}


class SweepOptions(BaseModel):
    """The options of a sweep; all that decides which trials run and which are stopped."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    samples: int = 24
    """Trials."""
    search: Search = "random"
    """How values are chosen: `random`, or `tpe`, Optuna's tree of Parzen estimators."""
    scheduler: Scheduler = "asha"
    """`asha`: stop trials that are behind at a rung; `none`: train each to its end."""
    objective: Objective = "accuracy"
    """`accuracy`: best top-1 within the recipe's epochs; `seconds`: time to the recipe's target."""
    grace_epochs: int = 1
    """Epochs before the first rung."""
    factor: int = 4
    """About one of this many trials passes a rung."""
    workers_per_trial: int = 1
    """Training workers of each trial."""
    concurrent: int | None = None
    """Trials at a time; None: as many as fit."""
    seed: int = 0
    """Of the samples. The recipe's own seed decides the trainings."""
    retrain: int = 3
    """New seeds to train the best recipe with afterwards."""

    def check(self) -> None:
        """Raise RaytrainError for what can't work, rather than run it silently without effect."""
        if why := _REFUSED.get(self.search):
            raise RaytrainError(f"--search {self.search}: {why}")
        for name in ("samples", "workers_per_trial"):
            if getattr(self, name) < 1:
                option = name.replace("_", "-")
                raise RaytrainError(f"--{option} {getattr(self, name)}: must be at least 1")


class Settings(BaseModel):
    """Everything that a sweep is a function of, kept so that `--resume` needs nothing else."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    recipe: dict[str, Any]
    """The recipe that the samples change, resolved."""
    spaces: tuple[str, ...]
    """Paths of the files with the spaces."""
    data: str
    """Address of the ShardSet."""
    fingerprint: str
    """Of the ShardSet."""
    device: str
    """`auto`, `cpu` or `cuda`."""
    options: SweepOptions

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read what `write` left. Raises RaytrainError where there is no sweep."""
        path = folder / SETTINGS
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise RaytrainError(
                f"--resume {folder}: holds no sweep (no {SETTINGS}); give the folder that "
                "`raytrain sweep` printed"
            ) from error
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(str(part) for part in first["loc"])
            raise RaytrainError(f"{path}: {key}: {first['msg']}") from error

    def write(self, folder: Path) -> None:
        """Keep the settings in a sweep's directory."""
        text = json.dumps(self.model_dump(mode="json"), indent=1)
        (folder / SETTINGS).write_text(text + "\n", encoding="utf-8")
