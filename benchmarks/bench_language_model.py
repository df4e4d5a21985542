"""Tokens a second of a model of 135 million weights on a CPU, by phase, as it was and as the CPU recipes have it.

    python benchmarks/bench_language_model.py

The model has the shape of SmolLM2-135M and random weights. One thread, fp32 unless a row says bf16: fp32 weights under
autocast, which only a CPU with AMX makes faster.

- warm start: forward and backward pass with LoRA of rank 16 on all linear layers, with the dropout (0.05) and the
  activation checkpointing that `alfworld/sft_pretrained` has by default, then without either, then with all weights,
  also with the memory of tcmalloc where it is installed;
- evaluation: episodes in concatenated context with and without the keys and values of the turns before;
- decoding: one token at a time after a cache of so many tokens, copied for each token or allocated ahead; in bf16, with
  the weights cast for each token or once.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from ctypes.util import find_library
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from harness import Work, measure, parser, table, write
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from epo_trl.models import build_tokenizer
from epo_trl.models.generate import SamplingPolicy
from epo_trl.models.prefix_cache import CACHE, growing_cache

VOCABULARY = 49_152


def make_model() -> PreTrainedModel:
    """Builds a model of the shape of SmolLM2-135M."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def bf16(enabled: bool) -> Any:
    """Returns the block of a pass in bf16, if enabled."""
    return torch.autocast("cpu", torch.bfloat16) if enabled else nullcontext()


def warm_start(lora: bool, dropout: float, checkpointing: bool, tokens: int, half: bool = False) -> Work:
    """Makes the pass over one sequence. It returns tokens a second."""
    model: Any = make_model()
    if lora:
        model = get_peft_model(model, LoraConfig(r=16, lora_dropout=dropout, target_modules="all-linear"))
    model.train()
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    ids = torch.randint(VOCABULARY, (1, tokens))

    def work() -> float:
        start = time.perf_counter()
        with bf16(half):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        model.zero_grad()
        return tokens / (time.perf_counter() - start)

    return work


def evaluation(reuse: bool, episodes: int, turns: int, words: int) -> Work:
    """Makes a list of episodes, whose responses are forced to be as long. It returns played tokens a second."""
    policy = SamplingPolicy(
        make_model(), build_tokenizer(["word"]), max_new_tokens=8, temperature=0.0, reuse_prefixes=reuse
    )
    if not reuse:
        policy._cache = None

    def work() -> float:
        prompts = [[100 + i] * 4 * words for i in range(episodes)]
        player, start = policy.seeded(0), time.perf_counter()
        for turn in range(turns):
            responses, _ = player(prompts)
            prompts = [p + r + [1000 + turn] * words for p, r in zip(prompts, responses, strict=True)]
        return sum(map(len, prompts)) / (time.perf_counter() - start)

    return work


def decoding(ahead: bool, rows: int, before: int, tokens: int, casts: str = "") -> Work:
    """Makes the decoding of some tokens. It returns tokens a second."""
    model = make_model().eval()
    config = model.config

    def work() -> float:
        cache = growing_cache() if ahead else DynamicCache()
        with torch.no_grad(), bf16(casts == "once"):
            for layer in range(config.num_hidden_layers):
                states = torch.randn(2, rows, config.num_key_value_heads, before, config.head_dim)
                cache.update(*states, layer)
            ids = torch.zeros(rows, 1, dtype=torch.long)
            start = time.perf_counter()
            for _ in range(tokens):
                with bf16(bool(casts)):
                    ids = model(input_ids=ids, **{CACHE: cache}).logits[:, -1].argmax(-1, keepdim=True)
        return rows * tokens / (time.perf_counter() - start)

    return work


def main() -> None:
    """Measures all phases and prints a table."""
    args = parser(__doc__)
    args.add_argument("--tokens", type=int, default=512, help="of a sequence of the warm start")
    args.add_argument("--episodes", type=int, default=4, help="played side by side")
    args.add_argument("--turns", type=int, default=10)
    args.add_argument("--words", type=int, default=24, help="of an observation, in tokens")
    args.add_argument("--rows", type=int, default=16, help="decoded side by side")
    args.add_argument("--before", type=int, default=400, help="tokens in the cache")
    given = args.parse_args()
    play = (given.episodes, given.turns, given.words)
    phases: dict[str, dict[str, Any]] = {
        "warm start": {
            "LoRA, dropout, checkpointing": partial(warm_start, True, 0.05, True, given.tokens),
            "LoRA": partial(warm_start, True, 0.0, False, given.tokens),
            "all weights": partial(warm_start, False, 0.0, False, given.tokens),
            "all weights, bf16": partial(warm_start, False, 0.0, False, given.tokens, half=True),
        },
        "evaluation": {
            "every turn from the start": partial(evaluation, False, *play),
            "prefixes reused": partial(evaluation, True, *play),
        },
        "decoding": {
            "copied for each token": partial(decoding, False, given.rows, given.before, 16),
            "allocated ahead": partial(decoding, True, given.rows, given.before, 16),
            "bf16, cast for each token": partial(decoding, True, given.rows, given.before, 16, casts="each token"),
            "bf16, cast once": partial(decoding, True, given.rows, given.before, 16, casts="once"),
        },
    }
    ways, environ = phases["warm start"], {}
    if tcmalloc := find_library("tcmalloc_minimal"):
        for name in ("all weights", "all weights, bf16"):
            ways[f"{name}, tcmalloc"] = ways[name]
            environ[f"{name}, tcmalloc"] = {"LD_PRELOAD": tcmalloc}
    rows, results = [], {}
    with patch.dict("os.environ", {"OMP_NUM_THREADS": "1"}):
        for phase, variants in phases.items():
            measured = results[phase] = measure(variants, given.rounds, environ=environ)
            base = sorted(next(iter(measured.values())).results)[given.rounds // 2]
            for name, one in measured.items():
                rate = sorted(one.results)[given.rounds // 2]
                spread = (max(one.results) - min(one.results)) / rate / 2
                rows.append(
                    [phase, name, f"{rate:.0f} ± {spread:.0%}", f"{rate / base:.2f}x", f"{one.peak_mb / 1000:.1f} GB"]
                )
    print(table(["phase", "way", "tokens/s a core", "speed", "peak beside the model"], rows))
    write(given.json, options=vars(given), results=results)


if __name__ == "__main__":
    main()
