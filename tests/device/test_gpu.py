"""What a GPU alone can show: the numerics and memory of its kernels, generation on it, NCCL and DeepSpeed."""

import functools
import json
import random
from dataclasses import replace

import gpu
import pytest
import torch
import trl.trainer.utils as trl_utils
from fused_heads import nucleus_entropy_of
from launcher import launch, needs_deepspeed, start_program
from ppo_kit import STATES, is_critic, parts
from test_head_statistics import mean_discriminator_of
from trainer_kit import (
    catch_step,
    difference,
    make_episodes,
    make_ppo,
    make_trainer,
    results_of,
    toy_tokenizer,
    with_episodes,
)
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Config
from transformers.utils import is_flash_attn_2_available

from epo_trl.methods.entropy_discriminator import mean_discriminator
from epo_trl.methods.lm_head import LMHead
from epo_trl.methods.ref_nucleus import nucleus, nucleus_entropy
from epo_trl.methods.siren import top_p_entropy
from epo_trl.models.generate import decoding

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(gpu.COUNT == 0, reason="needs a GPU")]

VOCABULARY = 4096
WAYS = {
    "windowed in passes": {"tokens_per_pass": 100},
    "windowed, passes run again": {"tokens_per_pass": 100, "recompute_passes": True},
    "concatenated": {"context": "concatenated"},
}
ALGORITHMS = {
    "grpo": (make_trainer, {}),
    "ppo": (make_ppo, {"critic": "separate"}),
    "ppo with a value head": (make_ppo, {"critic": "value_head"}),
}
needs_flash = pytest.mark.skipif(not is_flash_attn_2_available(), reason="needs flash-attn")


def make_qwen(vocabulary=VOCABULARY, attention="sdpa"):
    """Returns a Qwen2 of three layers whose heads of 64 share keys and values; no distribution is flat."""
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.1, tie_word_embeddings=True,
        attn_implementation=attention,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


# ---------------------------------------------------------------------------------------------------- the first update


def longer_episodes():
    """Returns the episodes made by hand, of up to 81 tokens in a prompt and 20 in a response."""
    rng = random.Random(0)

    def longer(ids, times):
        return tuple(rng.randrange(12, VOCABULARY) for _ in range(times * len(ids)))

    return [
        replace(episode, turns=tuple(
            replace(turn, prompt_ids=longer(turn.prompt_ids, 9), response_ids=longer(turn.response_ids, 4))
            for turn in episode.turns
        ))
        for episode in make_episodes()
    ]  # fmt: skip


def first_update(folder, algorithm, way, *, attention="sdpa", **changes):
    """Returns the scores that the first update works with, and its gradients."""
    make, own = ALGORITHMS[algorithm]
    trainer = make(folder, model=make_qwen(attention=attention), epo_lambda=0.3, max_completion_length=24,
                   **own, **WAYS[way], **changes)  # fmt: skip
    assert trainer.accelerator.device.type == ("cpu" if trainer.args.use_cpu else "cuda")
    with_episodes(trainer, longer_episodes())._final_states = lambda episodes: [list(state) for state in STATES]
    scores = results_of(trainer, "_get_per_token_logps_and_entropies")
    _, gradients = catch_step(trainer, history=[7.0, 7.5], rl_step=2)
    found = {"log-probabilities": scores[-1][0], "entropies": scores[-1][1]}
    if algorithm == "grpo":
        found["gradient"] = flat(gradients)
    else:
        found |= {"values": trainer.step.targets.values, "returns": trainer.step.targets.returns}
        found |= zip(("gradient", "the critic's gradient"), map(flat, parts(gradients)), strict=True)
    return {name: value.detach().cpu().double() for name, value in found.items()}


def flat(tensors):
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def error(found, expected):
    """Returns the size of the difference by that of what is expected."""
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    """Returns a function that gives the first update on the CPU, in float32 or under autocast."""
    folder = tmp_path_factory.mktemp("cpu")
    return functools.cache(lambda algorithm, way, bf16: first_update(folder, algorithm, way, use_cpu=True, bf16=bf16))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("algorithm", "attention"), [*((name, "sdpa") for name in ALGORITHMS), ("grpo", "eager")])
def test_the_first_update_in_float32_is_that_of_the_cpu(tmp_path, on_cpu, algorithm, attention, way):
    """With TF32 the errors are near 1e-3."""
    found = first_update(tmp_path, algorithm, way, attention=attention)
    errors = {name: error(found[name], value) for name, value in on_cpu(algorithm, way, False).items()}
    assert len(errors) == (3 if algorithm == "grpo" else 6) and max(errors.values()) < 3e-5, errors


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("algorithm", "attention"),
    [
        *((name, "sdpa") for name in ALGORITHMS),
        ("grpo", "eager"),
        pytest.param("grpo", "flash_attention_2", marks=needs_flash),
        pytest.param("ppo with a value head", "flash_attention_2", marks=needs_flash),
    ],
)
def test_the_first_update_in_bfloat16_is_as_exact_as_on_the_cpu(tmp_path, on_cpu, algorithm, attention, way):
    found = first_update(tmp_path, algorithm, way, attention=attention, bf16=True)
    exact, rounded = (on_cpu(algorithm, way, bf16) for bf16 in (False, True))
    errors = {name: (error(found[name], value), error(rounded[name], value)) for name, value in exact.items()}
    assert all(1e-4 < mine < 3 * cpus for mine, cpus in errors.values()), errors


# ------------------------------------------------------------------------------------------------- heads of real sizes

TOKENS, WIDTH, COLUMNS = 4096, 256, 151_936
CUT, TOP_P = 0.03, 0.8
ROUNDING = torch.finfo(torch.bfloat16).eps


def make_head():
    """Returns a head in bfloat16 with distributions from sharp to nearly flat, and the sampled tokens."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, device="cuda") * torch.linspace(0.1, 1.0, TOKENS, device="cuda")[:, None]
    weight = torch.randn(COLUMNS, WIDTH, device="cuda") / 4
    leaves = [tensor.bfloat16().requires_grad_() for tensor in (hidden, weight)]
    targets = torch.randint(COLUMNS, (TOKENS,), device="cuda")
    return LMHead(*leaves, bias=None, temperature=0.8, softcap=None, scale=1.0), targets


def log_probs_and_entropies(head, targets):
    found = trl_utils._ChunkedLogProbFunction.apply(
        head.hidden, head.weight, None, targets, head.temperature, 32768, None, 1.0, ("log_probs", "entropy")
    )
    return torch.stack(found[:2], 1)


def plain_log_probs_and_entropies(logits, targets):
    log_p = logits.log_softmax(-1)
    return torch.stack([log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)], 1)


def plain_nucleus_entropy(logits, candidates):
    outside = torch.ones_like(logits, dtype=torch.bool)
    rows, columns = (candidates >= 0).nonzero(as_tuple=True)
    outside[rows, candidates[rows, columns]] = False
    return nucleus_entropy_of(logits, (~outside).double().log(), 1e-9)


def own_nucleus(logits):
    return top_p_entropy(logits, TOP_P)


HEAD_FUNCTIONS = {
    "log-probabilities and entropies": (log_probs_and_entropies, plain_log_probs_and_entropies),
    "entropy inside candidates": (nucleus_entropy, plain_nucleus_entropy),
    "entropy of the nucleus": (lambda head, _: head.map(own_nucleus), lambda logits, _: own_nucleus(logits)),
    "mean discriminator": (lambda head, _: head.map(mean_discriminator).detach(), mean_discriminator_of),
}  # fmt: skip


@pytest.mark.parametrize("name", HEAD_FUNCTIONS)
def test_a_head_of_150_000_columns_is_exact_to_bfloat16_without_all_logits(name):
    """Against float64. A logit of 20 is rounded by up to 0.06, and a slope by as much of itself."""
    compute, plain = HEAD_FUNCTIONS[name]
    head, given = make_head()
    if compute is nucleus_entropy:
        given = nucleus(head, CUT)
        assert (given[:, 1] >= 0).sum() > TOKENS // 20
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = compute(head, given)
    slope = torch.linspace(1.0, 2.0, found.numel(), device="cuda", dtype=torch.float64).view_as(found)
    gradients = torch.autograd.grad((found * slope).sum(), (head.hidden, head.weight)) if found.requires_grad else ()
    assert torch.cuda.max_memory_allocated() - before < 4 * TOKENS * COLUMNS

    exact = LMHead(*(x.detach().double().requires_grad_() for x in (head.hidden, head.weight)), None, 0.8, None, 1.0)
    values, slopes = [], [torch.zeros_like(x) for x in (exact.hidden, exact.weight)]
    for hidden, part, above in zip(*(x.split(256) for x in (exact.hidden, given, slope)), strict=True):
        values.append(plain(exact.logits(hidden @ exact.weight.T), part))
        if gradients:
            for total, one in zip(
                slopes, torch.autograd.grad((values[-1] * above).sum(), (exact.hidden, exact.weight)), strict=True
            ):
                total += one
        values[-1] = values[-1].detach()
    errors = [error(found.detach().double(), torch.cat(values))]
    errors += [error(mine.double(), theirs) for mine, theirs in zip(gradients, slopes, strict=False)]
    assert max(errors) < 8 * ROUNDING, errors


# ---------------------------------------------------------------------------------------------------------- generation


@pytest.mark.parametrize("context", ["windowed", "concatenated"])
def test_the_engine_decodes_greedily_what_plain_generate_does(tmp_path, context):
    model = make_qwen(len(toy_tokenizer()))
    trainer = make_trainer(tmp_path, model=model, context=context, max_turns=4, max_completion_length=10)
    assert trainer.engine.in_step
    with trainer.engine.sampling(0.0, seed=0):
        episodes = trainer.play([(f"train/{i}", 0) for i in range(6)])
    settings = trainer.generation_config
    ends = {"eos_token_id": settings.eos_token_id, "pad_token_id": settings.pad_token_id}
    config, seen = GenerationConfig(max_new_tokens=10, **ends, **decoding(0.0)), set()
    for episode in episodes:
        sequence = []
        for turn in episode.turns:
            sequence = [*(sequence if context == "concatenated" else []), *turn.prompt_ids]
            ids = torch.tensor([sequence], device="cuda")
            output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
            assert tuple(output[0, len(sequence) :].tolist()) == turn.response_ids
            sequence += turn.response_ids
            seen.add(turn.response_ids)
    assert len(seen) > 6


# ------------------------------------------------------------------------------------------------------ NCCL, DeepSpeed


@pytest.mark.parametrize("mode", ["ddp", pytest.param("zero3", marks=needs_deepspeed)])
def test_a_single_rank_trains_and_resumes_bit_equal_inside_an_rl_step(tmp_path, mode):
    methods = ("grpo", "ppo")
    runs = [f"{mode}-alone-{method}" for method in methods]
    launch("device/ranks.py", runs, tmp_path, world=1, start=start_program, timeout_seconds=110)
    for method, run in zip(methods, runs, strict=True):
        straight, resumed = json.loads((tmp_path / run / "rank0.json").read_text())
        weights = torch.load(tmp_path / run / "weights0.pt")
        kind = {"ddp": "DistributedType.MULTI_GPU", "zero3": "DistributedType.DEEPSPEED"}[mode]
        assert (straight["kind"], straight["device"], straight["rl_step"], resumed["rl_step"]) == (kind, "cuda", 2, 2)
        logged = [sum(name in line for line in straight["log"]) for name in ("loss", "epo/entropy_loss")]
        assert logged == [4, 2]
        assert all(value.isfinite().all() for value in weights["straight"].values())
        for part in (False, True)[: len(set(map(is_critic, weights["start"])))]:
            start, end = (
                {name: x for name, x in weights[when].items() if is_critic(name) == part}
                for when in ("start", "straight")
            )
            assert difference(start, end) > 1e-3, method
        assert difference(weights["straight"], weights["resumed"]) == 0.0, method
