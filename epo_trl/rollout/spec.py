"""The options of a rollout, each declared once. The arguments of a command inherit the classes that it uses.

| command | inherits | differs |
|---|---|---|
| train | Response, Episode, `RewardArguments` of rules.py | |
| sft | Prompt, Episode | the expert's answers have tags, and no limit |
| evaluate | Response, Protocol | `max_turns` and `context` default to the protocol's |
| play | Response, Protocol | `prompt_template` defaults to the environment's |
| AgentEvol | Response, Episode | `action_format` is always tags |
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeVar

from epo_trl.bounds import Count, CountOrZero, NonNegative, OneOf, option
from epo_trl.envs.base import TaskSuite
from epo_trl.rollout.chat_frame import template_settings
from epo_trl.rollout.context import CONTEXTS, ContextBuilder
from epo_trl.rollout.few_shot import FewShot, FewShotArguments
from epo_trl.rollout.templates import PromptTemplate
from epo_trl.rollout.tool_calls import ACTION_FORMATS, action_format

T = TypeVar("T")


@dataclass
class PromptArguments(FewShotArguments):
    """Prompts, which have to be the same in warm start, training and evaluation."""

    prompt_template: str = option("alfworld", "Name of a template of epo_trl, or a folder with custom text files.")
    max_prompt_length: Count = option(
        2048, "Maximum prompt length of a turn, in tokens; oldest history is dropped first."
    )
    chat_template_kwargs: dict[str, Any] | str | None = option(
        None, "Settings of the chat template, such as '{\"enable_thinking\": false}'."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.chat_template_kwargs = template_settings(self.chat_template_kwargs)

    def build_context(
        self, suite: TaskSuite, tokenizer: Any, shots: FewShot, context: str, history_length: int, **response: Any
    ) -> ContextBuilder:
        """Creates the builder of the prompts.

        Args:
            suite: The tasks.
            tokenizer: Tokenizer of the policy.
            shots: Example episodes before the first prompt.
            context: `"windowed"` or `"concatenated"`.
            history_length: Number of past turns in a windowed prompt.
            **response: Further arguments of `ContextBuilder`: limits and format of the responses.
        """
        return ContextBuilder(
            tokenizer,
            PromptTemplate.load(self.prompt_template),
            mode=context,
            history_length=history_length,
            max_prompt_tokens=self.max_prompt_length,
            chat_template_kwargs=template_settings(self.chat_template_kwargs),
            examples=shots.examples,
            **response,
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

    def build_context(
        self, suite: TaskSuite, tokenizer: Any, shots: FewShot, context: str, history_length: int, **response: Any
    ) -> ContextBuilder:
        """Creates the builder of the prompts; see `PromptArguments.build_context`."""
        response["actions"] = action_format(self.action_format, tokenizer, suite.tools, verbatim=suite.verbatim)
        response["max_response_tokens"] = self.max_completion_length
        return super().build_context(suite, tokenizer, shots, context, history_length, **response)


@dataclass
class EpisodeArguments:
    """Turn limit of an episode, and how much of it the policy sees."""

    context: Annotated[str, OneOf(CONTEXTS)] = option(
        "windowed", "'windowed': each turn is a fresh prompt; 'concatenated': the episode is one sequence."
    )
    history_length: CountOrZero = option(2, "Number of past turns in a windowed prompt.")
    max_turns: Count = option(50, "Maximum number of turns per episode; a longer demonstration is dropped.")


@dataclass
class ProtocolArguments:
    """Protocol of an evaluation, and overrides, which the protocol in the report records."""

    protocol: str = option("", "Name of the protocol; by default that of the environment, if it has one.")
    max_turns: Count | None = option(None, "Overrides the turn limit of the protocol.")
    temperature: NonNegative | None = option(None, "Overrides its sampling temperature.")
    context: Annotated[str, OneOf(CONTEXTS)] | None = option(
        None, "Overrides its context, 'windowed' or 'concatenated'."
    )


def copy_options(kind: type[T], options: Any, **others: Any) -> T:
    """Creates an object of another dataclass with the values of the fields that both have.

    Args:
        kind: Dataclass of the result.
        options: Dataclass object to copy from.
        **others: Values of the other fields, or of those that differ.
    """
    own = {entry.name for entry in fields(options)}
    shared = {entry.name for entry in fields(kind) if entry.name in own}  # type: ignore[arg-type]
    return kind(**{name: getattr(options, name) for name in shared} | others)
