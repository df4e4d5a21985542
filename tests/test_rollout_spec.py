"""A rollout option is declared once, and every command reads it in the same way."""

import ast
from dataclasses import fields
from pathlib import Path

import pytest
from rollout_parts import byte_tokenizer
from trainer_kit import make_config

from epo_trl.cli.evaluation import EvaluationArguments
from epo_trl.cli.imitation import DemonstrationArguments
from epo_trl.envs.toy import ToySuite
from epo_trl.evaluation import Protocol
from epo_trl.evaluation.play import protocol_context, protocol_settings
from epo_trl.rollout import RolloutSettings
from epo_trl.rollout.spec import EpisodeArguments, ResponseArguments, RewardArguments
from epo_trl.rollout.templates import FewShot
from epo_trl.trainers.setup import build_rules

ROOT = Path(__file__).parents[1]
# The only classes that declare an option again, with another default or meaning.
AGAIN = {
    "ProtocolArguments": {"max_turns", "context"},
    "EvolutionArguments": {"action_format"}, "ServeArguments": {"max_turns"},
}  # fmt: skip


def test_an_option_is_declared_in_one_class():
    own = {ResponseArguments, *ResponseArguments.__mro__, EpisodeArguments, RewardArguments}
    names = {entry.name for kind in (ResponseArguments, EpisodeArguments, RewardArguments) for entry in fields(kind)}
    again = {}
    for path in (*ROOT.glob("epo_trl/**/*.py"), *ROOT.glob("recipes/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name.endswith(("Arguments", "Config")):
                declared = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign)}
                if declared & names and node.name not in {kind.__name__ for kind in own}:
                    again[node.name] = declared & names
    assert again == AGAIN


@pytest.mark.parametrize("context", ["windowed", "concatenated"])
def test_training_warm_start_and_evaluation_build_the_same_prompts(tmp_path, context):
    suite, tokenizer = ToySuite(), byte_tokenizer()
    prompts = {"prompt_template": "general", "max_prompt_length": 777, "chat_template_kwargs": {"enable_thinking": 0}}
    episode = {"context": context, "history_length": 3, "max_turns": 7}
    rules = build_rules(make_config(tmp_path, max_completion_length=33, **prompts, **episode), suite, tokenizer)
    shown = DemonstrationArguments(**prompts, **episode)
    warm_start = shown.build_context(suite, tokenizer, FewShot(), shown.context, shown.history_length)
    protocol = Protocol(name="p", temperature=0.5, **episode)
    evaluation = protocol_context(protocol, EvaluationArguments(**prompts), suite, tokenizer)
    assert rules.context == rules.eval_context
    for builder, longest in ((rules.context, 33), (warm_start, 0), (evaluation, 512)):
        found = builder.mode, builder.history_length, builder.max_prompt_tokens, builder.max_response_tokens
        assert found == (context, 3, 777, longest) and builder.template.name == "general"
        assert builder.chat_template_kwargs == {"enable_thinking": 0}
    assert (protocol.max_turns, protocol.temperature, rules.protocol.max_turns) == (7, 0.5, 7)


def test_rules_are_those_of_the_options_and_of_the_protocol(tmp_path):
    rewards = {
        "invalid_action": "skip",
        "invalid_action_penalty": 0.25,
        "turn_penalty": 0.125,
        "success_reward": 3.0,
        "env_reward_weight": 0.5,
    }
    args = make_config(tmp_path, max_turns=7, require_think=False, **rewards)
    settings = build_rules(args, ToySuite(), byte_tokenizer(), {"state_key": True}).settings
    assert settings == RolloutSettings(max_turns=7, require_think=False, env_options={"state_key": True}, **rewards)
    assert settings.reward(2.0, won=True, is_valid=False) == 0.5 * 2.0 + 3.0 - 0.25 - 0.125
    assert settings.reward(0.0, won=False, is_valid=True) == -0.125
    protocol = Protocol(
        name="p", max_turns=9, history_length=1, temperature=0, success_rule="ended-with-score", env_options={"a": 1}
    )
    assert protocol_settings(protocol, require_think=False) == RolloutSettings(
        max_turns=9, require_think=False, success_rule="ended-with-score", env_options={"a": 1}
    )
