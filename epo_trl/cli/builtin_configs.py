"""The configs that come with the package, by name, and the warm starts of RL configs."""

from __future__ import annotations

from pathlib import Path

from epo_trl.cli.base import RecipeError, did_you_mean

# A link to the folder `recipes` in the repository, a copy of its configs in an installed package.
FOLDER = Path(__file__).parents[1] / "recipes"
PREFIXES = {"train": "", "sft": "sft_", "evaluate": "eval_"}  # of the names of a command's configs


def builtin_configs() -> dict[str, Path]:
    """Returns all configs by name, such as `"alfworld/tiny_cpu"`."""
    return {config_name(path): path for path in sorted(FOLDER.glob("*/*.yaml"))}


def config_name(path: Path) -> str:
    """Returns the name of a built-in config, or the path of another file."""
    return path.relative_to(FOLDER).with_suffix("").as_posix() if path.is_relative_to(FOLDER) else str(path)


def list_configs(command: str) -> dict[str, Path]:
    """Returns the configs that `epo-trl train`, `sft` or `evaluate` lists; none for other commands."""
    others = tuple(prefix for name, prefix in PREFIXES.items() if name != command and prefix)
    return {
        name: path
        for name, path in builtin_configs().items()
        if command in PREFIXES and path.name.startswith(PREFIXES[command]) and not path.name.startswith(others)
    }


def find_config(name: str) -> Path:
    """Finds a config: the file of that path, or else the built-in config of that name.

    Raises:
        RecipeError: If neither exists.
    """
    if Path(name).is_file():
        return Path(name)
    known = builtin_configs()
    found = known.get(name.removesuffix(".yaml"))
    if found is None:
        raise RecipeError(
            f"--config: expected a YAML file, or the name of a built-in config such as 'alfworld/tiny_cpu', got "
            f"{name!r}{did_you_mean(name, known)}"
        )
    return found


def find_warm_start(config: Path) -> Path | None:
    """Returns the warm-start config next to an RL config, if any: `sft_NAME.yaml`, also for `ppo_NAME.yaml`."""
    beside = config.with_name(f"sft_{config.name.removeprefix('ppo_')}")
    return beside if beside.is_file() else None


def warm_start_command(warm_start: Path) -> str:
    """Returns the command that makes a warm start."""
    return f"epo-trl sft --config {config_name(warm_start)}"
