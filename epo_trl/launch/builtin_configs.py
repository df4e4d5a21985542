"""The configs that come with the package, by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from epo_trl.launch.command_line import RecipeError, did_you_mean, with_config_apart

# A link to the folder `recipes` in the repository, a copy of its configs in an installed package.
FOLDER = Path(__file__).parents[1] / "recipes"
_OTHERS = ("sft_", "eval_")  # prefixes of configs that are not for RL


def shipped() -> dict[str, Path]:
    """Returns all configs by name, such as `"alfworld/tiny_cpu"`."""
    return {shown(path): path for path in sorted(FOLDER.glob("*/*.yaml"))}


def shown(path: Path) -> str:
    """Returns the name of a shipped config, or the path of another file."""
    return path.relative_to(FOLDER).with_suffix("").as_posix() if path.is_relative_to(FOLDER) else str(path)


def list_configs(command: str) -> dict[str, Path]:
    """Returns the configs that `epo-trl train`, `sft` or `evaluate` lists; none for other commands."""
    begin = {"train": "", "sft": "sft_", "evaluate": "eval_"}.get(command)
    if begin is None:
        return {}
    return {
        name: path
        for name, path in shipped().items()
        if (path.name.startswith(begin) if begin else not path.name.startswith(_OTHERS))
    }


def find_config(name: str) -> Path:
    """Finds a config: the file of that path, or else the shipped config of that name.

    Raises:
        RecipeError: If neither exists.
    """
    if Path(name).is_file():
        return Path(name)
    known = shipped()
    found = known.get(name.removesuffix(".yaml"))
    if found is None:
        raise RecipeError(
            f"--config: expected a YAML file, or the name of a shipped one such as 'alfworld/tiny_cpu', got {name!r}"
            + did_you_mean(name, known)
        )
    return found


def with_config_path(words: Sequence[str]) -> list[str]:
    """Replaces the name of a config by its path.

    Raises:
        RecipeError: If the config does not exist.
    """
    words = with_config_apart(words)
    if "--config" not in words:
        return words
    at = words.index("--config")
    return [*words[: at + 1], str(find_config(words[at + 1])), *words[at + 2 :]]
