"""TextWorld's engine with caches: the same responses, several times faster. For comparisons."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from functools import lru_cache
from typing import Any
from unittest import mock

from epo_trl.envs.alfworld.game_files import Game
from epo_trl.envs.alfworld.textworld_engine import TextWorldEngine


class CachedTextWorldEngine(TextWorldEngine):
    """TextWorld's engine with four kinds of repeated work cached.

    - A problem is translated once, not at both load and reset, and not for a planner that is not used
      here.
    - A text of the grammar is parsed once, not at each use.
    - The wording of an action is derived once per game, not once per turn: furniture does not move, so it depends only
      on the arguments that the template names.
    - The context of a response is shared, not deep-copied for each symbol of the grammar.

    While the engine is open, TextWorld is patched in the whole process; `close` removes the patch.
    """

    def __init__(self) -> None:
        super().__init__()
        import fast_downward
        from textworld.envs.pddl import textgen

        translate = lru_cache(maxsize=1)(fast_downward.pddl2sas)
        parse = lru_cache(maxsize=None)(textgen._parse_and_convert)
        query = lru_cache(maxsize=None)(textgen.Rule.parse_conjunctive_query)
        self._changes = ExitStack()
        for owner, name, new in (
            (
                fast_downward,
                "pddl2sas",
                lambda domain, problem, verbose=False, optimize=False: translate(domain, problem),
            ),
            # Each caller modifies the symbols that it gets.
            (
                textgen,
                "_parse_and_convert",
                lambda text, rule_name, trace=False: deepcopy(parse(text, rule_name=rule_name)),
            ),
            (textgen.Rule, "parse_conjunctive_query", query),
            (textgen, "copy_context", _copy_context),
        ):
            self._changes.enter_context(mock.patch.object(owner, name, new))

    def _load(self, game: Game) -> None:
        super()._load(game)
        grammar = self._env.unwrapped._logic.grammar
        grammar.derive = _once_per_wording(grammar.derive)

    def close(self) -> None:
        """Frees the engine and removes the patch of TextWorld. May be called twice."""
        self._changes.close()
        super().close()


def _copy_context(context: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy whose variables and mapping can be extended; their values are never modified."""
    return {**context, "variables": dict(context["variables"]), "mapping": dict(context["mapping"])}


def _once_per_wording(derive: Callable[[str, dict[str, Any]], str]) -> Callable[[str, dict[str, Any]], str]:
    known: dict[tuple[Any, ...], str] = {}

    def derive_once(start: str, context: dict[str, Any]) -> str:
        if start.startswith("#"):  # a response, which depends on the state
            return derive(start, context)
        names = set(re.findall(r"\w+", start))
        key = (start, *sorted((s.name, thing.name) for s, thing in context["mapping"].items() if s.name in names))
        if key not in known:
            known[key] = derive(start, context)
        return known[key]

    return derive_once
