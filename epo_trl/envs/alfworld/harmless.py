"""What of a game file TextWorld would run as code, refused before TextWorld sees it.

TextWorld gives what stands between braces in a text of the grammar (an answer, the wording of an action, the task
sentence) to Python's `eval`, and fills the names of a problem into a format string and into buffers of fixed size.
So a game file from a stranger is a program. What is left after these checks:

- Every text is parsed by TextWorld's own parser, which evaluates nothing, so that nothing is hidden from us that
  it would find. Each expression in it may join names, ids and articles of things, and plain strings; nothing else.
  Values are never parsed again, and the texts between the expressions cannot hold braces.
- The task sentence, which differs from game to game, holds none of the marks that the grammar reads. The rest of a
  grammar is the same in all games of one source and is therefore checked once.
- Names, and all else of rules and problem, are short words of letters, digits and `_`, `-`, `.`, `+`.

The fast engine needs none of this: it evaluates nothing and takes only the grammar that it knows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from epo_trl.envs.alfworld.games import TASK_SENTENCE, Game, without_task
from epo_trl.envs.alfworld.pddl import without_comments
from epo_trl.envs.base import EnvError

_MARKS = frozenset('{}[]#<>|;"\\')
_TERM = r"(?:[a-z]\w*(?:\.(?:name|id|definite|indefinite))?|'[^'\\{}]*')"
_EXPRESSION = re.compile(rf"\s*{_TERM}(?:\s*(?:\+|\bor\b)\s*{_TERM})*\s*", re.ASCII)
_WORD = re.compile(r"[\w.,+=:#-]*", re.ASCII)
# Seven arguments of an action and its name go into 1,024 characters of memory.
_LONGEST_WORD = 128


def refuse_code(game: Game) -> None:
    """Checks that a game file is data to TextWorld, as far as it evaluates texts and copies names.

    Raises:
        EnvError: If a text holds an expression other than the harmless ones, the task sentence a mark of the grammar,
            or rules or problem a word that is no PDDL name. Also if the grammar cannot be read.
    """
    for sentence in TASK_SENTENCE.findall(game.grammar):
        marks = "".join(sorted(_MARKS & set(sentence)))
        if marks:
            raise _refused(game.source, f"the task sentence {sentence!r} holds {marks!r}")
    try:
        found = _foreign_expression(without_task(game.grammar))
    except Exception as error:  # noqa: BLE001 - the parser raises whatever a damaged grammar leads to
        raise EnvError(f"{game.source}: the grammar cannot be read ({type(error).__name__}: {error})") from error
    if found:
        raise _refused(game.source, f"a text of the grammar holds the expression {found!r}")
    for part, text in (("pddl_domain", game.domain), ("pddl_problem", game.problem)):
        for word in re.split(r"[\s()?]+", without_comments(text)):
            if len(word) > _LONGEST_WORD or not _WORD.fullmatch(word):
                raise _refused(game.source, f"{part} holds the word {word!r}")


def _refused(source: str, what: str) -> EnvError:
    return EnvError(
        f"{source}: {what[:300]}, which TextWorld could run as code or stumble over; this game is not given to it. "
        "If the file is not yours, do not trust it."
    )


@lru_cache(maxsize=16)
def _foreign_expression(grammar: str) -> str:
    """Returns the first expression of a grammar that is not one of the harmless ones, or `""`."""
    from textworld.envs.pddl import textgen
    from textworld.envs.pddl.logic import GameLogic

    logic = GameLogic(domain="", grammar=grammar)  # parses, and evaluates nothing
    texts = [{"rhs": text} for action in logic.actions.values() for text in (action.template, action.feedback_rule)]
    grammars = (logic.grammar, textgen.ContextSensitiveGrammar.parse(json.dumps({"texts of actions": texts})))
    symbols = [symbol for one in grammars for rules in one._rules.values() for rule in rules for symbol in rule.rhs]
    return next((e for e in map(str, _expressions(symbols)) if not _EXPRESSION.fullmatch(e)), "")


def _expressions(symbols: list[Any]) -> Iterator[str]:
    """Yields what TextWorld would evaluate in some symbols of a grammar."""
    from textworld.envs.pddl import textgen

    for symbol in symbols:
        if isinstance(symbol, textgen.ConditionalSymbol):
            yield from _expressions([symbol.expression])
        elif isinstance(symbol, textgen.ListSymbol):
            yield from _expressions([symbol.symbol])
        elif isinstance(symbol, textgen.EvalSymbol):
            yield symbol.expression
