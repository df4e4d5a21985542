"""Loads YAML files of `name: value` pairs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from epo_trl.errors import InputError

MERGE, TIMESTAMP = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:timestamp"
INTEGER, FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
# Numbers without a sign: as in YAML 1.1, but not those in base 60, nor those in base 8 that begin with 0.
_INTEGER = r"0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+"
_FLOAT = r"([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(inf|Inf|INF|nan|NaN|NAN)"


class _Loader(yaml.SafeLoader):
    """Rejects a mapping with a duplicate key, of which YAML's own loader would silently keep the last one. Reads `1e-5`
    as a number, and a date, `1:30` and `010` as strings.
    """

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != MERGE]
        for key, count in Counter(keys).items():
            if count > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} occurs {count} times", node.start_mark)
        return node


class _Dumper(yaml.SafeDumper):
    """Writes in quotes what `_Loader` would read as another type."""


for _each in (_Loader, _Dumper):
    _each.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in rules if tag not in (INTEGER, FLOAT, TIMESTAMP)]
        for first, rules in _each.yaml_implicit_resolvers.items()
    }
    for _tag, _pattern in ((INTEGER, _INTEGER), (FLOAT, _FLOAT)):
        _each.add_implicit_resolver(_tag, re.compile(rf"[-+]?({_pattern})$"), list("-+.0123456789"))


def to_yaml(content: Mapping[str, Any]) -> str:
    """Returns the text whose content `from_yaml` reads as the same."""
    return yaml.dump(dict(content), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def from_yaml(text: str) -> Any:
    """Returns the content of a text."""
    return deepcopy(_parse(text))


@lru_cache(maxsize=64)  # a study reads a config once for each of its runs
def _parse(text: str) -> Any:
    return yaml.load(text, _Loader)  # noqa: S506 - a safe loader


def read_yaml(path: Path, option: str) -> dict[str, Any]:
    """Loads a YAML file of `name: value` pairs.

    Args:
        path: Path of the file.
        option: Option that names the file, for the message.

    Raises:
        InputError: If the file is missing or malformed.
    """
    try:
        content = from_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise InputError(f"{option}: expected a readable YAML file, got {path}: {why}") from error
    if not isinstance(content, dict):
        raise InputError(f"{option}: expected a YAML file with 'name: value' pairs, got {path}")
    for key in content:
        if not isinstance(key, str):
            hint = "; YAML reads no, yes, on and off as true or false: put the word in quotes"
            raise InputError(
                f"{option}: expected names that are strings, got {key!r} in {path}{hint * isinstance(key, bool)}"
            )
    return content
