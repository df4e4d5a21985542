"""Builds the rules of training and evaluation episodes from the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from epo_trl.envs.base import TaskSuite
from epo_trl.evaluation import Protocol, get_protocol
from epo_trl.evaluation.play import protocol_context, protocol_settings
from epo_trl.rollout import ContextBuilder, RolloutSettings
from epo_trl.rollout.spec import copy_options
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
    protocol = (
        get_protocol(args.protocol)
        if args.protocol
        else Protocol.from_options(
            f"{suite.name}-{args.max_turns}turns", args, args.eval_temperature, invalid_action=args.invalid_action
        )
    )
    shots = args.few_shot_of(suite, protocol.env_options)
    protocol = protocol.varied(few_shot=shots.label)
    return RolloutRules(
        args.build_context(suite, tokenizer, shots, args.context, args.history_length),
        copy_options(RolloutSettings, args, env_options=env_options or {}),
        protocol,
        protocol_context(protocol, args, suite, tokenizer, shots),
        protocol_settings(protocol, require_think=args.require_think),
    )
