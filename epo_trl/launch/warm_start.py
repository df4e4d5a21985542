"""Checks the initial policy of RL: rejects random weights, and names the warm start of a config."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from epo_trl.launch.builtin_configs import shown
from epo_trl.launch.command_line import RecipeError, read_config
from epo_trl.models.names import is_tiny


@dataclass
class StartArguments:
    """Initial policy of RL."""

    from_scratch: bool = field(
        default=False,
        metadata={
            "help": "Allow RL to start from the random weights of `model_name_or_path: tiny`, for debugging. Such a "
            "policy never succeeds, so it learns nothing."
        },
    )


def find_warm_start(config: Path) -> Path | None:
    """Returns the warm-start config next to an RL config, if any: `sft_NAME.yaml`, also for `ppo_NAME.yaml`."""
    beside = config.with_name(f"sft_{config.name.removeprefix('ppo_')}")
    return beside if beside.is_file() else None


def warm_start_command(warm_start: Path) -> str:
    """Returns the command that makes a warm start."""
    return f"epo-trl sft --config {shown(warm_start)}"


def check_start(model: str | None, start: StartArguments, config: Path | None) -> None:
    """Rejects an RL run that would start from random weights, or from a warm start that does not exist.

    Args:
        model: Value of `model_name_or_path`.
        start: Whether random weights are intended.
        config: YAML file of the run, if any.

    Raises:
        RecipeError: If the start is invalid. The message contains the command that makes the warm start.
    """
    warm_start = find_warm_start(config) if config else None
    folder = str(read_config(warm_start).get("output_dir")) if warm_start else ""
    make_it = f"make it with: {warm_start_command(warm_start)}" if warm_start else "make it with epo-trl sft"
    if model is not None and is_tiny(model) and not start.from_scratch:
        raise RecipeError(
            f"model_name_or_path: expected the folder of a warm start, got {model!r}, random weights that never "
            f"succeed, so RL teaches them nothing; {make_it}, then add --model_name_or_path {folder or 'FOLDER'}; to "
            "debug with random weights, add --from_scratch"
        )
    if model is not None and model == folder and not Path(model).is_dir():
        raise RecipeError(
            f"model_name_or_path: expected the folder of a warm start, got {model!r}, which does not exist; {make_it}"
        )
