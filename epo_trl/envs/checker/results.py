"""Checks of a `reset` or `step` result, and of two results that have to be equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from epo_trl.envs.base import EnvError, Info, TextEnv
from epo_trl.envs.border import checked_outcome

Step = tuple[str, float, bool, bool, Info]


class EnvCheckError(EnvError):
    """An environment violates the contract."""


def failure(wrong: str, fix: str) -> EnvCheckError:
    """Builds the error from the problem and its fix."""
    return EnvCheckError(f"{wrong}. Fix: {fix}.")


def require(holds: bool, wrong: str, fix: str) -> None:
    """Raises `EnvCheckError` unless a condition holds."""
    if not holds:
        raise failure(wrong, fix)


def checked_reset(env: TextEnv, task_id: str, seed: int, options: Mapping[str, Any] | None = None) -> tuple[str, Info]:
    """Calls `reset` and returns its result; raises `EnvCheckError` at the first problem with it."""
    require(isinstance(env, TextEnv), f"{type(env).__name__} is not a TextEnv", "subclass epo_trl.envs.base.TextEnv")
    where = f"reset of {task_id!r}"
    result = env.reset(seed=seed, options={**(options or {}), "task_id": task_id})
    is_pair = isinstance(result, tuple) and len(result) == 2
    require(is_pair, f"{where} returned {_shape(result)}", "return `(observation, info)`")
    observation, info = result
    _check_answer(where, observation, 0.0, False, False, info)
    require(not info["won"], f"{where}: info['won'] is True before the first action", "clear the state in reset")
    return observation, info


def checked_step(env: TextEnv, action: str, task_id: str, first: Info) -> Step:
    """Calls `step` and returns its result, or raises `EnvCheckError`. `first` is the info of the reset before it."""
    where = f"step({action[:40]!r}) in {task_id!r}"
    result = env.step(action)
    require(
        isinstance(result, tuple) and len(result) == 5,
        f"{where} returned {_shape(result)}",
        "return `(observation, reward, terminated, truncated, info)`",
    )
    observation, reward, terminated, truncated, info = result
    _check_answer(where, *result)
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
    for key in ("task", "task_type"):
        changed = f"{where}: info[{key!r}] changed from {first[key]!r} to {info[key]!r}"
        require(info[key] == first[key], changed, "keep it constant for the whole episode")
    require(
        (info["admissible_actions"] is None) == (first["admissible_actions"] is None),
        f"{where}: info['admissible_actions'] is sometimes None and sometimes a tuple",
        "list the actions always or never",
    )
    return observation, float(reward), bool(terminated), bool(truncated), info


def _shape(result: object) -> str:
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"


def _check_answer(where: str, observation: str, reward: Any, terminated: Any, truncated: Any, info: Info) -> None:
    try:
        checked_outcome(observation, reward, terminated, truncated, info)
    except EnvError as error:
        raise EnvCheckError(f"{where}: {error}") from None
    require(
        bool(observation.strip()), f"{where}: the observation is {observation!r}", "return a text that is not empty"
    )
    for key, kind in (("won", "bool"), ("task", "str"), ("task_type", "str"), ("admissible_actions", "tuple, or None")):
        require(key in info, f"{where}: info has no {key!r}", f"add info[{key!r}], a {kind}")
    for key in ("task", "task_type"):
        is_text = isinstance(info[key], str) and bool(info[key])
        require(is_text, f"{where}: info[{key!r}] is {info[key]!r}", "make it a str that is not empty")
    actions = info["admissible_actions"]
    if actions is None:
        accepted = f"info['admissible_actions'] is None and info['accepted'] is {info.get('accepted')!r}"
        fix = "add info['accepted'], a bool: whether the game knew the last action, True after reset"
        require(info.get("accepted") is not None, f"{where}: {accepted}", fix)
        return
    require(
        type(actions) is tuple and actions == tuple(dict.fromkeys(filter(None, map(str.strip, actions)))),
        f"{where}: info['admissible_actions'] is {actions!r:.200}",
        "make it a tuple of different, stripped texts, always in the same order",
    )
    require(
        bool(actions or terminated or truncated),
        f"{where}: admissible_actions is empty although the episode continues",
        "list the actions that the engine accepts now, or terminate the episode",
    )


def require_same(expected: tuple[Any, ...], got: tuple[Any, ...], wrong: str, fix: str) -> None:
    """Raises `EnvCheckError` with the differing part, such as `info["visited"]`, unless two results are equal."""
    one, two = _parts(expected), _parts(got)
    for name in dict.fromkeys([*one, *two]):
        a, b = one.get(name), two.get(name)
        require(a == b, f"{wrong}: {name} was {str(a)[:200]!r}, now {str(b)[:200]!r}", fix)


def _parts(result: tuple[Any, ...]) -> dict[str, Any]:
    *answer, info = result
    names = ("observation", "reward", "terminated", "truncated")
    return {**dict(zip(names, answer, strict=False)), **{f"info[{key!r}]": info[key] for key in sorted(info)}}
