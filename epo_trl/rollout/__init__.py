"""Rollouts: play episodes with a policy and environments, and turn them into rows of a batch."""

from epo_trl.rollout.context import ChatTemplateError, ContextBuilder
from epo_trl.rollout.engine import Engine, EngineError, InStep, Response
from epo_trl.rollout.loop import RolloutTimes, finished_episodes, play_episodes
from epo_trl.rollout.parsing import ParsedResponse, parse_response
from epo_trl.rollout.rows import Row, episode_to_row
from epo_trl.rollout.spec import RolloutSettings
from epo_trl.rollout.templates import PromptTemplate, TemplateError

__all__ = [
    "ChatTemplateError",
    "ContextBuilder",
    "Engine",
    "EngineError",
    "InStep",
    "ParsedResponse",
    "PromptTemplate",
    "Response",
    "RolloutSettings",
    "RolloutTimes",
    "Row",
    "TemplateError",
    "episode_to_row",
    "finished_episodes",
    "parse_response",
    "play_episodes",
]
