"""Reads a config with the defaults as plain values, for programs that inspect a run without starting it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

import yaml
from trl import ModelConfig

from epo_trl.launch.builtin_configs import find_config
from epo_trl.launch.command_line import RecipeError, did_you_mean, read_config
from epo_trl.launch.training import ALGORITHMS, AlgorithmArguments


def plain_settings(config: str, options: Sequence[str] = ()) -> tuple[dict[str, Any], set[str]]:
    """Returns all fields of a training config, and the names of those that are set. Checks no values.

    Args:
        config: A YAML file, or the name of a shipped one.
        options: Words such as `["--max_turns", "30"]`, which override the file.

    Raises:
        RecipeError: If the file does not exist, or an option is not a field of a training config.
    """
    path = find_config(config)
    values = read_config(path)
    given = _options(options)
    algorithm = str({**values, **given}.get("algorithm", AlgorithmArguments.algorithm))
    if algorithm not in ALGORITHMS:
        raise RecipeError(f"algorithm: expected one of {', '.join(map(repr, ALGORITHMS))}, got {algorithm!r}")
    defaults: dict[str, Any] = {"algorithm": algorithm}
    for kind in (ALGORITHMS[algorithm][0], ModelConfig):
        for one in fields(kind):
            made = one.default_factory() if one.default_factory is not MISSING else None
            defaults[one.name] = made if one.default is MISSING else one.default
    for name in given:
        if name not in defaults:
            raise RecipeError(f"--{name}: expected a field of a training config{did_you_mean(name, defaults)}")
    values |= given
    return defaults | values, set(values)


def _options(words: Sequence[str]) -> dict[str, Any]:
    """Parses words such as `--name value` and `--name=value` into `{name: value}`."""
    parts = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    if len(parts) % 2 or any(not name.startswith("--") for name in parts[::2]):
        raise RecipeError(f"options: expected pairs such as --max_turns 30, got {' '.join(words)!r}")
    try:
        return {name[2:]: yaml.safe_load(value) for name, value in zip(parts[::2], parts[1::2], strict=True)}
    except yaml.YAMLError as error:
        raise RecipeError(f"options: expected values in YAML, got {' '.join(words)!r}: {error}") from error
