"""What a program in `recipes/` does when it is launched: its configs, its options, its errors, and RL itself."""

from epo_trl.launch.command_line import RecipeError, early_option
from epo_trl.launch.options import parse_recipe
from epo_trl.launch.program import run_recipe
from epo_trl.launch.training import ALGORITHMS, AlgorithmArguments, rl_recipe, train

__all__ = [
    "ALGORITHMS",
    "AlgorithmArguments",
    "RecipeError",
    "early_option",
    "parse_recipe",
    "rl_recipe",
    "run_recipe",
    "train",
]
