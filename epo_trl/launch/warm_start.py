"""Where RL begins: refuses random weights, and names the warm start that belongs to a config."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from epo_trl.launch.command_line import RecipeError, read_config
from epo_trl.launch.shipped import shown
from epo_trl.models.names import is_tiny


@dataclass
class StartArguments:
    """Where RL begins."""

    from_scratch: bool = field(
        default=False,
        metadata={
            "help": "Allow RL to begin with the random weights of `model_name_or_path: tiny`, for debugging. Such a "
            "policy wins nothing, so it learns nothing."
        },
    )


def warm_start_of(config: Path) -> Path | None:
    """Returns the config of the warm start beside an RL config: `sft_NAME.yaml`, for `ppo_NAME.yaml` too, if any."""
    beside = config.with_name(f"sft_{config.name.removeprefix('ppo_')}")
    return beside if beside.is_file() else None


def warm_start_command(warm_start: Path) -> str:
    """Returns what to type for the config of a warm start."""
    return f"epo-trl sft --config {shown(warm_start)}"


def check_start(model: str | None, start: StartArguments, config: Path | None) -> None:
    """Refuses an RL run that would begin with random weights, or with a warm start that was not made.

    Args:
        model: `model_name_or_path`.
        start: Whether random weights are meant.
        config: The YAML file of the run, if there is one.

    Raises:
        RecipeError: If so. The message has the command of the config's own warm start.
    """
    warm_start = warm_start_of(config) if config else None
    folder = str(read_config(warm_start).get("output_dir")) if warm_start else ""
    make_it = f"make it with: {warm_start_command(warm_start)}" if warm_start else "make it with epo-trl sft"
    if model is not None and is_tiny(model) and not start.from_scratch:
        raise RecipeError(
            f"model_name_or_path: expected the folder of a warm start, got {model!r}, random weights that never win, "
            f"so RL teaches them nothing; {make_it}, then add --model_name_or_path {folder or 'FOLDER'}; to debug with "
            "random weights, add --from_scratch"
        )
    if model is not None and model == folder and not Path(model).is_dir():
        raise RecipeError(
            f"model_name_or_path: expected the folder of a warm start, got {model!r}, which does not exist; {make_it}"
        )
