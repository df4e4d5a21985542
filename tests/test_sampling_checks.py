"""What is sampled is what the loss takes it for: settings that would change that in silence are named."""

import copy
import warnings

import pytest
from local_server import LocalServer
from trainer_kit import make_config, make_model, make_trainer


@pytest.mark.parametrize(
    "given",
    [{"temperature": 0.4}, {"max_new_tokens": 99}, {"do_sample": False}, {"n": 2}, {"eos_token_id": 3}, {"logprobs": 5},
     '{"temperature": 0.4}'],
    ids=str,
)  # fmt: skip
def test_generation_settings_that_go_round_ours_are_refused(tmp_path, given):
    with pytest.raises(ValueError, match="generation_kwargs: expected no (temperature|max_new_t|do_s|n|eos|logprobs)"):
        make_config(tmp_path, generation_kwargs=given)


def test_other_generation_settings_pass(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_config(tmp_path, generation_kwargs={"use_cache": False, "no_repeat_ngram_size": 0})
        make_config(tmp_path, top_k=-1, min_p=0.0, top_p=1.0)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"top_k": 50}, "top_k"),
        ({"top_p": 0.9, "min_p": 0.1}, "top_p, min_p"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"vllm_structured_outputs_regex": "a+"}, "vllm_structured_outputs_regex"),
        ({"top_k": 5, "generation_kwargs": {"use_cache": False, "typical_p": 0.5}}, "top_k, typical_p"),
        ({"use_vllm": True, "generation_kwargs": {"presence_penalty": 1.5}}, "presence_penalty"),
    ],
)
def test_sampling_from_a_part_of_the_distribution_warns(tmp_path, changes, names):
    with pytest.warns(UserWarning, match=f"^{names}: expected the defaults, .*tokens that cannot be sampled"):
        make_config(tmp_path, **changes)


def first_tokens(trainer):
    with trainer.engine.rollout(trainer.rules.context, 64):
        responses, _ = trainer.engine._generate_turn([[5, 6, 7]] * 64)
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
    with trainer.engine.sampling(1.0, 0):
        assert len(first_tokens(trainer)) > 10
    assert len(first_tokens(trainer)) < 3, "training samples as the run says"
    assert trainer.generation_config == config and trainer.generation_kwargs["typical_p"] == 0.01


def test_an_evaluation_with_vllm_leaves_out_what_narrows_its_distribution(tmp_path):
    trainer = make_trainer(tmp_path)
    given = {"logit_bias": {3: -100}, "detokenize": False}
    trainer.use_vllm, trainer.vllm_generation = True, LocalServer(trainer)
    trainer.vllm_generation.generation_kwargs, trainer.args.generation_kwargs = given, given
    trainer.vllm_generation.structured_outputs_regex = "a+"
    with trainer.engine.sampling(1.0, 0):
        assert trainer.vllm_generation.generation_kwargs == {"detokenize": False}
        assert trainer.vllm_generation.structured_outputs_regex is None
    assert trainer.vllm_generation.generation_kwargs == given
    assert trainer.vllm_generation.structured_outputs_regex == "a+"
