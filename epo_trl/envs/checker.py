"""Checks an environment against the contract of `envs/base.py`. Each message names the problem and the fix.

Checked are invalid calls, odd actions, reproducible and independent episodes, copies, and the lists of tasks.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from epo_trl.envs.base import EnvError, Info, TaskSuite, TextEnv
from epo_trl.envs.border import checked_outcome

_SEED = 0  # of `reset` and of the random player
_UNKNOWN_ACTION = "fly to the moon"
_ODD_ACTIONS = ("", "   ", _UNKNOWN_ACTION, "look\nlook", "Ünïcödé ✨", "x" * 5000)
Player = Callable[[Info, random.Random], str]
Trace = list[tuple[str, Any]]  # ("", result of reset), (action, result of step), ...
Step = tuple[str, float, bool, bool, Info]


class EnvCheckError(EnvError):
    """An environment violates the contract."""


def require(holds: bool, wrong: str, fix: str) -> None:
    """Raises `EnvCheckError` unless a condition holds."""
    if not holds:
        raise EnvCheckError(f"{wrong}. Fix: {fix}.")


def check_text_env(
    env: TextEnv,
    task_ids: Sequence[str],
    *,
    make_env: Callable[[], TextEnv] | None = None,
    turns: int = 12,
    deterministic: bool = True,
    player: Player | None = None,
) -> None:
    """Raises `EnvCheckError` at the first violation of the contract, with the fix.

    Plays random actions and odd texts, and closes the environment at the end. What the environment itself raises is
    not caught.

    Args:
        env: Fresh environment that has not been reset.
        task_ids: Ids of the tasks to play. Two of different kinds find more than one.
        make_env: Creates further environments, to check that instances agree and are independent.
        turns: Number of random turns per task.
        deterministic: Whether the same actions must lead to the same texts. Set it to `False` for an engine that is
            itself noisy; the start must be reproducible in any case.
        player: Chooses an action from an info and a random generator. By default it draws one of the admissible
            actions; an environment that lists none needs a player.
    """
    player = player or any_listed
    _check_bad_calls(env)
    traces = {}
    for task_id in task_ids:
        traces[task_id] = trace = _play(env, task_id, turns, player)
        _check_repeats(env, "the same environment, after an episode", task_id, trace, deterministic)
        _check_odd_actions(env, task_id)
        if make_env is not None:
            other = make_env()
            _check_repeats(other, "another environment", task_id, trace, deterministic)
            other.close()
    if deterministic:
        if make_env is not None and len(task_ids) > 1:
            _check_independence(env, make_env(), task_ids[1], traces[task_ids[0]], task_ids[0], player)
        for task_id, trace in traces.items():
            _check_copies(env, task_id, trace, player)
    for _ in range(2):
        env.close()


def _check_bad_calls(env: TextEnv) -> None:
    fix = "raise EnvError and tell the caller what to pass, or to call reset first"
    unknown = {"task_id": "no such task"}
    _require_refusal(lambda: env.step("look"), "step before reset was accepted", fix)
    _require_refusal(lambda: env.reset(options=unknown), "reset with an unknown task id was accepted", fix)
    _require_refusal(env.reset, "reset without a task id was accepted", fix)


def _require_refusal(call: Callable[[], Any], wrong: str, fix: str) -> None:
    """Raises `EnvCheckError` unless a call raises `EnvError`."""
    try:
        call()
    except EnvError:
        return
    require(False, wrong, fix)


def any_listed(info: Info, rng: random.Random) -> str:
    """Chooses one of the admissible actions; raises `EnvCheckError` if the environment lists none."""
    require(
        info["admissible_actions"] is not None,
        "the environment lists no actions for the random player to choose from",
        "set its option that lists them, or pass check_text_env(..., player=lambda info, rng: <an action>)",
    )
    return rng.choice(info["admissible_actions"])


def _play(env: TextEnv, task_id: str, turns: int, player: Player) -> Trace:
    """Plays random actions and returns their results."""
    rng = random.Random(f"{_SEED} {task_id}")
    observation, info = checked_reset(env, task_id, _SEED)
    trace: Trace = [("", copy.deepcopy((observation, info)))]
    for _ in range(turns):
        action = player(info, rng)
        before, shown = info, copy.deepcopy(info)
        result = checked_step(env, action, task_id, trace[0][1][1])
        require(
            before == shown,
            f"step({action!r}) in {task_id!r} changed the info that an earlier call had returned",
            "return a new dict from every reset and step",
        )
        trace.append((action, copy.deepcopy(result)))
        info = result[4]
        if result[2] or result[3]:
            break
    return trace


def _check_repeats(env: TextEnv, who: str, task_id: str, trace: Trace, deterministic: bool) -> None:
    require_same(
        trace[0][1],
        checked_reset(env, task_id, _SEED),
        f"the start of {task_id!r} with seed {_SEED} differs in {who}",
        "clear all state in reset and derive every random choice from the task id and the seed, with the "
        "environment's own `random.Random` (not `hash()`, not the global generator)",
    )
    if deterministic:
        fix = "derive the random choices of step from the seed too, or pass deterministic=False if the engine is noisy"
        for turn in trace[1:]:
            _check_turn(env, task_id, turn, trace[0][1][1], f"differs in {who} after the same actions", fix)


def _check_turn(env: TextEnv, task_id: str, turn: tuple[str, Any], first: Info, wrong: str, fix: str) -> None:
    action, expected = turn
    require_same(expected, checked_step(env, action, task_id, first), f"step({action!r}) in {task_id!r} {wrong}", fix)


def _check_odd_actions(env: TextEnv, task_id: str) -> None:
    _, first = checked_reset(env, task_id, _SEED)
    for action in _ODD_ACTIONS:
        *_, terminated, truncated, info = checked_step(env, action, task_id, first)
        where = f"step({action[:40]!r}) in {task_id!r}"
        require(not info["won"], f"{where} won the game", "let only the engine's own success flag set `won`")
        require(
            action != _UNKNOWN_ACTION or info["admissible_actions"] is not None or not info["accepted"],
            f"{where}: info['accepted'] is True",
            "set it to whether the game knew the action; only this field marks a policy's invalid actions",
        )
        if terminated or truncated:
            _, first = checked_reset(env, task_id, _SEED)


def _check_independence(
    one: TextEnv, two: TextEnv, other_task: str, trace: Trace, task_id: str, player: Player
) -> None:
    """Plays one task while another environment plays another task between its steps."""
    rng = random.Random(_SEED)
    _, first = checked_reset(one, task_id, _SEED)
    _, shown = checked_reset(two, other_task, _SEED)
    for turn in trace[1:]:
        *_, terminated, truncated, shown = checked_step(two, player(shown, rng), other_task, shown)
        if terminated or truncated:
            _, shown = checked_reset(two, other_task, _SEED)
        wrong = f"differs when another environment plays {other_task!r} at the same time"
        _check_turn(one, task_id, turn, first, wrong, "keep the state in the instance, not in the class or the module")
    two.close()


def _check_copies(env: TextEnv, task_id: str, trace: Trace, player: Player) -> None:
    """Copies the environment in mid-episode, if it can be copied, and plays it on while a copy plays other actions.

    Another copy has to go on as the environment does, if its class is deterministic.
    """
    middle = max(1, len(trace) // 2)
    _, first = checked_reset(env, task_id, _SEED)
    for action, _ in trace[1:middle]:
        checked_step(env, action, task_id, first)
    try:
        other, same = env.copy(), env.copy()
    except EnvError:
        return
    rng, shown, over = random.Random(f"{_SEED} copy {task_id}"), trace[middle - 1][1][-1], False
    for turn in trace[middle:]:
        if not over:
            *_, terminated, truncated, shown = checked_step(other, player(shown, rng), task_id, first)
            over = terminated or truncated
        fix = "let copy() duplicate all that step changes, for example `twin.board = dict(self.board)`"
        _check_turn(env, task_id, turn, first, "differs while a copy plays other actions", fix)
    for turn in trace[middle:] if env.is_deterministic else []:
        fix = "let copy() take over the whole state, or set `is_deterministic = False` if a copy has luck of its own"
        _check_turn(same, task_id, turn, first, "differs in a copy after the same actions", fix)
    other.close()
    same.close()


def check_task_suite(suite: TaskSuite) -> None:
    """Raises `EnvCheckError` if lists are empty, unstable or overlap, or if an unknown split name is accepted."""
    name = type(suite).__name__
    fix = 'set the class attribute `name`, for example "my-game", which every reported number carries'
    require(bool(getattr(suite, "name", "")), f"{name} has no name", fix)
    begins = suite.splits[:1] == ("train",)
    require(begins, f"{name}.splits is {suite.splits!r}", 'make it a tuple that begins with "train"')
    owner: dict[str, str] = {}
    for split in suite.splits:
        ids = suite.task_ids(split)
        require(len(ids) > 0, f"{name} has no task in the split {split!r}", "remove the split from `splits` or fill it")
        require(
            list(ids) == list(suite.task_ids(split)),
            f"task_ids({split!r}) returned two different lists",
            "sort the ids or draw them from `random.Random(<fixed seed>)`; do not iterate over a set",
        )
        for task_id in ids:
            require(
                task_id not in owner or owner[task_id] == split == "train",
                f"the task id {task_id!r} occurs twice, in {owner.get(task_id)!r} and {split!r}",
                'begin ids with their split, for example "train/17"; only "train" may repeat one, as a weight',
            )
            owner[task_id] = split
    fix = "call `self.check_split(split)` first in task_ids"
    _require_refusal(lambda: suite.task_ids("no such split"), "task_ids('no such split') did not raise EnvError", fix)


def checked_reset(env: TextEnv, task_id: str, seed: int, options: Mapping[str, Any] | None = None) -> tuple[str, Info]:
    """Calls `reset` and returns its result; raises `EnvCheckError` at the first problem with it."""
    require(isinstance(env, TextEnv), f"{type(env).__name__} is not a TextEnv", "subclass epo_trl.envs.base.TextEnv")
    where = f"reset of {task_id!r}"
    result = env.reset(seed=seed, options={**(options or {}), "task_id": task_id})
    is_pair = isinstance(result, tuple) and len(result) == 2
    require(is_pair, f"{where} returned {result!r:.100}", "return `(observation, info)`")
    observation, info = result
    _check_answer(where, observation, 0.0, False, False, info)
    require(not info["won"], f"{where}: info['won'] is True before the first action", "clear the state in reset")
    return observation, info


def checked_step(env: TextEnv, action: str, task_id: str, first: Info) -> Step:
    """Calls `step` and returns its result, or raises `EnvCheckError`. `first` is the info of the reset before it."""
    where = f"step({action[:40]!r}) in {task_id!r}"
    result = env.step(action)
    fix = "return `(observation, reward, terminated, truncated, info)`"
    require(isinstance(result, tuple) and len(result) == 5, f"{where} returned {result!r:.100}", fix)
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


def _check_answer(where: str, observation: str, reward: Any, terminated: Any, truncated: Any, info: Info) -> None:
    try:
        checked_outcome(observation, reward, terminated, truncated, info)
    except EnvError as error:
        raise EnvCheckError(f"{where}: {error}") from None
    fix = "return a text that is not empty"
    require(bool(observation.strip()), f"{where}: the observation is {observation!r}", fix)
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
