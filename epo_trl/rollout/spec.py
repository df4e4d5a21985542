"""The options and rules of a rollout, each declared once. The arguments of a command inherit the classes that it uses.

| command | inherits | differs |
|---|---|---|
| train | Response, Episode, Reward | |
| sft | Prompt, Episode | the expert's answers have tags, and no limit |
| evaluate | Response, Protocol | `max_turns` and `context` default to the protocol's |
| play | Response, Protocol | |
| AgentEvol | Response, Episode | `action_format` is always tags |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from epo_trl.bounds import Count, CountOrZero, Finite, NonNegative, OneOf, Range, check_bounds, option, read_mapping
from epo_trl.envs.base import EnvError, TaskSuite
from epo_trl.errors import InputError
from epo_trl.rollout.context import CONTEXTS, ContextBuilder
from epo_trl.rollout.parsing import ActionFormat, TaggedActions
from epo_trl.rollout.templates import FewShot, PromptTemplate
from epo_trl.rollout.tool_calls import ToolCalls
from epo_trl.types import LARGEST_REWARD

ACTION_FORMATS = ("tags", "tool_calls")
INVALID_ACTIONS = ("pass", "skip")
# The engine's own `won`; or that it ended the episode, for whatever reason, with a score above 0 (exploitable).
SUCCESS_RULES = ("won", "ended-with-score")


@dataclass
class FewShotArguments:
    """Options for the examples in front of the first prompt."""

    few_shot: CountOrZero = option(
        0, "Example episodes in the prompt, played by the environment's expert on training tasks."
    )
    few_shot_turns: Count = option(12, "Maximum length of an example in turns; longer training tasks are skipped.")
    few_shot_seed: int = option(0, "Seed for the examples' training tasks and for the expert's choices.")

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass
class PromptArguments(FewShotArguments):
    """Prompts, which have to be the same in warm start, training and evaluation."""

    prompt_template: str = option(
        "", "Name of a template of epo_trl, or a folder with custom text files; by default the environment's."
    )
    max_prompt_length: Count = option(
        2048, "Maximum prompt length of a turn, in tokens; oldest history is dropped first."
    )
    chat_template_kwargs: dict[str, Any] | str | None = option(
        None, "Settings of the chat template, such as '{\"enable_thinking\": false}'."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.chat_template_kwargs = read_mapping("chat_template_kwargs", self.chat_template_kwargs)

    def template_for(self, suite: TaskSuite) -> str:
        """Returns the name or folder of the prompt template."""
        return self.prompt_template or suite.prompt_template

    def build_context(
        self, suite: TaskSuite, tokenizer: Any, shots: FewShot, context: str, history_length: int, **others: Any
    ) -> ContextBuilder:
        """Creates the builder of the prompts; `others` are further arguments of `ContextBuilder`."""
        return ContextBuilder(
            tokenizer,
            PromptTemplate.load(self.template_for(suite)),
            mode=context,
            history_length=history_length,
            max_prompt_tokens=self.max_prompt_length,
            chat_template_kwargs=read_mapping("chat_template_kwargs", self.chat_template_kwargs),
            examples=shots.examples,
            **others,
        )


@dataclass
class ResponseArguments(PromptArguments):
    """Responses of the policy."""

    max_completion_length: Count = option(512, "Maximum response length per turn, in tokens.")
    action_format: Annotated[str, OneOf(ACTION_FORMATS)] = option(
        "tags",
        "Format of the action in a response: 'tags', between <action> and </action>; or, with an environment of "
        "tools, 'tool_calls' in the format of the model's chat template.",
    )
    require_think: bool = option(True, "Whether a response without <think> </think> counts as invalid.")

    def template_for(self, suite: TaskSuite) -> str:
        """Returns the name or folder of the prompt template; tool calls have their own default."""
        calls_tools = self.action_format == "tool_calls" and not self.prompt_template
        return "tool_calls" if calls_tools else super().template_for(suite)

    def build_context(self, suite: TaskSuite, tokenizer: Any, *rules: Any, **others: Any) -> ContextBuilder:
        """Creates the builder of the prompts, with the format and maximum length of responses."""
        actions = action_format(self.action_format, tokenizer, suite.tools, verbatim=suite.verbatim)
        length = self.max_completion_length
        return super().build_context(suite, tokenizer, *rules, actions=actions, max_response_tokens=length, **others)


@dataclass
class EpisodeArguments:
    """Turn limit of an episode, and how much of it the policy sees."""

    context: Annotated[str, OneOf(CONTEXTS)] = option(
        "windowed", "'windowed': each turn is a fresh prompt; 'concatenated': the episode is one sequence."
    )
    history_length: CountOrZero = option(2, "Number of past turns in a windowed prompt.")
    max_turns: Count = option(50, "Maximum number of turns per episode; a longer demonstration is dropped.")


@dataclass
class RewardArguments:
    """Rewards of a turn, and invalid actions.

    If the environment lists no actions, only ill-formed ones can be skipped; the environment judges the others.
    """

    invalid_action: Annotated[str, OneOf(INVALID_ACTIONS)] = option(
        "pass", "'pass' sends an invalid action to the environment; 'skip' only uses up the turn."
    )
    invalid_action_penalty: Annotated[float, Range(0, LARGEST_REWARD)] = option(
        0.1, "Invalid-action penalty: subtracted from the reward of each invalid turn."
    )
    turn_penalty: Annotated[float, Range(0, LARGEST_REWARD)] = option(
        0.0, "Subtracted from the reward of every turn, so that an early success is worth more than a late one."
    )
    success_reward: Annotated[float, Range(-LARGEST_REWARD, LARGEST_REWARD)] = option(
        10.0, "Reward for solving the task."
    )
    env_reward_weight: Finite = option(0.0, "Factor on the environment's own reward, added to every turn's reward.")


@dataclass
class RolloutSettings(RewardArguments):
    """The rules of a rollout; `env_options` are further options for every `reset`."""

    max_turns: Count = EpisodeArguments.max_turns
    require_think: bool = ResponseArguments.require_think
    success_rule: Annotated[str, OneOf(SUCCESS_RULES)] = "won"
    env_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_bounds(self)

    def is_won(self, terminated: bool, truncated: bool, info: Mapping[str, Any]) -> bool:
        """Returns whether an episode is solved, given what the environment returned last."""
        if self.success_rule == "ended-with-score":
            return (terminated or truncated) and info["score"] > 0
        return bool(info["won"]) and terminated

    def reward(self, env_reward: float, *, won: bool, is_valid: bool) -> float:
        """Computes the reward of a turn; `EnvError` if its magnitude exceeds `LARGEST_REWARD`."""
        paid = self.env_reward_weight * env_reward + self.success_reward * won - self.turn_penalty
        paid = paid if is_valid else paid - self.invalid_action_penalty
        if abs(paid) > LARGEST_REWARD:
            raise EnvError(
                f"reward: expected a number from {-LARGEST_REWARD:.0e} to {LARGEST_REWARD:.0e}, beyond which a loss "
                f"may overflow, got {paid!r} (the environment gave {env_reward!r}); lower env_reward_weight"
            )
        return paid


@dataclass
class ProtocolArguments:
    """Protocol of an evaluation, and overrides, which the protocol in the report records."""

    protocol: str = option("", "Name of the protocol; by default the environment's.")
    max_turns: Count | None = option(None, "Overrides the turn limit of the protocol.")
    temperature: NonNegative | None = option(None, "Overrides its sampling temperature.")
    context: Annotated[str, OneOf(CONTEXTS)] | None = option(
        None, "Overrides its context, 'windowed' or 'concatenated'."
    )


def action_format(
    name: str, tokenizer: Any, tools: Sequence[Callable[..., Any]], *, verbatim: bool = False
) -> ActionFormat:
    """Creates the format `"tags"` or `"tool_calls"`, which needs tools; TRL may set `tokenizer.response_template`.

    Tags pass unlisted actions on unchanged if the suite is `verbatim` or has tools.
    """
    if name == "tags":
        return TaggedActions(verbatim=verbatim or bool(tools))
    if not tools:
        raise InputError(f"action_format: expected 'tags' for an environment without tools, got {name!r}")
    return ToolCalls(tokenizer, tools)
