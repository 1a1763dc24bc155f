"""raytrain: train image classifiers fast, on one laptop or on an elastic Ray cluster.

The public nouns load when they are first used, so that ``import raytrain`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raytrain.api import fit
    from raytrain.data.shards import ShardSet
    from raytrain.errors import RaytrainError
    from raytrain.recipe.load import load_recipe
    from raytrain.recipe.plan import Plan
    from raytrain.recipe.types import Recipe
    from raytrain.session import Result

__all__ = ["Plan", "RaytrainError", "Recipe", "Result", "ShardSet", "fit", "load_recipe"]

_HOMES = {
    "Plan": "raytrain.recipe.plan",
    "RaytrainError": "raytrain.errors",
    "Recipe": "raytrain.recipe.types",
    "Result": "raytrain.session",
    "ShardSet": "raytrain.data.shards",
    "fit": "raytrain.api",
    "load_recipe": "raytrain.recipe.load",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'raytrain' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
