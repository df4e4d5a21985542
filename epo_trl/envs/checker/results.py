"""Checks of a `reset` or `step` result, and of two results that have to be equal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn, SupportsFloat

from epo_trl.envs.base import EnvError, Info, TextEnv
from epo_trl.envs.border import does_not_fit, ends_episode_alone, error_text
from epo_trl.errors import EpoTrlError

_REQUIRED: dict[str, type] = {"won": bool, "task": str, "task_type": str}
Step = tuple[str, float, bool, bool, Info]


class EnvCheckError(EnvError):
    """An environment violates the contract."""

    @property
    def keeps_traceback(self) -> bool:
        """Whether an exception of the environment's own code is the reason."""
        return self.__cause__ is not None and not isinstance(self.__cause__, EpoTrlError)


def failure(wrong: str, fix: str) -> EnvCheckError:
    """Builds the error from the problem and its fix."""
    return EnvCheckError(f"{wrong}. Fix: {fix}.")


def blame(error: BaseException, what: str, fix: str, signature: str = "") -> NoReturn:
    """Raises `EnvCheckError` for an exception of an environment, and Ctrl-C as it is.

    Args:
        error: The exception, in the function that has called the environment.
        what: Description of the call.
        fix: Fix of an exception in the environment's code.
        signature: Signature of the method, shown if the call does not fit it.
    """
    if not ends_episode_alone(error):
        raise error
    if signature and does_not_fit(error):
        fix = f"define `{signature}`"
    raise failure(f"{what} raised {error_text(error)}", fix) from error


def require_text_env(env: object) -> None:
    """Raises `EnvCheckError` unless an environment derives from `TextEnv`, whose other methods a rollout calls."""
    require(isinstance(env, TextEnv), f"{type(env).__name__} is not a TextEnv", "subclass epo_trl.envs.base.TextEnv")


def require(holds: bool, wrong: str, fix: str) -> None:
    """Raises `EnvCheckError` unless a condition holds."""
    if not holds:
        raise failure(wrong, fix)


def checked_reset(env: TextEnv, task_id: str, seed: int, options: Mapping[str, Any] | None = None) -> tuple[str, Info]:
    """Calls `reset` and returns its result; raises `EnvCheckError` at the first problem with it."""
    require_text_env(env)
    where = f"reset of {task_id!r}"
    try:
        result = env.reset(seed=seed, options={**(options or {}), "task_id": task_id})
    except EnvError:  # its message names the problem
        raise
    except BaseException as error:
        fix = "return the first observation of every task of its lists"
        blame(error, where, fix, "reset(self, *, seed=None, options=None)")
    require(
        isinstance(result, tuple) and len(result) == 2,
        f"{where} returned {_shape(result)}",
        "return `(observation, info)`",
    )
    observation, info = result
    _check_observation(observation, where)
    _check_info(info, where, over=False)
    require(not info["won"], f"{where}: info['won'] is True before the first action", "clear the state in reset")
    return observation, info


def checked_step(env: TextEnv, action: str, task_id: str, first: Info) -> Step:
    """Calls `step` and returns its result, or raises `EnvCheckError`. `first` is the info of the reset before it."""
    where = f"step({action[:40]!r}) in {task_id!r}"
    try:
        result = env.step(action)
    except BaseException as error:
        fix = "accept any text as action; answer an unknown text with an observation that rejects it"
        blame(error, where, fix, "step(self, action)")
    require(
        isinstance(result, tuple) and len(result) == 5,
        f"{where} returned {_shape(result)}",
        "return `(observation, reward, terminated, truncated, info)`",
    )
    observation, reward, terminated, truncated, info = result
    _check_observation(observation, where)
    require(
        isinstance(reward, int | float) and not isinstance(reward, bool) and math.isfinite(reward),
        f"{where}: the reward is {reward!r}",
        "return a finite float, for example `float(won)`",
    )
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        require(isinstance(flag, bool), f"{where}: {name} is {flag!r}", f"return `bool({name})`")
    _check_info(info, where, over=terminated or truncated)
    require(
        terminated or not info["won"],
        f"{where}: info['won'] is True, but terminated is False",
        "terminate with the step that solves the task, and set `won` only by the strict rule",
    )
    lost = sorted(first.keys() - info.keys())
    require(
        not lost,
        f"{where}: info lacks {', '.join(lost)}, which reset returned",
        "build info in one method that reset and step both call; prompt templates need every field in every turn",
    )
    require(
        (info["admissible_actions"] is None) == (first["admissible_actions"] is None),
        f"{where}: info['admissible_actions'] is sometimes None and sometimes a tuple",
        "list the actions always or never",
    )
    for key in ("task", "task_type"):
        require(
            info[key] == first[key],
            f"{where}: info[{key!r}] changed from {first[key]!r} to {info[key]!r}",
            f"keep {key!r} constant for the whole episode",
        )
    return observation, float(reward), terminated, truncated, info


def _shape(result: object) -> str:
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"


def _check_observation(observation: object, where: str) -> None:
    require(
        isinstance(observation, str) and bool(observation.strip()),
        f"{where}: the observation is {observation!r}",
        "return a non-empty text; the agent sees nothing else of its action's effect",
    )


def _check_info(info: object, where: str, *, over: bool) -> None:
    require(isinstance(info, dict), f"{where}: info is a {type(info).__name__}", "return a dict")
    assert isinstance(info, dict)
    for key, kind in _REQUIRED.items():
        require(key in info, f"{where}: info has no {key!r}", f"add info[{key!r}], a {kind.__name__}")
        require(
            type(info[key]) is kind,
            f"{where}: info[{key!r}] is a {type(info[key]).__name__}",
            f"make it a {kind.__name__}: `{kind.__name__}(...)`",
        )
    for key in ("task", "task_type"):
        require(bool(info[key]), f"{where}: info[{key!r}] is empty", "fill it; prompts and reports show it")
    score = info.get("score")
    require(
        score is None or (isinstance(score, SupportsFloat) and math.isfinite(score)),
        f"{where}: info['score'] is {score!r}",
        "make it a finite number, or omit it",
    )
    state_key = info.get("state_key")
    require(
        state_key is None or isinstance(state_key, str),
        f"{where}: info['state_key'] is {state_key!r:.100}",
        "make it a str, or omit it",
    )
    _check_actions(info, where, over=over)


def _check_actions(info: Info, where: str, *, over: bool) -> None:
    require(
        "admissible_actions" in info,
        f"{where}: info has no 'admissible_actions'",
        "add info['admissible_actions'], a tuple, or None if listing them is too slow",
    )
    actions = info["admissible_actions"]
    if actions is None:
        require(
            type(info.get("accepted")) is bool,
            f"{where}: info['admissible_actions'] is None and info['accepted'] is {info.get('accepted')!r}",
            "add info['accepted'], a bool: whether the game knew the last action, True after reset",
        )
        return
    require(
        type(actions) is tuple,
        f"{where}: info['admissible_actions'] is a {type(actions).__name__}",
        "make it a tuple: `tuple(...)`",
    )
    odd = [
        action for action in actions if not isinstance(action, str) or not action.strip() or action != action.strip()
    ]
    require(
        not odd,
        f"{where}: admissible_actions holds {odd[:3]!r}",
        "strip each action: `str(action).strip()`",
    )
    twice = sorted(action for action, count in Counter[str](actions).items() if count > 1)
    require(
        not twice,
        f"{where}: admissible_actions lists {twice[:3]!r} more than once",
        "remove duplicates but keep the order: `tuple(dict.fromkeys(actions))`",
    )
    require(
        over or bool(actions),
        f"{where}: admissible_actions is empty although the episode continues",
        "list the actions that the engine accepts now, or terminate the episode",
    )


def require_same(expected: tuple[Any, ...], got: tuple[Any, ...], wrong: str, fix: str) -> None:
    """Raises `EnvCheckError` with the differing part, such as `info["visited"]`, unless two results are equal."""
    names = (
        ("observation", "info") if len(expected) == 2 else ("observation", "reward", "terminated", "truncated", "info")
    )
    for name, one, two in zip(names, expected, got, strict=True):
        if name == "info":
            for key in sorted(one.keys() | two.keys()):
                a, b = one.get(key), two.get(key)
                require(a == b, f"{wrong}: info[{key!r}] was {str(a)[:200]!r}, now {str(b)[:200]!r}", fix)
        else:
            require(one == two, f"{wrong}: {name} was {str(one)[:200]!r}, now {str(two)[:200]!r}", fix)
