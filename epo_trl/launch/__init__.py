"""The body of the programs in `recipes/`: configs, options, errors, and training.

Torch is loaded when one of these names is first used.
"""

from typing import TYPE_CHECKING

from epo_trl.lazy import load_on_use

if TYPE_CHECKING:
    from epo_trl.launch.command_line import RecipeError, early_option
    from epo_trl.launch.first_options import AlgorithmArguments
    from epo_trl.launch.options import parse_recipe
    from epo_trl.launch.program import run_recipe
    from epo_trl.launch.training import ALGORITHMS, rl_recipe, train

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

_TRAINING = "epo_trl.launch.training"
__getattr__ = load_on_use(
    __name__,
    {
        "ALGORITHMS": _TRAINING,
        "AlgorithmArguments": "epo_trl.launch.first_options",
        "RecipeError": "epo_trl.launch.command_line",
        "early_option": "epo_trl.launch.command_line",
        "parse_recipe": "epo_trl.launch.options",
        "rl_recipe": _TRAINING,
        "run_recipe": "epo_trl.launch.program",
        "train": _TRAINING,
    },
)
