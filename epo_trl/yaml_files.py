"""Loads YAML files of `name: value` pairs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from epo_trl.errors import InputError


class _Loader(yaml.SafeLoader):
    """Rejects a mapping with a duplicate key, of which YAML's own loader would silently keep the last one."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} occurs more than once", node.start_mark)
        return node


class _Dumper(yaml.SafeDumper):
    """Writes in quotes what `_Loader` would read as a number."""


for _each in (_Loader, _Dumper):  # YAML 1.1 takes 1e-5 for a string
    _each.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )


def to_yaml(content: Mapping[str, Any]) -> str:
    """Returns the text whose content `read_yaml` reads as the same."""
    return yaml.dump(dict(content), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_yaml(path: Path, option: str) -> dict[str, Any]:
    """Loads a YAML file of `name: value` pairs; `InputError`, which names the option, if it is missing or malformed."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506 - a safe loader
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise InputError(f"{option}: expected a readable YAML file, got {path}: {why}") from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise InputError(f"{option}: expected a YAML file with 'name: value' pairs, got {path}")
    return content
