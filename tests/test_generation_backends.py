"""The rollout only knows TRL's seam `_generate_single_turn`; what is behind it can be swapped."""

import pytest
import torch
from peft import LoraConfig
from trainer_kit import make_model, make_ppo, make_trainer

CONTINUOUS = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"num_blocks": 64, "page_size": 32, "max_batch_tokens": 512},
}


@pytest.mark.slow
def test_continuous_batching_answers_each_prompt_as_plain_generate_does(tmp_path):
    """At a temperature near zero both decode greedily, so the answers must agree, prompt by prompt."""
    answers = []
    for backend in ({}, CONTINUOUS):
        trainer = make_trainer(tmp_path, temperature=1e-4, **backend)
        prompts = [[5 + i, 9, 11 + 2 * i, *range(20, 20 + i)] for i in range(7)]
        answers.append(trainer._generate_single_turn(prompts, None, {}, 1)[0])
    assert answers[0] == answers[1]
    assert len({tuple(answer) for answer in answers[0]}) > 1  # the order could not be told otherwise


@pytest.mark.slow
@pytest.mark.parametrize("context", ["windowed", "concatenated"])
def test_rl_steps_and_greedy_evaluations_run_on_continuous_batching(tmp_path, context):
    """An evaluation before the logging step leaves what is to be logged of training where it is."""
    often = {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "eval_temperature": 0.0}
    trainer = make_trainer(tmp_path, max_steps=2, context=context, **often, **CONTINUOUS)
    trainer.train()
    first, trained, second = trainer.state.log_history[:3]
    assert trainer.rl_step == 2 and trained["step"] == 2 and trained["env/turns"] == 3.0
    for evaluated in (first, second):
        assert "eval_iid/success_rate" in evaluated and "env/turns" not in evaluated


@pytest.mark.slow
def test_continuous_batching_leaves_a_critic_its_precision(tmp_path):
    """TRL casts the policy to that of the run, and what is a part of it too; the critic is trained in float32."""
    trainer = make_ppo(tmp_path, bf16=True, **CONTINUOUS)
    trainer.play([("train/0", 0)])
    assert {p.dtype for p in trainer.critic.parameters()} == {torch.float32}
    assert trainer.critic in trainer.model.modules()


@pytest.mark.parametrize("wrapped", [{}, {"peft_config": LoraConfig(target_modules="all-linear")}])
@pytest.mark.parametrize("waves", [1, 2])
def test_a_rollout_of_concatenated_turns_is_the_same_without_what_was_kept(tmp_path, monkeypatch, wrapped, waves):
    from epo_trl.trainers import generation

    episodes, caches = [], []
    reuse = generation.reusing_prefixes
    monkeypatch.setattr(generation, "reusing_prefixes", lambda *args: caches.append(reuse(*args)) or caches[-1])
    for can_reuse in (generation.can_reuse, lambda model: False):
        monkeypatch.setattr(generation, "can_reuse", can_reuse)
        trainer = make_trainer(
            tmp_path,
            context="concatenated",
            max_turns=4,
            rollout_waves=waves,
            model=make_model(sharpness=4.0),
            **wrapped,
        )
        torch.manual_seed(0)
        episodes.append(trainer.play([(f"train/{i % 3}", 0) for i in range(6)]))
    assert len(caches) == 1 and episodes[0] == episodes[1]
    assert len({len(turn.response_ids) for episode in episodes[0] for turn in episode.turns}) > 1


@pytest.mark.parametrize("changes", [{"generation_kwargs": {"use_cache": False}}, {"cache_implementation": "static"}])
def test_concatenated_turns_are_played_with_another_cache_or_none(tmp_path, changes):
    episodes = []
    for settings in ({}, changes):
        model = make_model(sharpness=4.0)
        trainer = make_trainer(tmp_path, context="concatenated", max_turns=3, model=model, **settings)
        torch.manual_seed(0)
        episodes.append(trainer.play([(f"train/{i}", 0) for i in range(3)]))
    assert episodes[0] == episodes[1]


class SleepingEngine:
    """Writes down what is asked of it. `make test-vllm` has the real one."""

    enable_sleep_mode = _llm_weights_sleeping = True

    def __init__(self):
        self.asked = []
        self.llm = self

    def sync_weights(self):
        self.asked.append("sync")

    def wake_up(self, tags):
        self.asked += tags

    def sleep(self, level):
        self.asked.append(f"sleep {level}")


@pytest.mark.parametrize("loaded", [False, True], ids=["asleep", "awake and loaded by TRL"])
def test_a_sleeping_engine_is_awake_for_a_rollout_and_sleeps_again_even_after_an_error(tmp_path, loaded):
    trainer = make_trainer(tmp_path)
    trainer.vllm_generation = engine = SleepingEngine()
    trainer.use_vllm, trainer._last_loaded_step, engine._llm_weights_sleeping = True, 0, not loaded
    with pytest.raises(KeyError), trainer.player.generator.keeping_prefixes(trainer.rules.context):
        assert not engine.enable_sleep_mode
        raise KeyError
    assert engine.asked == [*["sync"] * (not loaded), "kv_cache", "sleep 2"]
    assert engine.enable_sleep_mode and engine._llm_weights_sleeping


def test_a_server_is_left_to_itself_whatever_the_settings_say_about_sleep(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.vllm_generation = engine = SleepingEngine()
    trainer.use_vllm, trainer.vllm_mode = True, "server"
    with trainer.player.generator.keeping_prefixes(trainer.rules.context):
        assert engine.enable_sleep_mode and not engine.asked
    assert not engine.asked
