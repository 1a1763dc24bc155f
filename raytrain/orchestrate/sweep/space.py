"""Spaces: Python files that say which recipes a sweep may try.

A space is a function ``space(draw)``. It draws named values from Ray Tune's domains and returns
what they make of the recipe, by dotted paths:

    def space(draw):
        high = draw("high", tune.uniform(0.92, 0.99))
        low = draw("low", tune.uniform(0.80, 0.92))
        return {"schedule.momentum": [
            {"until": "30%", "linear": [high, low]},
            {"until": "end", "cosine": [low, high]},
        ]}

Domains may also stand in what is returned, also inside of a curve; their names are their paths.
What is conditional is an ``if``; what a sample must fulfil is ``draw.require(...)``.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ray.tune.search.sample import Domain, Function

from raytrain.errors import RaytrainError, describe_bug
from raytrain.recipe.load import change_recipe
from raytrain.recipe.plan import Plan
from raytrain.recipe.types import Recipe

MOST_TRIES = 100
"""Samples that are drawn in search of a feasible one."""

Ask = Callable[[str, Domain], Any]
"""Chooses a value for a name from a domain."""


class InfeasibleError(Exception):
    """A sample that the space itself rules out; another is drawn."""


@dataclass(frozen=True)
class Setting:
    """What a space may depend on, beside the values that it draws.

    Attributes:
        recipe: that the samples change.
        num_images: training images.
        workers: training workers of each trial.
    """

    recipe: Recipe
    num_images: int
    workers: int


class Draw:
    """Hands a space its values, and remembers them.

    Attributes:
        recipe: that the samples change.
        num_images: training images.
        workers: training workers of each trial.
        values: drawn so far, by name.
    """

    def __init__(self, ask: Ask, setting: Setting) -> None:
        self._ask = ask
        self.recipe = setting.recipe
        self.num_images = setting.num_images
        self.workers = setting.workers
        self.values: dict[str, Any] = {}

    def __call__(self, name: str, domain: Any) -> Any:
        """A value for ``name``; the same again where it was drawn before.

        Args:
            name: as it will stand in the table of trials.
            domain: one of Ray Tune's, such as ``tune.uniform(0.8, 0.95)``; anything else is the
                value itself.
        """
        if not isinstance(domain, Domain):
            return domain
        if name not in self.values:
            if isinstance(domain, Function):
                return domain.sample(config=dict(self.values))
            self.values[name] = _plain(self._ask(name, domain))
        return self.values[name]

    def require(self, condition: bool, why: str) -> None:
        """Give this sample up where a condition isn't met; another is drawn.

        Args:
            condition: what must hold.
            why: told where no sample meets it.
        """
        if not condition:
            raise InfeasibleError(why)


@dataclass(frozen=True)
class Sample:
    """A point of a space.

    Attributes:
        values: what was drawn, by name.
        changes: new values in the recipe, by dotted paths.
        recipe: with them.
    """

    values: Mapping[str, Any]
    changes: Mapping[str, Any]
    recipe: Recipe


class Space:
    """One or several spaces that are drawn together.

    Args:
        paths: of their files.
        setting: what they may depend on.

    Raises:
        RaytrainError: a file can't be read or has no function ``space``.
    """

    def __init__(self, paths: Sequence[Path], setting: Setting) -> None:
        self.name = " + ".join(str(path) for path in paths)
        self._functions = {path: _load(path) for path in paths}
        self._setting = setting

    def sample(self, ask: Ask) -> Sample:
        """Draw a sample.

        Args:
            ask: chooses the values.

        Raises:
            InfeasibleError: the space rules this one out.
            RaytrainError: it makes no recipe, or none that can run; the line names path and value.
        """
        draw = Draw(ask, self._setting)
        changes: dict[str, Any] = {}
        for path, function in self._functions.items():
            for key, value in _returned(function, draw, path).items():
                if key in changes:
                    raise RaytrainError(f"{path}: {key}: another space changes it too; leave one")
                changes[key] = _resolved(draw, key, value)
        recipe = change_recipe(self._setting.recipe, changes, self.name)
        self._check_plan(recipe, changes)
        return Sample(dict(draw.values), changes, recipe)

    def feasible(self, ask: Callable[[int], Ask]) -> Sample:
        """Draw until a sample is feasible.

        Args:
            ask: gives for each try what chooses its values.

        Raises:
            RaytrainError: none of many was, or one makes no recipe.
        """
        why = ""
        for attempt in range(MOST_TRIES):
            try:
                return self.sample(ask(attempt))
            except InfeasibleError as error:
                why = str(error)
        raise RaytrainError(
            f"{self.name}: none of {MOST_TRIES} samples was feasible, the last one because {why}; "
            "widen the space"
        )

    def _check_plan(self, recipe: Recipe, changes: Mapping[str, Any]) -> None:
        setting = self._setting
        if recipe.num_epochs != setting.recipe.num_epochs:
            raise RaytrainError(
                f"{self.name}: {_phases(changes)}: makes {recipe.num_epochs} epochs of "
                f"{setting.recipe.num_epochs}; all trials must see as many images"
            )
        fewest = Plan(recipe, setting.num_images).min_count
        if fewest < setting.workers:
            raise RaytrainError(
                f"{self.name}: {_phases(changes)}: some steps have {fewest} images, too few for "
                f"{setting.workers} workers; draw larger batches, or use draw.require"
            )


def _phases(changes: Mapping[str, Any]) -> str:
    told = [f"{key} = {value}" for key, value in changes.items() if key.startswith("phases")]
    return ", ".join(told) or "the recipe's phases"


def _load(path: Path) -> Callable[..., Any]:
    if not path.is_file():
        raise RaytrainError(f"--space {path}: no such file")
    with _one_line(path):
        function = getattr(_module(path.resolve()), "space", None)
    if not callable(function):
        raise RaytrainError(f"{path}: has no function space(draw)")
    return function  # type: ignore[no-any-return]


def _module(path: Path) -> ModuleType:
    """The file as a module; of its package where it is in one, so that it may import others."""
    if (path.parent / "__init__.py").exists():
        parent = str(path.parents[1])
        if parent not in sys.path:
            sys.path.append(parent)
        return importlib.import_module(f"{path.parent.name}.{path.stem}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise RaytrainError(f"--space {path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _returned(function: Callable[..., Any], draw: Draw, path: Path) -> Mapping[str, Any]:
    with _one_line(path):
        returned = function(draw)
    if not isinstance(returned, Mapping) or not all(isinstance(key, str) for key in returned):
        raise RaytrainError(
            f"{path}: space(draw) must return a dict from paths such as schedule.momentum to "
            f"values, returned {type(returned).__name__}"
        )
    return returned


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    try:
        yield
    except (RaytrainError, InfeasibleError):
        raise
    except Exception as error:
        raise RaytrainError(f"--space {path}: {describe_bug(error)}") from error


def _resolved(draw: Draw, name: str, value: Any) -> Any:
    """A value without domains, as plain Python."""
    if isinstance(value, Domain):
        return _resolved(draw, name, draw(name, value))
    if isinstance(value, Mapping):
        return {key: _resolved(draw, f"{name}.{key}", part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_resolved(draw, f"{name}.{i}", part) for i, part in enumerate(value)]
    return _plain(value)


def _plain(value: Any) -> Any:
    """A number of NumPy's as Python's own, which YAML and JSON can hold."""
    return value.item() if hasattr(value, "item") else value
