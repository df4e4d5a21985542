"""What an environment is here: Gymnasium's `reset` and `step`, with text for observations and actions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

Info = dict[str, Any]


class EnvError(RuntimeError):
    """An environment, a game file or a setting of it is unusable. The message says which and how to mend it."""


@dataclass(slots=True)
class Faults:
    """What went wrong with the processes in which games run, counted since the suite was made.

    Args:
        restarts: Processes started in place of one that died or hung.
        timeouts: Calls that took too long; their process was killed.
        retries: Resets that were tried again because their process died or hung.
    """

    restarts: int = 0
    timeouts: int = 0
    retries: int = 0

    def __add__(self, other: Faults) -> Faults:
        return Faults(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: Faults) -> Faults:
        return Faults(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


class TextEnv(ABC):
    """A text game that can play any task of its suite.

    `info`, from `reset` and from `step`, holds at least

    - `admissible_actions` (`tuple[str, ...]`, or `None` throughout): the actions that the engine accepts now; `None`
      if listing them is too slow,
    - `accepted` (`bool`), if nothing is listed: whether the engine knew the last action; `True` after `reset`,
    - `won` (`bool`): whether the task is solved, by the strict rule,
    - `task` (`str`): the task in words,
    - `task_type` (`str`): its kind,

    may hold

    - `score` (number): the environment's own, if it keeps one,
    - `refusal` (`str`): why the last action was not accepted, for the episode's record,

    and whatever else a prompt template may want to show, under the name of the template's field.
    """

    @abstractmethod
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Returns the first observation and the info of the task `options["task_id"]`.

        The same task id and seed give the same start, in every process.
        """

    @abstractmethod
    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Returns `(observation, reward, terminated, truncated, info)`. Any text is allowed as action."""

    # Sending to all environments and then waiting for all lets those with processes of their own work side by side.
    # The others do their work in the wait, by these defaults.

    _request: Callable[[], Any] | None = None

    def reset_async(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Asks for a reset, whose result `reset_wait` returns. A request before it that nobody waited for is void."""
        self._request = lambda: self.reset(seed=seed, options=options)

    def reset_wait(self) -> tuple[str, Info]:
        """Returns the result of `reset_async`, or raises what went wrong."""
        return self._requested()

    def step_async(self, action: str) -> None:
        """Asks for a step, whose result `step_wait` returns."""
        self._request = lambda: self.step(action)

    def step_wait(self) -> tuple[str, float, bool, bool, Info]:
        """Returns the result of `step_async`, or raises what went wrong."""
        return self._requested()

    def _requested(self) -> Any:
        request, self._request = self._request, None
        if request is None:
            raise EnvError("nothing to wait for; call reset_async or step_async first")
        return request()

    def close(self) -> None:  # noqa: B027 - most games hold nothing
        """Frees what the environment holds. May be called twice."""


class Expert(Protocol):
    """A scripted player that knows only what the agent is shown."""

    def reset(self, observation: str, info: Info) -> None:
        """Starts an episode."""

    def act(self, observation: str, info: Info) -> tuple[str, str]:
        """Returns `(thought, action)` for what is seen now."""


class TaskSuite(ABC):
    """Fixed lists of tasks, and the environments that play them.

    Attributes:
        name: Carried by every reported number, for example `"alfworld-generated"`.
        splits: Names of the lists. `"train"` comes first; `"iid"` and `"ood"` are the test lists.
        settings: What it was made from, where known. A run is only resumed with equal ones.
        made_by: The class of these settings as `"module:Class"`, where known.
        protocol: Name of the protocol by which it is evaluated if none is said; `""` if it has to be said.
        tools: If its actions are tool calls in JSON: the functions that can be called, with types and docstrings.
        verbatim: Whether an action that is not listed reaches the environment whole, white space inside it too: it may
            be code or JSON. Otherwise white space is squeezed, and of a long text the end is passed on.
    """

    name: str
    splits: tuple[str, ...] = ("train", "iid", "ood")
    settings: Mapping[str, Any] = {}
    made_by: str = ""
    protocol: str = ""
    tools: Sequence[Callable[..., Any]] = ()
    verbatim: bool = False

    @abstractmethod
    def task_ids(self, split: str) -> Sequence[str]:
        """Returns the task ids of a split, in a fixed order, the same in every process.

        Training draws uniformly from this list. "train" may name a task more than once, to weigh it.
        """

    @abstractmethod
    def make_env(self) -> TextEnv:
        """Returns a fresh environment that can play every task of the suite."""

    def content(self, split: str) -> Any:
        """Returns what the tasks of a list are made of, where their ids do not say it; `None` where they do.

        An evaluation goes on only with equal lists, and equal contents.
        """
        return None

    def make_expert(self, seed: int = 0) -> Expert:
        """Returns a player for demonstrations, or raises `EnvError` if the suite has none. `seed` makes its choices."""
        raise EnvError(f"the task suite {self.name!r} has no expert, so it cannot make demonstrations")

    def demonstration_tasks(self, split: str, max_turns: int, count: int | None = None) -> Sequence[str]:
        """Returns tasks of a split for the expert to play, in the order of the list, each once.

        A part of a list is spread evenly over it: lists are often sorted by the type of task. A suite that knows
        without playing which tasks the expert solves within `max_turns` leaves out the others.

        Args:
            split: Name of the split.
            max_turns: The turn limit.
            count: How many to return at most.
        """
        ids = list(dict.fromkeys(self.task_ids(split)))
        if count is None or count >= len(ids):
            return ids
        return [ids[i * len(ids) // count] for i in range(count)]

    def faults(self) -> Faults:
        """Returns what has gone wrong so far with processes of this suite; nothing if it has none."""
        return Faults()

    def check_split(self, split: str) -> None:
        """Raises `EnvError` if there is no such split."""
        if split not in self.splits:
            raise EnvError(f"split: got {split!r}, {self.name!r} has {', '.join(self.splits)}")
