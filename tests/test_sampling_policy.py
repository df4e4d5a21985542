"""A policy outside of a trainer samples from the whole distribution, whatever its checkpoint says of sampling."""

import pytest
import torch
from trainer_kit import make_model, toy_tokenizer
from transformers import GenerationConfig

from epo_trl.models.generate import SamplingPolicy

# As checkpoints of chat models have it.
OWN = {"do_sample": True, "temperature": 0.7, "top_p": 0.5, "top_k": 2, "repetition_penalty": 1.5, "min_new_tokens": 9}
PROMPTS = [[5, 6, 7, 5, 6, 7], [9]]


def policies(temperature):
    """Returns the same policy twice; the checkpoint of the second has settings of its own."""
    tokenizer, made = toy_tokenizer(), []
    for own in ({}, OWN):
        model = make_model(seed=1, sharpness=2.0)
        model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, **own)
        made.append(SamplingPolicy(model, tokenizer, max_new_tokens=30, temperature=temperature, seed=3))
    return made


@pytest.mark.parametrize("temperature", [1.0, 0.4, 0.0])
def test_what_a_checkpoint_says_of_sampling_changes_nothing(temperature):
    plain, other = policies(temperature)
    assert plain(PROMPTS) == other(PROMPTS)
    assert other.model.generation_config.top_p == OWN["top_p"]  # the model is as it was


@pytest.mark.parametrize("own", [{}, OWN])
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_reused_prefixes_give_the_same_responses(temperature, own):
    """Of five turns the first alone is run whole, by each seeded copy; the checkpoint's own sampling is in no way."""
    tokenizer, played, widths = toy_tokenizer(), [], []
    for reuse in (False, True):
        model = make_model(seed=1, sharpness=4.0)
        model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, **own)
        policy = SamplingPolicy(
            model, tokenizer, max_new_tokens=8, temperature=temperature, seed=3, reuse_prefixes=reuse
        )
        for one in (policy, policy.seeded(4)):
            prompts, said = [[5, 6, 7, 5, 6, 7], [9]], []
            handle = model.register_forward_pre_hook(
                lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
            )
            for turn in range(5):
                widths.clear()
                answers, _ = one(prompts)
                assert (widths[0] < max(map(len, prompts))) == (reuse and turn > 0)
                said.append(answers)
                prompts = [p + a + [10 + turn, 11] for p, a in zip(prompts, answers, strict=True)]
            handle.remove()
            played.append(said)
    plain, plain_seeded, reusing, reusing_seeded = played
    assert plain == reusing and plain_seeded == reusing_seeded


def test_every_token_can_be_sampled():
    """3,000 draws of one token: of those with a probability of 1 % each comes but once in 10^13 times."""
    _, policy = policies(1.0)
    policy.config.max_new_tokens = 1
    with torch.no_grad():
        likely = policy.model(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(0) > 0.01
    drawn, _ = policy([PROMPTS[0]] * 3000)
    assert likely.sum() > OWN["top_k"]
    assert {int(token) for token in likely.nonzero()} <= {row[0] for row in drawn}
