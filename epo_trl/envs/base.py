"""The environment interface: Gymnasium's `reset` and `step`, with text observations and actions."""

from __future__ import annotations

import asyncio
import json
import operator
import random
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import Field, astuple, dataclass, fields, is_dataclass
from functools import cache, cached_property
from typing import Any, ClassVar, Protocol, Self, TypeVar

from epo_trl.errors import EpoTrlError

Info = dict[str, Any]
T = TypeVar("T")
_NUMBER = re.compile("0|[1-9][0-9]{0,17}")
NOT_RUNNING = "step: no episode is running; call reset(options={'task_id': ...}) first"


class EnvError(EpoTrlError, RuntimeError):
    """An environment, its game file or one of its settings is unusable. The message names it and the fix."""


@dataclass(slots=True)
class Faults:
    """Counts of failures of the processes in which games run, since the suite was made."""

    restarts: int = 0  # processes started in place of one that died or hung
    timeouts: int = 0  # calls that took too long; their process was killed
    retries: int = 0  # resets that were retried because their process died or hung

    def __add__(self, other: Faults) -> Faults:
        return Faults(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, other: Faults) -> Faults:
        return Faults(*map(operator.sub, astuple(self), astuple(other)))


class TextEnv(ABC):
    """A text environment that can play any task of its suite.

    `info`, returned by `reset` and `step`, holds at least

    - `admissible_actions` (`tuple[str, ...]`, or `None` throughout): the actions that the engine accepts now; `None`
      if listing them is too slow,
    - `accepted` (`bool`), if no actions are listed: whether the engine knew the last action; `True` after `reset`,
    - `won` (`bool`): whether the task is solved, by the strict rule,
    - `task` (`str`): natural-language description of the task,
    - `task_type` (`str`): kind of task.

    It may hold

    - `score` (number): the environment's own score, if it keeps one,
    - `state_key` (`str`): identifies the state of the environment for credits with `anchor: state`; never shown. It
      may be left out unless `reset` got the option `state_key`,
    - `refusal` (`str`): reason why the last action was not accepted, for the episode's record,

    and any other field that a prompt template shows, under the name of the template's field.
    """

    @abstractmethod
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Starts the task `options["task_id"]` and returns its first observation and info.

        The same task id and seed give the same start in every process. `options["state_key"]` is set where a credit
        needs `info["state_key"]`, in training only.
        """

    @abstractmethod
    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Returns `(observation, reward, terminated, truncated, info)`. Any text is allowed as action."""

    is_deterministic: ClassVar[bool] = False  # whether equal states and actions lead to equal states

    def copy(self) -> Self:
        """Returns an independent environment in the same state. What is random later differs from copy to copy.

        By default an environment cannot copy its state, and raises `EnvError`.
        """
        raise EnvError(f"environment: expected one that can copy its state (`TextEnv.copy`), got {type(self).__name__}")

    def reseed(self, seed: int) -> None:  # noqa: B027 - most games have none
        """Seeds the random numbers that do not follow from task and seed of a reset. By default there are none.

        Called before each episode of an expert or of an audit of credits, so that it does not depend on earlier ones.
        """

    # Sending to all environments before waiting for any lets those that run elsewhere, `AsyncTextEnv`, work in
    # parallel. By these defaults, all others do their work in the wait.

    _request: Callable[[], Any] | None = None

    def reset_async(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Requests a reset; `reset_wait` returns its result. Drops an earlier request that was never waited for."""
        self._request = lambda: self.reset(seed=seed, options=options)

    def reset_wait(self) -> tuple[str, Info]:
        """Returns the result of `reset_async`, or raises its error."""
        return self._requested()

    def step_async(self, action: str) -> None:
        """Requests a step; `step_wait` returns its result."""
        self._request = lambda: self.step(action)

    def step_wait(self) -> tuple[str, float, bool, bool, Info]:
        """Returns the result of `step_async`, or raises its error."""
        return self._requested()

    def has_answer(self) -> bool:
        """Whether the result of the last request is available without waiting for another process."""
        return True

    def _requested(self) -> Any:
        request, self._request = self._request, None
        assert request is not None, "no request is pending"
        return request()

    def close(self) -> None:  # noqa: B027 - most games hold nothing
        """Frees all resources. May be called twice."""


class AsyncTextEnv(TextEnv):
    """An environment that runs in another thread, process or machine. `reset` and `step` send a request and wait.

    Subclasses implement `reset_async` and `step_async`, which set `_pending`; or they override the waits and
    `has_answer` too.
    """

    _pending: Future[Any] | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Calls `reset_async` and `reset_wait`."""
        self.reset_async(seed=seed, options=options)
        return self.reset_wait()

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Calls `step_async` and `step_wait`."""
        self.step_async(action)
        return self.step_wait()

    def has_answer(self) -> bool:
        """Whether the last request has been answered, or has failed."""
        return self._pending is None or self._pending.done()

    def _requested(self) -> Any:
        if self._pending is not None:
            self._request, self._pending = self._pending.result, None
        return super()._requested()


def submit(coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
    """Runs a coroutine in the background, in the one event loop of this process, and returns its future."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop())


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="epo_trl environments", daemon=True).start()
    return loop


class Expert(Protocol):
    """A scripted player. Its environment says what it knows beyond the observations that the agent sees."""

    def reset(self, observation: str, info: Info) -> None:
        """Starts an episode. A subclass without a memory inherits this."""
        return  # not abstract

    def act(self, observation: str, info: Info) -> tuple[str, str]:
        """Returns `(thought, action)` for the current observation."""


def split_task_id(task_id: Any, sizes: Mapping[str, int]) -> tuple[str, int]:
    """Splits the id of a numbered task, `"<split>/<number>"`, or raises an `EnvError` with the valid ids.

    `sizes` are the numbers of tasks of each split.
    """
    split, _, text = str(task_id).partition("/")
    number = read_number(text)
    if not 0 <= number < sizes.get(split, 0):
        known = ", ".join(f"'{name}/0' to '{name}/{size - 1}'" for name, size in sizes.items() if size)
        raise EnvError(f"task_id: expected {known or 'none, the suite is empty'}, got {task_id!r:.100}")
    return split, number


def read_number(text: str) -> int:
    """Returns the number in a task id, or -1 if it is none. Each number has one spelling, that of the task lists."""
    return int(text) if _NUMBER.fullmatch(text) else -1


def stratified_sample(items: Sequence[T], count: int) -> list[T]:
    """Draws a random item from each of `count` equal parts of a list, in its order; the same in every process.

    Items at equal distances would miss task types of a list in which the types alternate.
    """
    chance, size = random.Random(0), len(items)
    return [items[chance.randrange(i * size // count, (i + 1) * size // count)] for i in range(count)]


class TaskSuite(ABC):
    """Fixed lists of tasks, and the environments that play them."""

    name: str  # in every reported number, for example "alfworld-generated"
    splits: tuple[str, ...] = ("train", "iid", "ood")  # "train" comes first; "iid" and "ood" are the test lists
    protocol: str = ""  # name of the default evaluation protocol; "" if it has to be chosen explicitly
    prompt_template: str = "general"  # name or folder of the default one
    tools: Sequence[Callable[..., Any]] = ()  # with types and docstrings, if actions are tool calls in JSON
    verbatim: bool = False  # whether an unlisted action keeps its white space: it may be code or JSON
    # Whether no reset or step takes more than some milliseconds or can hang. A server then calls them without a thread
    # and a time limit.
    instant: bool = False

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Settings that decide which games are played, for checkpoints and model cards.

        A run or an evaluation is resumed only with equal settings. `build_suite` sets those of the config. A dataclass
        made in Python has its public fields (see `is_setting`), other suites have none. Left out are values that JSON
        cannot hold, and those of more than 1,000 characters, which belong in `content`.
        """
        if not is_dataclass(self):
            return {}
        names = [f.name for f in fields(self) if f.init and not f.name.startswith("_") and is_setting(f, self)]
        return {name: value for name in names if _is_short_json(value := getattr(self, name))}

    @abstractmethod
    def task_ids(self, split: str) -> Sequence[str]:
        """Returns the task ids of a split, in a fixed order that is the same in every process.

        Training draws uniformly from this list. "train" may list a task more than once, to give it more weight.
        """

    @abstractmethod
    def make_env(self) -> TextEnv:
        """Creates a fresh environment that can play every task of the suite."""

    def make_suite(self) -> Self:
        """Returns the suite: as a dataclass, it is its own settings."""
        return self

    def content(self, split: str) -> Any:
        """Returns the content of a task list, where the ids do not determine it; `None` where they do.

        An evaluation is resumed only with equal lists and contents, a training run with those of `"train"`.
        """
        return None

    def make_expert(self, seed: int = 0) -> Expert:
        """Creates an expert for demonstrations, seeded with `seed`, or raises `EnvError` if the suite has none."""
        raise EnvError(f"the task suite {self.name!r} has no expert, so it cannot make demonstrations")

    def demonstration_tasks(self, split: str, max_turns: int, count: int | None = None) -> Sequence[str]:
        """Returns at most `count` tasks of a split for the expert to play, in the order of the list, each once.

        A subset is spread evenly over the list, which is often sorted by task type. A suite that knows without playing
        which tasks the expert solves within `max_turns` leaves out the others.
        """
        ids = list(dict.fromkeys(self.task_ids(split)))
        if count is None or count >= len(ids):
            return ids
        return stratified_sample(ids, count)

    def faults(self) -> Faults:
        """Returns the failure counts of this suite's processes so far; all zero if it has none."""
        return Faults()

    def check_split(self, split: str) -> None:
        """Raises `EnvError` if the suite has no such split."""
        if split not in self.splits:
            raise EnvError(f"split: expected one of {', '.join(self.splits)} ({self.name!r}), got {split!r}")


def is_setting(field: Field[Any], owner: Any) -> bool:
    """Whether a field is a setting: not one in `MAY_CHANGE`, nor with `repr=False` (a secret) or `compare=False`."""
    return field.name not in getattr(owner, "MAY_CHANGE", ()) and field.repr and field.compare


def _is_short_json(value: Any) -> bool:
    try:
        return len(json.dumps(value)) <= 1000
    except (TypeError, ValueError):
        return False
