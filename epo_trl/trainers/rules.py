"""Builds the rules of training and evaluation episodes from the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from epo_trl.envs.base import TaskSuite
from epo_trl.evaluation import Protocol, get_protocol
from epo_trl.evaluation.play import protocol_context, protocol_settings
from epo_trl.rollout import ContextBuilder, PromptTemplate, RolloutSettings
from epo_trl.rollout.tool_calls import action_format
from epo_trl.trainers.config import EPOConfig


@dataclass(frozen=True, slots=True)
class RolloutRules:
    """Rules of an episode.

    Args:
        context: Builder of the training prompts.
        settings: Turn limit and rewards of training.
        protocol: Evaluation protocol.
        eval_context: Builder of the protocol's prompts.
        eval_settings: Turn limit of the protocol.
    """

    context: ContextBuilder
    settings: RolloutSettings
    protocol: Protocol
    eval_context: ContextBuilder
    eval_settings: RolloutSettings

    def set_model_limits(self, max_context_tokens: int | None, end_ids: Sequence[int]) -> None:
        """Sets the maximum sequence length of the model and the tokens that end a response."""
        for context in (self.context, self.eval_context):
            context.max_context_tokens, context.end_ids = max_context_tokens, end_ids


def build_rules(
    args: EPOConfig, suite: TaskSuite, tokenizer: Any, env_options: Mapping[str, Any] | None = None
) -> RolloutRules:
    """Builds the rules of a configuration. Without a protocol, evaluation uses the rules of training.

    Few-shot examples (`few_shot`) are the same in both, and the protocol's name identifies them.

    Args:
        args: Configuration of the trainer.
        suite: The tasks. The suite's expert plays the few-shot examples.
        tokenizer: The policy's tokenizer.
        env_options: Options for every `reset` in training.
    """
    protocol = get_protocol(args.protocol) if args.protocol else _default_protocol(args, suite.name)
    shots = args.few_shot_of(suite, protocol.env_options)
    protocol = protocol.varied(few_shot=shots.label)
    actions = action_format(args.action_format, tokenizer, suite.tools, verbatim=suite.verbatim)
    context = ContextBuilder(
        tokenizer,
        PromptTemplate.load(args.prompt_template),
        mode=args.context,
        history_length=args.history_length,
        max_prompt_tokens=args.max_prompt_length,
        max_response_tokens=args.max_completion_length,
        chat_template_kwargs=args.chat_template_kwargs or {},
        examples=shots.examples,
        actions=actions,
    )
    settings = RolloutSettings(
        max_turns=args.max_turns,
        success_reward=args.success_reward,
        invalid_action_penalty=args.invalid_action_penalty,
        env_reward_weight=args.env_reward_weight,
        invalid_action=args.invalid_action,
        require_think=args.require_think,
        env_options=env_options or {},
    )
    eval_context = protocol_context(
        protocol,
        tokenizer,
        args.prompt_template,
        max_prompt_tokens=args.max_prompt_length,
        max_response_tokens=args.max_completion_length,
        chat_template_kwargs=args.chat_template_kwargs,
        examples=shots.examples,
        actions=actions,
    )
    eval_settings = protocol_settings(protocol, require_think=args.require_think)
    return RolloutRules(context, settings, protocol, eval_context, eval_settings)


def _default_protocol(args: EPOConfig, suite_name: str) -> Protocol:
    return Protocol(
        name=f"{suite_name}-{args.max_turns}turns",
        max_turns=args.max_turns,
        history_length=args.history_length,
        temperature=args.eval_temperature,
        invalid_action=args.invalid_action,
        context=args.context,
    )
