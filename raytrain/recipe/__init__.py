"""Recipes and plans: pure, without torch or Ray."""

from raytrain.recipe.curve import Curve, CurveError, Piece
from raytrain.recipe.load import (
    builtin_recipes,
    dump_recipe,
    load_recipe,
    recipe_differences,
    recipe_from_dict,
)
from raytrain.recipe.plan import PhaseSpan, Plan, Step, share
from raytrain.recipe.types import Phase, Recipe

__all__ = [
    "Curve",
    "CurveError",
    "Phase",
    "PhaseSpan",
    "Piece",
    "Plan",
    "Recipe",
    "Step",
    "builtin_recipes",
    "dump_recipe",
    "load_recipe",
    "recipe_differences",
    "recipe_from_dict",
    "share",
]
