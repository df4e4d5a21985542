"""Generation that goes on from where the last call ended gives what generation from the start gives."""

import random

import pytest
import torch
from generation_kit import ENDS, PAD, respond
from trainer_kit import make_model
from transformers import GenerationConfig

from epo_trl.models.prefix_cache import PrefixCache, can_reuse, reusing_prefixes


def conversation(generate, *, turns, rows, leave=(), sample=True):
    """Plays turns with prompts of random length; `leave` are the rows that end after each turn. Returns all rows."""
    rng = random.Random(0)
    texts = [[rng.randrange(12, 60) for _ in range(rng.randint(3, 9))] for _ in range(rows)]
    running, said = list(range(rows)), []
    for turn in range(turns):
        responses = respond(generate, [texts[i] for i in running], sample=sample, seed=turn)
        said.append(responses)
        for i, response in zip(running, responses, strict=True):
            texts[i] = texts[i] + response + [rng.randrange(12, 60) for _ in range(rng.randint(1, 7))]
        running = [i for i in running if i not in (leave[turn] if turn < len(leave) else ())]
    return said


@pytest.mark.parametrize("family", ["seed_oss", "llama"])
@pytest.mark.parametrize("sample", [True, False])
def test_responses_are_those_of_generation_from_the_start(family, sample):
    model = make_model(family, sharpness=4.0).eval()
    assert can_reuse(model, model.generation_config)
    leave = [(), (2,), (0, 4), (), ()]
    expected = conversation(model.generate, turns=6, rows=6, leave=leave, sample=sample)
    lengths = {len(response) for responses in expected for response in responses}
    assert len(lengths) > 1 or not sample, "some end early, some do not"
    cache = PrefixCache(model)
    assert conversation(cache.generate, turns=6, rows=6, leave=leave, sample=sample) == expected
    assert cache.reused > 0


@pytest.mark.parametrize("passes", [1, 5])
def test_passes_that_only_other_ranks_need_leave_no_trace(monkeypatch, passes):
    """Under ZeRO-3 and FSDP a rank passes on until no rank has a response left: here so many times in each call."""
    model = make_model(sharpness=4.0).eval()
    expected, left = conversation(model.generate, turns=6, rows=4, leave=[(), (2,)]), []

    def other_rank(unfinished, **kwargs):
        if not unfinished:
            unfinished += min(len(left), 1)
            del left[:1]

    monkeypatch.setattr(torch.distributed, "all_reduce", other_rank)
    cache = PrefixCache(model)

    def generate(**kwargs):
        left[:] = range(passes)
        return cache.generate(synced_gpus=True, **kwargs)

    assert conversation(generate, turns=6, rows=4, leave=[(), (2,)]) == expected
    assert cache.reused > 0 and not left


def test_only_what_is_new_is_run():
    model = make_model().eval()
    widths = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    cache = PrefixCache(model)
    first = [[13, 14, 15, 16], [20, 21]]
    responses = respond(cache.generate, first, tokens=3)
    assert widths[0] == 4
    widths.clear()
    new = [[30, 31], [40, 41, 42]]
    respond(cache.generate, [a + b + c for a, b, c in zip(first, responses, new, strict=True)], tokens=3)
    assert widths[0] <= 3 + 1, "what is new, and at most the last sampled token"
    lengths = [len(a) + min(len(b), 2) for a, b in zip(first, responses, strict=True)]
    assert cache.reused == sum(lengths)


@pytest.mark.parametrize(
    "rows", [[[13, 14, 50]], [[20, 21, 22, 50], [13, 14, 15, 51]], [[13, 14, 15]], [[13, 14, 15, 2]] * 3]
)
def test_what_does_not_go_on_from_before_is_run_from_the_start(rows):
    """Another beginning, another order, nothing new, more rows than before."""
    model = make_model().eval()
    cache = PrefixCache(model)
    respond(cache.generate, [[13, 14, 15], [20, 21, 22]], tokens=1)
    expected = respond(model.generate, rows, seed=5)
    before = cache.reused
    assert respond(cache.generate, rows, seed=5) == expected
    assert cache.reused == before


def test_padding_does_not_pile_up():
    """A row of long turns leaves; what it had made the others carry is dropped."""
    model = make_model().eval()
    cache = PrefixCache(model)
    long, short = list(range(12, 62)), [13, 14]
    (_, response) = respond(cache.generate, [long, short], tokens=2)
    assert respond(cache.generate, [short + response + [19]], tokens=2, seed=3) == respond(
        model.generate, [short + response + [19]], tokens=2, seed=3
    )
    assert cache.reused == 0 and cache._last.mask.shape[1] < 10


def test_the_model_gets_its_generate_back():
    model = make_model()
    original = type(model).generate
    with pytest.raises(KeyError), reusing_prefixes(model) as cache:
        assert model.generate == cache.generate
        raise KeyError
    assert model.generate.__func__ is original and "generate" not in vars(model)


def test_models_that_forget_are_told_apart():
    from transformers import AutoModelForCausalLM, Gemma2Config, MambaConfig, MistralConfig, MptConfig, Phi3Config

    long = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2}
    attention = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16, "head_dim": 8}
    phi = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    for config, expected in [
        (Gemma2Config(**sizes, **attention), False),
        (MistralConfig(**sizes, **attention, sliding_window=8), False),
        (MistralConfig(**sizes, **attention, sliding_window=None), True),
        (MambaConfig(**sizes, state_size=4), False),
        (MptConfig(vocab_size=64, d_model=16, n_layers=2, n_heads=2), False),  # biased by column, padding or not
        (Phi3Config(**sizes, **attention, **phi), True),
        (Phi3Config(**sizes, **attention, **phi, rope_parameters=long), False),  # a long row rescales all positions
    ]:
        model = AutoModelForCausalLM.from_config(config)
        assert can_reuse(model, model.generation_config) == expected, config.model_type


@pytest.mark.parametrize(
    ("settings", "own", "expected"),
    [
        ({}, {}, True),
        ({"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.0, "use_cache": True, "num_beams": 1}, {}, True),
        ({}, {"max_length": 20, "top_p": 0.8, "do_sample": True}, True),
        ({"use_cache": False}, {}, False),
        ({"cache_implementation": "static"}, {}, False),
        ({"repetition_penalty": 1.1}, {}, False),
        ({"no_repeat_ngram_size": 3}, {}, False),
        ({"prompt_lookup_num_tokens": 4}, {}, False),
        ({}, {"repetition_penalty": 1.1}, False),
        ({"repetition_penalty": 1.0}, {"repetition_penalty": 1.1}, True),
        ({}, {"cache_implementation": "static"}, False),
    ],
)
def test_settings_that_see_more_than_what_is_new_are_told_apart(settings, own, expected):
    model = make_model()
    model.generation_config.update(**own)
    config = GenerationConfig(max_new_tokens=3, pad_token_id=PAD, eos_token_id=ENDS, disable_compile=True, **settings)
    assert can_reuse(model, config) == expected
