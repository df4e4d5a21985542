"""What is sampled is what the loss takes it for: settings that would change that in silence are named."""

import copy
import warnings

import pytest
from local_server import LocalServer
from rollout_parts import QWEN, byte_tokenizer, context_of
from trainer_kit import make_config, make_model, make_trainer
from transformers import LlamaConfig

from epo_trl.trainers.checks import check_context_fits
from epo_trl.trainers.sampling_checks import check_sampling, warn_empty_thought

# Qwen3 with thinking turned off, GLM and Nemotron
EMPTY = ("<think>\n\n</think>\n\n", "<think></think>", "\n<think></think>\n")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": 0.4}, "got temperature=0.4. .*temperature .1.0.*Set temperature instead"),
        ({"top_k": 50}, "got top_k=50.*Set top_k instead"),
        ({"cache_implementation": "static"}, "Set cache_implementation instead"),
        ({"max_new_tokens": 99}, "got max_new_tokens=99. .*max_completion_length .16.*Set max_completion_length"),
        ({"max_tokens": 99}, "Set max_completion_length instead"),
        ({"do_sample": False}, "expected no do_sample, got do_sample=False. The loss is that of one sampled response"),
        ({"num_return_sequences": 2}, "expected no num_return_sequences"),
        ({"n": 2}, "expected no n, "),
        ({"eos_token_id": 3}, "expected no eos_token_id"),
        ({"seed": 5}, "expected no seed, got seed=5. vLLM would .*same response.*Set seed, or request_seeds"),
        ({"logprobs": 5}, "expected no logprobs, got logprobs=5. .*another token"),
        ('{"temperature": 0.4}', "got temperature=0.4"),  # as on a command line
    ],
)
def test_generation_settings_that_go_round_ours_are_refused(tmp_path, given, message):
    with pytest.raises(ValueError, match=f"generation_kwargs: .*{message}"):
        check_sampling(make_config(tmp_path, max_completion_length=16, generation_kwargs=given))


def test_other_generation_settings_pass(tmp_path):
    given = {"use_cache": False, "temperature": 1.0, "max_new_tokens": 16, "do_sample": True, "no_repeat_ngram_size": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_sampling(make_config(tmp_path, max_completion_length=16, generation_kwargs=given))
        check_sampling(make_config(tmp_path, top_k=-1, min_p=0.0, top_p=1.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 50}, "top_k: got 50, .*tokens that cannot be sampled. .*set top_k=0$"),
        ({"top_p": 0.9, "min_p": 0.1}, "top_p, min_p: got 0.9, 0.1, .*set top_p=1.0, min_p=None$"),
        ({"repetition_penalty": 1.1}, "repetition_penalty: got 1.1, .*set repetition_penalty=1.0$"),
        ({"vllm_structured_outputs_regex": "a+"}, "vllm_structured_outputs_regex: got a.*_regex=None$"),
        (
            {"top_k": 50, "generation_kwargs": {"use_cache": False, "typical_p": 0.5, "min_new_tokens": 2}},
            "top_k, typical_p, min_new_tokens: got 50, 0.5, 2, .*set top_k=0 and remove typical_p, min_new_tok",
        ),
        ({"generation_kwargs": {"bad_words_ids": [[3]]}}, "bad_words_ids: .*training, remove bad_words_ids from gener"),
        ({"use_vllm": True, "generation_kwargs": {"presence_penalty": 1.5}}, "presence_penalty: got 1.5, .*remove pre"),
    ],
)
def test_sampling_from_a_part_of_the_distribution_warns(tmp_path, changes, message):
    with pytest.warns(UserWarning, match=message):
        check_sampling(make_config(tmp_path, **changes))


@pytest.mark.parametrize("empty", EMPTY)
def test_a_template_that_closes_the_reasoning_itself_warns_where_reasoning_is_required(tmp_path, empty):
    required, not_required = (make_config(tmp_path, require_think=value) for value in (True, False))
    tokenizer = byte_tokenizer(QWEN + "{% if add_generation_prompt and not enable_thinking %}" + empty + "{% endif %}")
    closed, open_ = (context_of(tokenizer, chat_template_kwargs={"enable_thinking": on}) for on in (False, True))
    with pytest.warns(UserWarning, match=r"require_think: .*empty <think> </think>.*Set require_think=False, or"):
        warn_empty_thought(required, closed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_empty_thought(not_required, closed)
        warn_empty_thought(required, open_)


def first_tokens(trainer):
    with trainer.player.engine.rollout(trainer.rules.context, 64):
        responses, _ = trainer.player.engine._generate_turn([[5, 6, 7]] * 64)
    return {response[0] for response in responses}


def test_a_rollout_ignores_the_sampling_settings_of_the_checkpoint(tmp_path):
    """With min_p 1 only the most probable token is left."""
    model = make_model()
    model.generation_config.min_p = 1.0
    trainer = make_trainer(tmp_path, model=model)
    assert len(first_tokens(trainer)) > 10
    assert model.generation_config.min_p == 1.0, "the checkpoint keeps its own"


@pytest.mark.filterwarnings("ignore:typical_p")
def test_an_evaluation_samples_from_the_full_distribution(tmp_path):
    trainer = make_trainer(tmp_path, model=make_model(), generation_kwargs={"typical_p": 0.01})
    config = copy.deepcopy(trainer.generation_config)
    with trainer.player.engine.sampling(1.0, 0):
        assert len(first_tokens(trainer)) > 10
    assert len(first_tokens(trainer)) < 3, "training samples as the run says"
    assert trainer.generation_config == config and trainer.generation_kwargs["typical_p"] == 0.01


def test_an_evaluation_with_vllm_leaves_out_what_narrows_its_distribution(tmp_path):
    trainer = make_trainer(tmp_path)
    given = {"logit_bias": {3: -100}, "detokenize": False}
    trainer.use_vllm, trainer.vllm_generation = True, LocalServer(trainer)
    trainer.vllm_generation.generation_kwargs, trainer.args.generation_kwargs = given, given
    trainer.vllm_generation.structured_outputs_regex = "a+"
    with trainer.player.engine.sampling(1.0, 0):
        assert trainer.vllm_generation.generation_kwargs == {"detokenize": False}
        assert trainer.vllm_generation.structured_outputs_regex is None
    assert trainer.vllm_generation.generation_kwargs == given
    assert trainer.vllm_generation.structured_outputs_regex == "a+"


@pytest.mark.parametrize(
    ("context", "limit", "start", "longest"),
    [
        ("windowed", 100, 16, None),
        ("windowed", 100, 15, 16),
        ("concatenated", 100, 64, None),
        ("concatenated", 100, 63, 64),  # 4 turns of 10 + 6 tokens
        ("concatenated", 50, 49, 50),
    ],
)
def test_sequences_that_longrope_scales_in_two_ways_warn(tmp_path, context, limit, start, longest):
    args = make_config(tmp_path, max_turns=4)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": start,
            "short_factor": [1.0], "long_factor": [2.0]}  # fmt: skip
    config = LlamaConfig(hidden_size=4, num_attention_heads=2, max_position_embeddings=limit, rope_parameters=rope)
    prompts = context_of(byte_tokenizer(), context, max_prompt_tokens=10, max_response_tokens=6)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        assert check_context_fits(args, prompts, config) == limit
    assert [str(one.message).partition(". ")[0] for one in given] == [
        f"max_prompt_length, max_completion_length: expected at most original_max_position_embeddings = {start} tokens "
        f"in a sequence of this LongRoPE model, got up to {longest}"
    ] * (longest is not None)


def test_a_trainer_makes_these_checks(tmp_path, monkeypatch):
    from epo_trl.trainers import setup

    called = []
    monkeypatch.setattr(setup, "warn_empty_thought", lambda args, context: called.append((args, context)))
    trainer = make_trainer(tmp_path)
    assert called == [(trainer.args, trainer.rules.context)]
    assert trainer.rules.context.end_ids == trainer.rules.eval_context.end_ids == trainer.eos_token_ids
    with pytest.raises(ValueError, match="generation_kwargs: .*got temperature=0"):
        make_trainer(tmp_path, generation_kwargs={"temperature": 0.0})
