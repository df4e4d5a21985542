"""Validates what environments return, and finds their spelling of an action; an exception aborts only its episode."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any, SupportsFloat

from epo_trl.envs.base import EnvError, Info, TextEnv
from epo_trl.errors import one_line

MAX_ERROR_CHARS = 2000
FINAL_ANSWER = "final_answer"  # the tool that ends an episode with an answer


def reaches(score: float, won_score: float | None) -> bool:
    """Returns whether a score reaches that of a win, up to rounding: ten times 0.1 is a little less than 1."""
    return won_score is not None and score >= won_score - 1e-6 * max(1.0, abs(won_score))


def ends_episode_alone(error: BaseException) -> bool:
    """Returns whether an exception from an environment aborts only its episode: all but Ctrl-C, `SystemExit` too."""
    return not isinstance(error, KeyboardInterrupt)


def error_text(error: BaseException) -> str:
    """Formats the type and message of an exception, shortened."""
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[:MAX_ERROR_CHARS]}... ({len(text)} characters)"


def checked_answer(observation: Any, info: Any) -> tuple[str, Info]:
    """Returns observation and info of a reset or a step as plain text and a dict.

    An `EnvError` names the field that has another type than `TextEnv` requires.
    """
    if not isinstance(observation, str):
        raise _wrong("observation", "a str", observation)
    if not isinstance(info, Mapping):
        raise _wrong("info", "a dict", info)
    info = dict(info)
    actions, score, key = (info.get(name) for name in ("admissible_actions", "score", "state_key"))
    is_list = isinstance(actions, Collection) and not isinstance(actions, str)
    if actions is not None and not (is_list and all(isinstance(action, str) for action in actions)):
        raise _wrong("info['admissible_actions']", "a tuple of str, or None", actions)
    # The score stays as the environment gives it: a prompt may show it, and a demonstration shows it unconverted.
    if score is not None:
        number("info['score']", score)
    if key is not None and not isinstance(key, str):
        raise _wrong("info['state_key']", "a str", key)
    for name in ("won", "accepted"):
        if name in info:
            info[name] = flag(f"info['{name}']", info[name])
    for name in ("task", "task_type"):
        if name in info:
            info[name] = str(info[name])
    return str(observation), info


def checked_outcome(
    observation: Any, reward: Any, terminated: Any, truncated: Any, info: Any
) -> tuple[str, float, bool, bool, Info]:
    """Validates the result of a step as `checked_answer` does; the reward is finite."""
    observation, info = checked_answer(observation, info)
    return observation, number("reward", reward), flag("terminated", terminated), flag("truncated", truncated), info


def number(field: str, value: Any) -> float:
    """Converts a finite number from an environment to a float. A string is none, even one that spells a number."""
    if not isinstance(value, (float, int, SupportsFloat)):  # the protocol last: its check is slow
        raise _wrong(field, "a number", value)
    if not math.isfinite(value):
        raise _wrong(field, "a finite number", value)
    return float(value)


def flag(field: str, value: Any) -> bool:
    """Returns a bool of an environment, Python's or NumPy's, as Python's. The text "False" is an error."""
    if value is not True and value is not False and type(value).__name__ not in ("bool", "bool_"):
        raise _wrong(field, "a bool", value)
    return bool(value)


def close_all(envs: list[TextEnv]) -> None:
    """Closes all environments and empties the list. Warns if a `close()` fails."""
    while envs:
        try:
            envs.pop().close()
        except BaseException as error:
            if not ends_episode_alone(error):
                raise
            warnings.warn(f"an environment's close() failed: {one_line(error_text(error))}", stacklevel=2)


def _wrong(field: str, wanted: str, value: object) -> EnvError:
    return EnvError(f"{field}: expected {wanted}, got the {type(value).__name__} {str(value)[:100]!r}")


def find_action(text: str, listed: Iterable[str] | None, *, verbatim: bool) -> tuple[str, bool]:
    """Finds the action that the environment gets for a text, in its own spelling, and whether it is admissible.

    `listed` are the actions that the environment accepts now, `None` if it does not list them. With `verbatim`, an
    unlisted action keeps its white space.
    """
    action = squeeze(text)
    known = {squeeze(each): each for each in listed or ()}
    spelling = known.get(action) or {each.lower(): known[each] for each in known}.get(action.lower())
    sent = spelling or (text.strip() if verbatim else action)
    return sent, bool(sent) if listed is None else spelling is not None


def squeeze(text: str) -> str:
    """Collapses white space, as in the actions and thoughts of later prompts."""
    return " ".join(text.split())
