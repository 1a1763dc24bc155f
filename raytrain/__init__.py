"""raytrain: train image classifiers fast, on one laptop or on an elastic Ray cluster.

The public nouns load when they are first used, so that ``import raytrain`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raytrain.api import Sweep, fit, resume_sweep, sweep, use_cluster
    from raytrain.data.shards import ShardSet
    from raytrain.demo import write_digits
    from raytrain.errors import RaytrainError
    from raytrain.orchestrate.prepare import PrepareOptions, prepare
    from raytrain.recipe.load import change_recipe, load_recipe
    from raytrain.recipe.plan import Plan
    from raytrain.recipe.types import Recipe
    from raytrain.run.against import Picture, draw_against
    from raytrain.run.report import comparison, report
    from raytrain.session import Result

__all__ = [
    "Picture",
    "Plan",
    "PrepareOptions",
    "RaytrainError",
    "Recipe",
    "Result",
    "ShardSet",
    "Sweep",
    "change_recipe",
    "comparison",
    "draw_against",
    "fit",
    "load_recipe",
    "prepare",
    "report",
    "resume_sweep",
    "sweep",
    "use_cluster",
    "write_digits",
]

_HOMES = {
    "Picture": "raytrain.run.against",
    "Plan": "raytrain.recipe.plan",
    "PrepareOptions": "raytrain.orchestrate.prepare",
    "RaytrainError": "raytrain.errors",
    "Recipe": "raytrain.recipe.types",
    "Result": "raytrain.session",
    "ShardSet": "raytrain.data.shards",
    "Sweep": "raytrain.api",
    "change_recipe": "raytrain.recipe.load",
    "comparison": "raytrain.run.report",
    "draw_against": "raytrain.run.against",
    "fit": "raytrain.api",
    "load_recipe": "raytrain.recipe.load",
    "prepare": "raytrain.orchestrate.prepare",
    "report": "raytrain.run.report",
    "resume_sweep": "raytrain.api",
    "sweep": "raytrain.api",
    "use_cluster": "raytrain.api",
    "write_digits": "raytrain.demo",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'raytrain' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
