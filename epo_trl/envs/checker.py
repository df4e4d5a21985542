"""Checks an environment against the contract of `envs/base.py`; each message says what is wrong and how to mend it."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from epo_trl.envs.base import EnvError, Info, TaskSuite, TextEnv

_REQUIRED: dict[str, type] = {"won": bool, "task": str, "task_type": str}
_UNKNOWN_ACTION = "fly to the moon"
_ODD_ACTIONS = ("", "   ", _UNKNOWN_ACTION, "look\nlook", "Ünïcödé ✨", "x" * 5000)
_Step = tuple[str, float, bool, bool, Info]
Player = Callable[[Info, random.Random], str]


class EnvCheckError(EnvError):
    """An environment breaks the contract."""


def check_text_env(
    env: TextEnv,
    task_ids: Sequence[str],
    *,
    make_env: Callable[[], TextEnv] | None = None,
    seed: int = 0,
    turns: int = 12,
    deterministic: bool = True,
    player: Player | None = None,
) -> None:
    """Raises `EnvCheckError` with a way to mend it at the first thing that breaks the contract.

    Plays random actions and odd texts. Closes the environment at the end.

    Args:
        env: A fresh environment, not yet reset.
        task_ids: The tasks to play. Two of different kinds say more than one.
        make_env: Makes further environments, to check that instances agree and do not disturb each other.
        seed: For `reset` and for the random player.
        turns: How long the random player plays each task.
        deterministic: Whether the same actions must lead to the same texts. Set it to `False` for a game whose engine
            has noise of its own; the start must be reproducible in any case.
        player: Chooses an action from an info, with the given source of randomness. By default one of the admissible
            actions; an environment that lists none needs a player.
    """
    if not task_ids:
        raise ValueError("task_ids: got none, takes at least one task id of the environment")
    player = player or _any_listed
    _check_bad_calls(env)
    for task_id in task_ids:
        trace = _play(env, task_id, seed, turns, player)
        _check_repeats(env, "the same environment, after an episode", task_id, seed, trace, deterministic)
        _check_odd_actions(env, task_id, seed)
        if make_env is not None:
            other = make_env()
            _require(
                other is not env,
                "make_env returned the environment that it had returned before",
                "return a fresh environment from every call",
            )
            _check_repeats(other, "another environment", task_id, seed, trace, deterministic)
            _check_requests(other, task_id, seed, trace, deterministic)
            _close_twice(other)
    if make_env is not None and deterministic and len(task_ids) > 1:
        _check_independence(env, make_env(), task_ids, seed, turns, player)
    _close_twice(env)


def check_first_turn(
    env: TextEnv, task_id: str, *, seed: int = 0, options: Mapping[str, Any] | None = None, action: str = "?"
) -> tuple[str, Info]:
    """Returns what `reset` does. Raises `EnvCheckError` if that or the answer to an action lacks something.

    What a run looks at before it begins: one `reset` and one `step`.

    Args:
        env: An environment; it has to be reset afterwards.
        task_id: The task.
        seed: For `reset`.
        options: For `reset`, beside the task.
        action: What `step` is given.
    """
    start = _reset(env, task_id, seed, options)
    _step(env, action, task_id, start[1])
    return start


def check_task_suite(suite: TaskSuite) -> None:
    """Raises `EnvCheckError` if the suite's lists are empty, unstable, overlap or hide a wrong split name."""
    name = type(suite).__name__
    _require(
        isinstance(getattr(suite, "name", None), str) and bool(suite.name),
        f"{name} has no name",
        'set the class attribute `name`, for example "my-game"; every reported number carries it',
    )
    _require(
        bool(suite.splits) and suite.splits[0] == "train",
        f"{name}.splits is {suite.splits!r}",
        'let it be a tuple that begins with "train"',
    )
    owner: dict[str, str] = {}
    for split in suite.splits:
        ids = suite.task_ids(split)
        _require(len(ids) > 0, f"{name} has no task in the split {split!r}", "drop the split from `splits` or fill it")
        _require(
            list(ids) == list(suite.task_ids(split)),
            f"task_ids({split!r}) gave two different lists",
            "sort the ids or draw them from `random.Random(<fixed seed>)`; do not iterate over a set",
        )
        for task_id in ids:
            _require(
                task_id not in owner or owner[task_id] == split == "train",
                f"the task id {task_id!r} occurs twice, in {owner.get(task_id)!r} and {split!r}",
                'begin ids with their split, for example "train/17"; only "train" may repeat one, to weigh it',
            )
            owner[task_id] = split
    try:
        suite.task_ids("no such split")
    except EnvError:
        return
    raise _failure(
        "task_ids('no such split') did not raise EnvError", "call `self.check_split(split)` first in task_ids"
    )


def _failure(wrong: str, mend: str) -> EnvCheckError:
    return EnvCheckError(f"{wrong}. To mend it: {mend}.")


def _require(holds: bool, wrong: str, mend: str) -> None:
    if not holds:
        raise _failure(wrong, mend)


def _check_bad_calls(env: TextEnv) -> None:
    _require(
        isinstance(env, TextEnv), f"{type(env).__name__} is no TextEnv", "derive it from epo_trl.envs.base.TextEnv"
    )
    calls: dict[str, tuple[Callable[[], Any], str]] = {
        "step before reset": (lambda: env.step("look"), "say that reset has to be called first"),
        "reset with an unknown task id": (
            lambda: env.reset(options={"task_id": "no such task"}),
            "name the task id and say which ids there are",
        ),
        "reset without a task id": (lambda: env.reset(), 'say that options={"task_id": ...} is needed'),
    }
    for what, (call, message) in calls.items():
        try:
            call()
        except EnvError:
            continue
        except Exception as error:
            raise _failure(f"{what} raised {type(error).__name__}: {error}", f"raise EnvError and {message}") from error
        raise _failure(f"{what} was accepted", f"raise EnvError and {message}")


def _reset(env: TextEnv, task_id: str, seed: int, options: Mapping[str, Any] | None = None) -> tuple[str, Info]:
    result = env.reset(seed=seed, options={**(options or {}), "task_id": task_id})
    where = f"reset of {task_id!r}"
    _require(
        isinstance(result, tuple) and len(result) == 2,
        f"{where} returned {_shape(result)}",
        "return `(observation, info)`",
    )
    observation, info = result
    _check_observation(observation, where)
    _check_info(info, where, over=False)
    _require(not info["won"], f"{where}: info['won'] is True before the first action", "clear the state in reset")
    return observation, info


def _step(env: TextEnv, action: str, task_id: str, first: Info) -> _Step:
    where = f"step({action[:40]!r}) in {task_id!r}"
    try:
        result = env.step(action)
    except Exception as error:
        raise _failure(
            f"{where} raised {type(error).__name__}: {error}",
            "accept any text as action; answer a text that the game does not know with an observation that says so",
        ) from error
    _require(
        isinstance(result, tuple) and len(result) == 5,
        f"{where} returned {_shape(result)}",
        "return `(observation, reward, terminated, truncated, info)`",
    )
    observation, reward, terminated, truncated, info = result
    _check_observation(observation, where)
    _require(
        isinstance(reward, int | float) and not isinstance(reward, bool) and math.isfinite(reward),
        f"{where}: the reward is {reward!r}",
        "return a finite float, for example `float(won)`",
    )
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        _require(isinstance(flag, bool), f"{where}: {name} is {flag!r}", f"return `bool({name})`")
    _check_info(info, where, over=terminated or truncated)
    _require(
        terminated or not info["won"],
        f"{where}: info['won'] is True, but terminated is False",
        "terminate with the step that solves the task, and report `won` by the strict rule only",
    )
    lost = sorted(first.keys() - info.keys())
    _require(
        not lost,
        f"{where}: info lacks {', '.join(lost)}, which reset gave",
        "build info in one method that reset and step both call; prompt templates need every field in every turn",
    )
    _require(
        (info["admissible_actions"] is None) == (first["admissible_actions"] is None),
        f"{where}: info['admissible_actions'] is None at one time and a tuple at another",
        "list the actions always or never",
    )
    for key in ("task", "task_type"):
        _require(
            info[key] == first[key],
            f"{where}: info[{key!r}] changed from {first[key]!r} to {info[key]!r}",
            f"keep {key!r} as it is for the whole episode",
        )
    return observation, float(reward), terminated, truncated, info


def _shape(result: object) -> str:
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"


def _check_observation(observation: object, where: str) -> None:
    _require(
        isinstance(observation, str) and bool(observation.strip()),
        f"{where}: the observation is {observation!r}",
        "return a text that is not empty; the agent sees nothing else of what its action did",
    )


def _check_info(info: object, where: str, *, over: bool) -> None:
    _require(isinstance(info, dict), f"{where}: info is a {type(info).__name__}", "return a dict")
    assert isinstance(info, dict)
    for key, kind in _REQUIRED.items():
        _require(key in info, f"{where}: info has no {key!r}", f"add info[{key!r}], a {kind.__name__}")
        _require(
            type(info[key]) is kind,
            f"{where}: info[{key!r}] is a {type(info[key]).__name__}",
            f"make it a {kind.__name__}: `{kind.__name__}(...)`",
        )
    for key in ("task", "task_type"):
        _require(bool(info[key]), f"{where}: info[{key!r}] is empty", "prompts and reports show it: fill it")
    _check_actions(info, where, over=over)


def _check_actions(info: Info, where: str, *, over: bool) -> None:
    _require(
        "admissible_actions" in info,
        f"{where}: info has no 'admissible_actions'",
        "add info['admissible_actions'], a tuple, or None if listing them is too slow",
    )
    actions = info["admissible_actions"]
    if actions is None:
        _require(
            type(info.get("accepted")) is bool,
            f"{where}: info['admissible_actions'] is None and info['accepted'] is {info.get('accepted')!r}",
            "add info['accepted'], a bool: whether the game knew the last action, True after reset",
        )
        return
    _require(
        type(actions) is tuple,
        f"{where}: info['admissible_actions'] is a {type(actions).__name__}",
        "make it a tuple: `tuple(...)`",
    )
    odd = [
        action for action in actions if not isinstance(action, str) or not action.strip() or action != action.strip()
    ]
    _require(
        not odd,
        f"{where}: admissible_actions holds {odd[:3]!r}",
        "give each action as a text without surrounding blanks: `str(action).strip()`",
    )
    twice = sorted({action for action in actions if actions.count(action) > 1})
    _require(
        not twice,
        f"{where}: admissible_actions lists {twice[:3]!r} more than once",
        "drop the repeats and keep the order: `tuple(dict.fromkeys(actions))`",
    )
    _require(
        over or bool(actions),
        f"{where}: admissible_actions is empty although the episode goes on",
        "list what the engine accepts now, or terminate the episode",
    )


def _any_listed(info: Info, rng: random.Random) -> str:
    _require(
        info["admissible_actions"] is not None,
        "the environment lists no actions, so a random player has none to choose from",
        "give the check a player: check_text_env(..., player=lambda info, rng: <an action>)",
    )
    return rng.choice(info["admissible_actions"])


def _play(env: TextEnv, task_id: str, seed: int, turns: int, player: Player) -> list[tuple[str, Any]]:
    """Returns `[("", reset result), (action, step result), ...]` of a random player."""
    rng = random.Random(f"{seed} {task_id}")
    observation, first = _reset(env, task_id, seed)
    trace: list[tuple[str, Any]] = [("", copy.deepcopy((observation, first)))]
    info = first
    for _ in range(turns):
        action = player(info, rng)
        before, shown = info, copy.deepcopy(info)
        result = _step(env, action, task_id, trace[0][1][1])
        _require(
            before == shown,
            f"step({action!r}) in {task_id!r} changed the info that an earlier call had returned",
            "return a new dict from every reset and step",
        )
        trace.append((action, copy.deepcopy(result)))
        info = result[4]
        if result[2] or result[3]:
            break
    return trace


def _check_repeats(
    env: TextEnv, who: str, task_id: str, seed: int, trace: list[tuple[str, Any]], deterministic: bool
) -> None:
    start = _reset(env, task_id, seed)
    _compare(
        trace[0][1],
        start,
        f"the start of {task_id!r} with seed {seed} differs in {who}",
        "clear all state in reset and derive every random choice from the task id and the seed, by a "
        "`random.Random` of the environment's own (not `hash()`, not the global generator)",
    )
    if deterministic:
        for turn, (action, expected) in enumerate(trace[1:], 1):
            _compare(
                expected,
                _step(env, action, task_id, start[1]),
                f"turn {turn}, step({action!r}) in {task_id!r}, differs in {who} after the same actions",
                "derive the random choices of step from the seed too, or, if the engine itself is noisy, say so with "
                "deterministic=False",
            )


def _compare(expected: tuple[Any, ...], got: tuple[Any, ...], wrong: str, mend: str) -> None:
    """Names the part that differs: `info['visited']` says more than two long tuples."""
    names = (
        ("observation", "info") if len(expected) == 2 else ("observation", "reward", "terminated", "truncated", "info")
    )
    for name, one, two in zip(names, expected, got, strict=True):
        if name == "info":
            for key in sorted(one.keys() | two.keys()):
                a, b = one.get(key), two.get(key)
                _require(a == b, f"{wrong}: info[{key!r}] was {str(a)[:200]!r}, now {str(b)[:200]!r}", mend)
        else:
            _require(one == two, f"{wrong}: {name} was {str(one)[:200]!r}, now {str(two)[:200]!r}", mend)


def _check_odd_actions(env: TextEnv, task_id: str, seed: int) -> None:
    _, first = _reset(env, task_id, seed)
    for action in _ODD_ACTIONS:
        *_, terminated, truncated, info = _step(env, action, task_id, first)
        _require(
            not info["won"],
            f"step({action[:40]!r}) in {task_id!r} won the game",
            "let only the engine's own success flag set `won`",
        )
        _require(
            action != _UNKNOWN_ACTION or info["admissible_actions"] is not None or not info["accepted"],
            f"step({action!r}) in {task_id!r}: info['accepted'] is True",
            "set it to whether the game knew the action; nothing else tells a policy's mistakes from its moves",
        )
        if terminated or truncated:
            _, first = _reset(env, task_id, seed)


def _check_requests(env: TextEnv, task_id: str, seed: int, trace: list[tuple[str, Any]], deterministic: bool) -> None:
    """Checks the two-phase calls: they must lead to what `reset` and `step` lead to."""
    mend = "let `reset_async` and `step_async` start what `reset` and `step` do, or leave them to TextEnv"
    env.reset_async(seed=seed, options={"task_id": task_id})
    _compare(trace[0][1], env.reset_wait(), f"reset_async and reset_wait of {task_id!r} differ from reset", mend)
    for action, expected in trace[1:2] if deterministic else []:
        env.step_async(action)
        _compare(expected, env.step_wait(), f"step_async and step_wait of {action!r} differ from step", mend)
    try:
        env.step_wait()
    except EnvError:
        return
    raise _failure("step_wait without step_async was accepted", "raise EnvError: there is nothing to wait for")


def _check_independence(
    one: TextEnv, two: TextEnv, task_ids: Sequence[str], seed: int, turns: int, player: Player
) -> None:
    """Plays one task while another environment plays another task between its steps."""
    rng = random.Random(seed)
    trace = _play(one, task_ids[0], seed, turns, player)
    _, first = _reset(one, task_ids[0], seed)
    _, shown = _reset(two, task_ids[1], seed)
    for turn, (action, expected) in enumerate(trace[1:], 1):
        *_, terminated, truncated, shown = _step(two, player(shown, rng), task_ids[1], shown)
        if terminated or truncated:
            _, shown = _reset(two, task_ids[1], seed)
        _compare(
            expected,
            _step(one, action, task_ids[0], first),
            f"turn {turn} of {task_ids[0]!r} differs when another environment plays {task_ids[1]!r} at the same time",
            "keep the state in the instance, not in the class or the module",
        )
    _close_twice(two)


def _close_twice(env: TextEnv) -> None:
    for count in ("first", "second"):
        try:
            env.close()
        except Exception as error:
            raise _failure(
                f"the {count} close() raised {type(error).__name__}: {error}",
                "let close free what there is and do nothing when there is nothing left",
            ) from error
