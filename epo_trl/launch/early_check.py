"""Rejects an invalid command line before torch and TRL are loaded, which takes five seconds or more.

The options are fields of classes that need torch, so their names are read from the source files. The parser checks
everything again, and all that this module cannot decide.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from epo_trl.envs.registry import environment_arguments
from epo_trl.launch.builtin_configs import shown
from epo_trl.launch.command_line import CHECK, HELP, TRACEBACK, RecipeError, config_path, read_config, refuse_unknown
from epo_trl.launch.first_options import algorithm_name, environment_name
from epo_trl.launch.warm_start import StartArguments, check_start
from epo_trl.models.names import check_model_name

# The classes whose fields are the options of a command. The class of PPO includes the fields of GRPO.
CLASSES = {
    "train": ("EnvironmentArguments", "AlgorithmArguments", "StartArguments", "EPOPPOConfig", "ModelConfig"),
    "sft": ("EnvironmentArguments", "DemonstrationArguments", "ImitationConfig", "ModelConfig"),
    "evaluate": ("EnvironmentArguments", "EvaluationArguments", "ModelConfig"),
    "play": ("EnvironmentArguments", "PlayArguments", "ModelConfig"),
}
PLAYED = ("evaluate", "play")
FILES = (
    "epo_trl/launch/first_options.py", "epo_trl/launch/imitation.py", "epo_trl/launch/evaluation_arguments.py",
    "epo_trl/launch/play.py", "epo_trl/launch/warm_start.py", "epo_trl/trainers/ppo_config.py",
    "epo_trl/trainers/config.py",
    "epo_trl/trainers/rollout_config.py", "epo_trl/long_runs/long_run.py", "epo_trl/rollout/few_shot.py",
    "trl/trainer/grpo_config.py", "trl/trainer/sft_config.py", "trl/trainer/base_config.py",
    "trl/trainer/model_config.py", "transformers/training_args.py",
)  # fmt: skip
NO_MODEL = (None, "human", "expert")  # values of `player` that are not models


def check_early(command: str, words: Sequence[str]) -> None:
    """Checks a command line and its config, as far as possible without torch.

    Args:
        command: `train`, `sft`, `evaluate` or `play`.
        words: Command line, with a file after `--config`.

    Raises:
        EnvError: If the environment does not exist.
        RecipeError: If an option or the algorithm is unknown, or a value is not a number where one is expected.
        ValueError: If the model does not exist.
    """
    if not HELP.isdisjoint(words):
        return
    path = config_path(words)
    config = read_config(path) if path else {}
    environment = environment_name(words)
    if command == "train":
        algorithm_name(words)
    given = _options(words)
    settings = environment_arguments(str(environment), path.parent if path else None)
    known = option_types(command)
    if known:
        known = known | {field.name: str(field.type) for field in fields(settings)}
        _check_options(known, given)
        if path:
            _check_config(command, known, config, path)
    if CHECK not in words:
        if command == "train":
            check_start(*_start({**config, **given}), path)
        _check_models(command, {**config, **given})
        if hasattr(settings, "check_early"):
            settings.check_early({**config, **given})


def _options(words: Sequence[str]) -> dict[str, str | None]:
    """Returns the options of a command line by field, with the text after each, or `None` if there is none."""
    found: dict[str, str | None] = {}
    for word, after in zip(words, [*words[1:], None], strict=True):
        if word.startswith("--") and word not in ("--config", CHECK, TRACEBACK):
            name, equals, value = word[2:].partition("=")
            follows = after if after is not None and not after.startswith("--") else None
            found[name.replace("-", "_")] = value if equals else follows
    return found


def _check_options(known: Mapping[str, str], given: Mapping[str, str | None]) -> None:
    # a switch that is on by default is turned off as --no_NAME
    unknown = [f"--{name}" for name in given if name not in known and name.removeprefix("no_") not in known]
    refuse_unknown(unknown, [f"--{name}" for name in known])
    _check_numbers(known, given, "")


def _check_config(command: str, known: Mapping[str, str], config: Mapping[str, Any], path: Path) -> None:
    unknown = [name for name in config if name not in known]
    if command in PLAYED and not option_types("train").keys().isdisjoint(unknown):
        return  # a training config: the parser suggests one for evaluation
    refuse_unknown(unknown, known, f"unknown in {shown(path)}")
    _check_numbers(known, config, f" in {shown(path)}")


def _check_numbers(known: Mapping[str, str], given: Mapping[str, Any], where: str) -> None:
    for name, value in given.items():
        words = set(re.findall(r"\w+", known.get(name, "")))
        if isinstance(value, str) and words and words <= {"int", "float", "Optional", "None"}:
            try:
                float(value)
            except ValueError:
                raise RecipeError(f"{name}: expected a number, got {value!r}{where}") from None


def _start(given: Mapping[str, Any]) -> tuple[str | None, StartArguments]:
    """Returns the model and the start of RL. An option without a value is switched on."""
    scratch = given.get("from_scratch", False)
    return given.get("model_name_or_path"), StartArguments(str(scratch).lower() not in ("false", "0", "no", "n", "f"))


def _check_models(command: str, given: Mapping[str, Any]) -> None:
    field = "player" if command == "play" else "model_name_or_path"
    name = given.get(field)
    if command != "play" or name not in NO_MODEL:
        check_model_name(name, field, given.get("model_revision"))


@cache
def option_types(command: str) -> dict[str, str]:
    """Returns the options of a command, without those of the environment, each with its annotation.

    Empty if a class or one of its bases is in none of `FILES`, which can happen with another version of a library.
    """
    classes = _classes(FILES)
    found: dict[str, str] = {}
    left = list(CLASSES[command])
    while left:
        node = classes.get(left.pop())
        if node is None:
            return {}
        left += [ast.unparse(base) for base in node.bases]
        found = {
            part.target.id: ast.unparse(part.annotation)
            for part in node.body
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
        } | found
    return {name: kind for name, kind in found.items() if not kind.startswith("ClassVar")}


def _classes(files: Iterable[str]) -> dict[str, ast.ClassDef]:
    found: dict[str, ast.ClassDef] = {}
    for file in files:
        package, _, rest = file.partition("/")
        spec = find_spec(package)  # does not import it
        path = Path(spec.submodule_search_locations[0], rest) if spec and spec.submodule_search_locations else None
        if path and path.is_file():
            body = ast.parse(path.read_text(encoding="utf-8")).body
            found |= {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    return found
