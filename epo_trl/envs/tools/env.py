"""One environment of TRL's `environment_factory` as a text game: an action is a tool call."""

from __future__ import annotations

import copy
import inspect
import random
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from epo_trl.envs.base import NOT_RUNNING, EnvError, Info, TextEnv, submit
from epo_trl.envs.border import FINAL_ANSWER, reaches
from epo_trl.envs.tools.tool import Refusal, Tool, read_call
from epo_trl.errors import one_line

if TYPE_CHECKING:
    from epo_trl.envs.tools.suite import ToolSuite

NOTHING_YET = "Nothing has happened yet."
_NO_TOOLS = ("reset", "get_reward")


def final_answer(answer: str) -> str:
    """Ends the episode with an answer.

    Args:
        answer: The answer to the task.
    """
    return "The episode is over."


def list_tools(world: Any) -> tuple[str, ...]:
    """Returns the names of an object's tools by TRL's rule: all public methods except `reset` and `get_reward`."""
    methods = (name for name, _ in inspect.getmembers(type(world), predicate=inspect.isfunction))
    return tuple(name for name in methods if not name.startswith("_") and name not in _NO_TOOLS)


class ToolEnv(TextEnv):
    """Plays the tasks of a `ToolSuite` with one object of its factory. `info["tools"]` describes the tools."""

    def __init__(self, suite: ToolSuite) -> None:
        self.suite, self.world = suite, suite.factory()
        self._functions = {name: getattr(self.world, name) for name in list_tools(self.world)}
        if suite.final_answer:
            self._functions[FINAL_ANSWER] = final_answer
        self.tools = {name: Tool.of(function) for name, function in self._functions.items()}
        self._row: Mapping[str, Any] | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Calls the object's `reset` with the row of a task, as TRL does, and returns its observation.

        A `reset` with a parameter `seed` also gets one: a function of the episode's seed and the task's id, since a
        trainer resets all tasks with the same seed.
        """
        row = copy.deepcopy(dict(self.suite.row((options or {}).get("task_id"))))
        self._row, self._messages, self._paid, self._answered = row, list[dict[str, Any]](), 0.0, False
        takes_seed = seed is not None and "seed" in inspect.signature(self.world.reset).parameters
        own_seed = random.Random(f"{seed} {options and options.get('task_id')}").randrange(2**31)
        observation = self.world.reset(**{"seed": own_seed, **row} if takes_seed else row)
        return to_text(awaited(observation), NOTHING_YET), self._info(won=False, refusal="")

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Calls a tool. The reward is the increase of the score, so an episode's rewards sum to its last score.

        The score is the sum of `get_reward()` and the reward functions after the call.
        """
        if self._row is None:
            raise EnvError(NOT_RUNNING)
        try:
            observation, refusal = self._call(action), ""
        except Refusal as error:
            observation, refusal = f"Error: {error}", str(error)
            if self._messages[-1]["role"] == "tool":
                self._messages[-1]["content"] = observation
        score = self.suite.score(self.world, self._row, self._messages)
        reward, self._paid = score - self._paid, score
        reached = reaches(score, self.suite.won_score)
        done = getattr(self.world, "done", None)
        over = self._answered or (reached if done is None or callable(done) else bool(done))
        info = self._info(won=over and reached, refusal=refusal)
        if over:
            self._row = None
        return observation, reward, over, False, info

    def _call(self, action: str) -> str:
        """Calls a tool and returns its result; records the messages that reward functions get."""
        message: dict[str, Any] = {"role": "assistant", "content": action}
        self._messages.append(message)
        name, arguments = read_call(action)
        call = {"name": name, "arguments": arguments}
        message |= {"content": "", "tool_calls": [{"type": "function", "function": call}]}
        answer = {"role": "tool", "name": name, "content": ""}
        self._messages.append(answer)
        if name not in self.tools:
            raise Refusal(f"there is no tool of this name; there are {', '.join(self.tools)}")
        call["arguments"] = arguments = self.tools[name].checked(arguments)
        answer["content"] = to_text(self._result(name, arguments), "(nothing)")
        self._answered = self.suite.final_answer and name == FINAL_ANSWER
        return answer["content"]

    def _result(self, name: str, arguments: dict[str, Any]) -> Any:
        try:
            return awaited(self._functions[name](**arguments))
        except OSError:  # a connection or a file is gone: not the agent's fault
            raise
        except Exception as error:
            if not isinstance(error, ValueError):
                warnings.warn(
                    f"the tool {name!r} raised {type(error).__name__}: {one_line(error)}. The agent sees this, as with "
                    "TRL; a tool that rejects a call on purpose raises ValueError",
                    stacklevel=2,
                )
            raise Refusal(str(error).strip() or type(error).__name__) from error

    def _info(self, *, won: bool, refusal: str) -> Info:
        assert self._row is not None
        return {
            "admissible_actions": None,
            "accepted": not refusal,
            "refusal": refusal,
            "won": won,
            "task": self.suite.find_task_text(self._row),
            "task_type": str(self._row.get("task_type") or self.suite.name),
            "score": self._paid,
            "tools": tuple(tool.text for tool in self.tools.values()),
        }


def awaited(result: Any) -> Any:
    """Returns a result, after waiting for it if the function is asynchronous."""
    return submit(result).result() if inspect.iscoroutine(result) else result


def to_text(content: Any, empty: str) -> str:
    """Converts a tool's or a message's content to text, joining the texts of content blocks; `empty` if it is blank."""
    if isinstance(content, list) and content and all(isinstance(block, dict) and "type" in block for block in content):
        other = [block["type"] for block in content if block["type"] != "text"]
        if other:
            raise EnvError(f"expected text blocks from the environment, got a block of type {other[0]!r}")
        content = "\n".join(block["text"] for block in content)
    text = "" if content is None else str(content)
    return text if text.strip() else empty
