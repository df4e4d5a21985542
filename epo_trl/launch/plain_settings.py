"""What a config says, with the defaults, as plain values: for what reads a run without starting it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

import yaml
from trl import ModelConfig

from epo_trl.launch.command_line import RecipeError, did_you_mean, read_config
from epo_trl.launch.shipped import find_config, settled
from epo_trl.launch.training import ALGORITHMS, AlgorithmArguments


def plain_settings(config: str, options: Sequence[str] = ()) -> tuple[dict[str, Any], set[str]]:
    """Returns all fields of a training config, and the names of those that are no defaults. Nothing is checked.

    Args:
        config: A YAML file, or the name of a shipped one.
        options: Words such as `["--max_turns", "30"]`, which go before the file.

    Raises:
        RecipeError: If there is no such file, or an option is no field of a training config.
    """
    path = find_config(config)
    said = {**settled(path), **read_config(path)}
    given = _options(options)
    algorithm = str({**said, **given}.get("algorithm", AlgorithmArguments.algorithm))
    if algorithm not in ALGORITHMS:
        raise RecipeError(f"algorithm: expected one of {', '.join(map(repr, ALGORITHMS))}, got {algorithm!r}")
    defaults: dict[str, Any] = {"algorithm": algorithm}
    for kind in (ALGORITHMS[algorithm][0], ModelConfig):
        for one in fields(kind):
            made = one.default_factory() if one.default_factory is not MISSING else None
            defaults[one.name] = made if one.default is MISSING else one.default
    for name in given:
        if name not in defaults:
            raise RecipeError(f"--{name}: no field of a training config{did_you_mean(name, defaults)}")
    said |= given
    return defaults | said, set(said)


def _options(words: Sequence[str]) -> dict[str, Any]:
    """Returns `{name: value}` of words such as `--name value` and `--name=value`."""
    parts = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    if len(parts) % 2 or any(not name.startswith("--") for name in parts[::2]):
        raise RecipeError(f"options: expected pairs such as --max_turns 30, got {' '.join(words)!r}")
    try:
        return {name[2:]: yaml.safe_load(value) for name, value in zip(parts[::2], parts[1::2], strict=True)}
    except yaml.YAMLError as error:
        raise RecipeError(f"options: got {' '.join(words)!r}, which is no YAML: {error}") from error
