"""The configs that come with the package: their names, and what their place settles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from epo_trl.envs.registry import ENVIRONMENTS
from epo_trl.launch.command_line import RecipeError, did_you_mean, with_config_apart

# In the repository a link to the folder `recipes`, in an installed package a copy of its configs.
FOLDER = Path(__file__).parents[1] / "recipes"
_OTHERS = ("sft_", "eval_")  # how the names of configs begin that are not for RL


def shipped() -> dict[str, Path]:
    """Returns all configs by name, such as `"alfworld/tiny_cpu"`."""
    return {shown(path): path for path in sorted(FOLDER.glob("*/*.yaml"))}


def shown(path: Path) -> str:
    """Returns what one types for a file: the name of one that was found by name, else its path."""
    return path.relative_to(FOLDER).with_suffix("").as_posix() if path.is_relative_to(FOLDER) else str(path)


def configs_of(command: str) -> dict[str, Path]:
    """Returns those that `epo-trl train`, `sft` or `evaluate` lists; none for a command that needs no config."""
    begin = {"train": "", "sft": "sft_", "evaluate": "eval_"}.get(command)
    if begin is None:
        return {}
    return {
        name: path
        for name, path in shipped().items()
        if (path.name.startswith(begin) if begin else not path.name.startswith(_OTHERS))
    }


def find_config(name: str) -> Path:
    """Returns the file that is meant: one of that path, or else the shipped one of that name.

    Raises:
        RecipeError: If there is neither.
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


def settled(path: Path) -> dict[str, str]:
    """Returns the options that a shipped config leaves to its place: its folder is an environment, `ppo_` is PPO.

    In the repository `recipes/alfworld_ppo_epo.py` says them. A file of anybody else's says all itself.
    """
    path = path.resolve()
    if not path.is_relative_to(FOLDER.resolve()) or path.name.startswith(_OTHERS):
        return {}
    place = {
        "environment": path.parent.name if path.parent.name in ENVIRONMENTS else "",
        "algorithm": "ppo" if path.name.startswith("ppo_") else "",
    }
    said = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {name: value for name, value in place.items() if value and name not in said}


def with_shipped_config(words: Sequence[str]) -> list[str]:
    """Returns a command line whose config is a file, followed by what its place settles and then the other options.

    Raises:
        RecipeError: If there is no such config.
    """
    words = with_config_apart(words)
    if "--config" not in words:
        return words
    at = words.index("--config")
    path = find_config(words[at + 1])
    rest = words[:at] + words[at + 2 :]
    return ["--config", str(path), *_as_words(settled(path)), *rest]


def _as_words(options: Mapping[str, str]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", value)]
