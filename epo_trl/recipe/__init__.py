"""The command line of a recipe: its configs, its options, its errors."""

from epo_trl.recipe.options import RecipeError, early_option, parse_recipe
from epo_trl.recipe.run import run_recipe

__all__ = ["RecipeError", "early_option", "parse_recipe", "run_recipe"]
