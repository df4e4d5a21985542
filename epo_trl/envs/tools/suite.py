"""Environments written for TRL's `environment_factory`: a class whose public methods are tools.

An action is a tool call in JSON. It is treated as data: it is checked against the method's types, and an invalid call
is an invalid action. What a tool returns is the observation; so is the exception of a tool, as with TRL.
"""

from __future__ import annotations

import inspect
import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from epo_trl.bounds import option
from epo_trl.envs.base import EnvError, Expert, TaskSuite, split_task_id
from epo_trl.envs.registry import named_object
from epo_trl.envs.tools.env import ToolEnv, awaited, final_answer, list_tools, to_text
from epo_trl.envs.tools.tool import tool_call

__all__ = ["ToolEnv", "ToolSuite", "ToolsArguments", "tool_call"]
Rows = Sequence[Mapping[str, Any]]
OWN_TASKS = 100  # number of tasks of an environment that makes them itself


class ToolSuite(TaskSuite):
    """The rows of a dataset as tasks, with environments from a factory. Accepts what TRL's `GRPOTrainer` accepts.

    Args:
        factory: `environment_factory`: a class, or a function without arguments that returns an object.
        rows: Training rows; `None` for an object that makes its tasks itself.
        reward_funcs: One or several of TRL's reward functions. They get `environments`, `prompts`, `completions` (the
            calls and their results) and the row's columns, each as a list of one. The object's own `get_reward`, if
            any, is added.
        iid_rows: Test rows like the training rows; `None` for no such list.
        ood_rows: Test rows of another kind; `None` for no such list.
        won_score: Score at which an episode is won. It then also ends, unless the object has an attribute `done`, which
            decides instead. `None`: an episode is never won.
        final_answer: Whether to add a tool that ends the episode with an answer. TRL ends it with any response that
            calls no tool; in `action_format: tool_calls` this tool does the same.
        expert: Function of a seed that creates a player for demonstrations.
        name: Name of the suite; by default the factory's.
    """

    prompt_template = "tools"

    def __init__(
        self,
        factory: Callable[[], Any],
        rows: Iterable[Mapping[str, Any]] | None = None,
        *,
        reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]] = (),
        iid_rows: Iterable[Mapping[str, Any]] | None = None,
        ood_rows: Iterable[Mapping[str, Any]] | None = None,
        won_score: float | None = 1.0,
        final_answer: bool = False,
        expert: Callable[[int], Expert] | None = None,
        name: str = "",
    ) -> None:
        lists = {"train": [{}] * OWN_TASKS if rows is None else rows, "iid": iid_rows, "ood": ood_rows}
        self.rows: dict[str, Rows] = {split: list(given) for split, given in lists.items() if given is not None}
        self.splits = tuple(self.rows)
        functions = (reward_funcs,) if callable(reward_funcs) or isinstance(reward_funcs, str) else tuple(reward_funcs)
        for function in functions:
            if not callable(function):
                raise EnvError(f"reward_funcs: expected functions, as no reward model is loaded, got {function!r:.100}")
        self.factory, self.reward_funcs = factory, functions
        self.won_score, self.final_answer = won_score, final_answer
        self.name = name or getattr(factory, "__name__", type(factory).__name__)
        self._expert = expert
        self._describe(factory())

    def _describe(self, world: Any) -> None:
        kind = type(world)
        if not any(self.rows["train"]) and "seed" not in inspect.signature(world.reset).parameters:
            warnings.warn(
                f"rows: expected rows, or a parameter `seed` of {kind.__name__}.reset, got neither: all tasks are one "
                "game or, if reset draws it at random, the episodes of a group play different games",
                stacklevel=4,
            )
        if not self.reward_funcs and not callable(getattr(world, "get_reward", None)):
            raise EnvError(f"factory: {kind.__name__} has no get_reward(self); give it one, or give reward functions")
        self.tools = tuple(getattr(kind, name) for name in list_tools(world))
        self.tools += (final_answer,) if self.final_answer else ()
        if not self.tools:
            raise EnvError(f"factory: {kind.__name__} has no tool; add public methods with types and docstrings")
        self._about = " ".join((inspect.getdoc(kind) or "Use the tools.").partition("\n\n")[0].split())

    def task_ids(self, split: str) -> Sequence[str]:
        """Returns the task ids of a split: row numbers."""
        self.check_split(split)
        return [f"{split}/{number}" for number in range(len(self.rows[split]))]

    def content(self, split: str) -> Any:
        """Returns the rows of a task list."""
        return self.rows[split]

    def row(self, task_id: Any) -> Mapping[str, Any]:
        """Returns the row of a task."""
        split, number = split_task_id(task_id, {split: len(rows) for split, rows in self.rows.items()})
        return self.rows[split][number]

    def find_task_text(self, row: Mapping[str, Any]) -> str:
        """Returns the messages of the row's prompt, or the environment's own description."""
        prompt = row.get("prompt") or ""
        messages = [prompt] if isinstance(prompt, str) else [to_text(message["content"], "") for message in prompt]
        return "\n\n".join(filter(None, (text.strip() for text in messages))) or self._about

    def score(self, world: Any, row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> float:
        """Sums the environment's own reward and the reward functions, as TRL does; `None` counts as 0."""
        columns = {name: [value] for name, value in row.items() if name not in ("prompt", "completion")}
        columns |= {"prompts": [row.get("prompt", "")], "completions": [list(messages)], "environments": [world]}
        paid = [awaited(function(**columns))[0] for function in self.reward_funcs]
        if callable(getattr(world, "get_reward", None)):
            paid.append(awaited(world.get_reward()))
        return float(sum(value for value in paid if value is not None))

    def make_env(self) -> ToolEnv:
        """Creates an environment with a fresh object of the factory."""
        return ToolEnv(self)

    def make_expert(self, seed: int = 0) -> Expert:
        """Creates the player for demonstrations, or raises `EnvError` if none was given."""
        return super().make_expert(seed) if self._expert is None else self._expert(seed)


@dataclass
class ToolsArguments:
    """An environment written for TRL's `environment_factory`."""

    MAY_CHANGE: ClassVar[frozenset[str]] = frozenset(["rows", "iid_rows", "ood_rows", "demonstrator"])

    factory: str = option("", "TRL's `environment_factory`, as 'module:Class'.")
    rows: str = option(
        "",
        "Training rows: 'module:name' of a list, a datasets.Dataset or a function that returns one, or a JSONL file. "
        "Without it, the environment makes its tasks itself.",
    )
    iid_rows: str = option("", "Test rows like the training rows.")
    ood_rows: str = option("", "Test rows of another kind.")
    tool_rewards: list[str] | None = option(
        None, "TRL reward functions as 'module:name'; the environment's own `get_reward`, if any, is added."
    )
    won_score: float | None = option(1.0, "Score at which an episode is won; null: never.")
    final_answer: bool = option(False, "Adds a tool `final_answer` that ends the episode, as any text does with TRL.")
    demonstrator: str = option("", "Expert as 'module:Class', for a warm start and `tiny`; created with a seed.")

    def make_suite(self) -> ToolSuite:
        """Creates the task suite."""
        return ToolSuite(
            named_object("factory", self.factory, "'module:Class' of an environment"),
            _rows("rows", self.rows),
            reward_funcs=[named_object("tool_rewards", name, "'module:function'") for name in self.tool_rewards or []],
            iid_rows=_rows("iid_rows", self.iid_rows),
            ood_rows=_rows("ood_rows", self.ood_rows),
            won_score=self.won_score,
            final_answer=self.final_answer,
            expert=named_object("demonstrator", self.demonstrator, "'module:Class'") if self.demonstrator else None,
        )


def _rows(name: str, value: str) -> Rows | None:
    if not value:
        return None
    if value.endswith(".jsonl"):
        try:
            # not splitlines, which also cuts at U+2028 and other characters that a text may contain
            lines = Path(os.path.expanduser(value)).read_text(encoding="utf-8").split("\n")
            found: Any = [json.loads(line) for line in lines if line.strip()]
        except (OSError, ValueError) as error:
            raise EnvError(f"{name}: expected a JSONL file, got {value!r} ({error})") from error
    else:
        found = named_object(name, value, "'module:name', or a JSONL file")
        found = found() if callable(found) else found
    rows = list(found)
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise EnvError(f"{name}: expected rows with named columns, got {value!r}, which holds {rows[:1]!r:.100}")
    return rows
