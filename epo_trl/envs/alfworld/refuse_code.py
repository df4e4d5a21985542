"""Rejects game files with text that TextWorld would run as code, before TextWorld sees them.

TextWorld passes the text between braces in a grammar text (a response, the wording of an action, the task sentence) to
Python's `eval`. It also fills the names of a problem into a format string and into buffers of fixed size. So a game
file from a stranger is a program. These checks restrict it:

- Every text is parsed by TextWorld's own parser, which evaluates nothing, so no expression that TextWorld would find
  is missed. Each expression may only join names, ids and articles of objects, and plain strings. Values are never
  parsed again, and the texts between the expressions cannot contain braces.
- The task sentence, which differs from game to game, contains no grammar markup. The rest of a grammar is the same in
  all games of one source and is therefore checked once.
- Names, and all else in rules and problem, are short words of letters, digits and `_`, `-`, `.`, `+`.

The fast engine needs no such check: it evaluates nothing and accepts only the grammar that it knows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from epo_trl.envs.alfworld.game_files import TASK_SENTENCE, Game, without_task
from epo_trl.envs.alfworld.pddl import without_comments
from epo_trl.envs.base import EnvError

_MARKS = frozenset('{}[]#<>|;"\\')
_TERM = r"(?:[a-z]\w*(?:\.(?:name|id|definite|indefinite))?|'[^'\\{}]*')"
_EXPRESSION = re.compile(rf"\s*{_TERM}(?:\s*(?:\+|\bor\b)\s*{_TERM})*\s*", re.ASCII)
_WORD = re.compile(r"[\w.,+=:#-]*", re.ASCII)
# TextWorld writes seven arguments of an action and its name into a buffer of 1,024 characters.
_LONGEST_WORD = 128


def refuse_code(game: Game) -> None:
    """Checks that TextWorld would treat a game file as data when it evaluates texts and copies names.

    Raises:
        EnvError: If a text contains an expression that is not known to be harmless, the task sentence contains grammar
            markup, the rules or the problem contain a word that is not a PDDL name, or the grammar cannot be read.
    """
    for sentence in TASK_SENTENCE.findall(game.grammar):
        marks = "".join(sorted(_MARKS & set(sentence)))
        if marks:
            raise _refused(game.source, f"the task sentence {sentence!r} contains {marks!r}")
    try:
        found = _foreign_expression(without_task(game.grammar))
    except Exception as error:  # noqa: BLE001 - a corrupt grammar can raise anything in the parser
        raise EnvError(f"{game.source}: the grammar cannot be read ({type(error).__name__}: {error})") from error
    if found:
        raise _refused(game.source, f"a text of the grammar contains the expression {found!r}")
    for part, text in (("pddl_domain", game.domain), ("pddl_problem", game.problem)):
        for word in re.split(r"[\s()?]+", without_comments(text)):
            if len(word) > _LONGEST_WORD or not _WORD.fullmatch(word):
                raise _refused(game.source, f"{part} contains the word {word!r}")


def _refused(source: str, what: str) -> EnvError:
    return EnvError(
        f"{source}: {what[:300]}, which TextWorld could run as code or fail on; the game was rejected. "
        "If the file is not yours, do not trust it."
    )


@lru_cache(maxsize=16)
def _foreign_expression(grammar: str) -> str:
    """Returns the first expression of a grammar that is not known to be harmless, or `""`."""
    from textworld.envs.pddl import textgen
    from textworld.envs.pddl.logic import GameLogic

    logic = GameLogic(domain="", grammar=grammar)  # parses without evaluating
    texts = [{"rhs": text} for action in logic.actions.values() for text in (action.template, action.feedback_rule)]
    grammars = (logic.grammar, textgen.ContextSensitiveGrammar.parse(json.dumps({"texts of actions": texts})))
    symbols = [symbol for one in grammars for rules in one._rules.values() for rule in rules for symbol in rule.rhs]
    return next((e for e in map(str, _expressions(symbols)) if not _EXPRESSION.fullmatch(e)), "")


def _expressions(symbols: list[Any]) -> Iterator[str]:
    """Yields the expressions that TextWorld would evaluate in some symbols of a grammar."""
    from textworld.envs.pddl import textgen

    for symbol in symbols:
        if isinstance(symbol, textgen.ConditionalSymbol):
            yield from _expressions([symbol.expression])
        elif isinstance(symbol, textgen.ListSymbol):
            yield from _expressions([symbol.symbol])
        elif isinstance(symbol, textgen.EvalSymbol):
            yield symbol.expression
