"""Time and engine steps of a rollout on vLLM's CPU build, in step and without a barrier.

    .venv-vllm/bin/python benchmarks/vllm_barrier.py            # in the process; `make test-vllm` makes .venv-vllm
    .venv-vllm/bin/python benchmarks/vllm_barrier.py --seeds    # with a seed for each response as well
    .venv-vllm/bin/python -m torch.distributed.run --nproc-per-node 2 benchmarks/vllm_barrier.py --server

Both ways ask the same engine in turn, for the same episodes. A response ends after each token with probability
1 / `--length`, by a bias on that token's logit, so lengths are geometric. A step of the engine adds a token to every
running sequence: `busy` is the mean number of sampled tokens in a step, out of as many as there are episodes, and the
rest are idle slots. On a GPU a step costs nearly the same whatever is in it.
"""

from __future__ import annotations

import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from server_process import free_port

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MASTER_ADDR": "127.0.0.1", "TRL_EXPERIMENTAL_SILENCE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
os.environ.update(SETTINGS)
if "RANK" not in os.environ:
    os.environ.update(ALONE, MASTER_PORT=str(free_port()))

import weights_without_nccl  # noqa: E402
from bench_rollout import SlowGames, make_template, make_tokenizer  # noqa: E402
from bench_update import make_model  # noqa: E402
from harness import parser, table, trainer_settings, write  # noqa: E402

from epo_trl.trainers import EPOConfig, EPOTrainer  # noqa: E402
from epo_trl.trainers.generation import TurnGenerator  # noqa: E402

SIZES = {
    "hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
IN_STEP, FREE, SEEDED = "in step (TRL's call)", "no barrier", "no barrier, a seed each"


def save_policy(folder: str, layers: int) -> Any:
    """Saves a model whose tokens are all equally likely, and returns its tokenizer."""
    tokenizer = make_tokenizer()
    model = make_model({**SIZES, "num_hidden_layers": layers, "vocab_size": len(tokenizer)})
    model.config.tie_word_embeddings = False
    model.lm_head.weight = type(model.lm_head.weight)(model.lm_head.weight.detach() * 0)
    model.config.max_position_embeddings = 8192
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


@contextmanager
def serving(policy: str, address: str) -> Iterator[None]:
    """Runs `vllm serve` for the block."""
    command = [str(Path(sys.executable).with_name("vllm")), "serve", policy, "--port", address.rsplit(":", 1)[1],
               "--max-model-len", "8192", "--logprobs-mode", "processed_logprobs",
               "--weight-transfer-config", '{"backend": "cpu_store"}']  # fmt: skip
    kept = {name: value for name, value in os.environ.items() if name not in ALONE and name != "MASTER_PORT"}
    environment = {**kept, "VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    process = subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        os.killpg(process.pid, 9)
        process.wait()


class Steps:
    """Counts the steps of a vLLM in the process, or of a server by its own statistics."""

    def __init__(self, trainer: EPOTrainer, address: str) -> None:
        self.address, self.count = address, 0
        if not address:
            engine = trainer.vllm_generation.llm.llm_engine
            step = engine.step
            engine.step = lambda: self._add() or step()

    def _add(self) -> None:
        self.count += 1

    def read(self) -> int:
        """Returns the number of steps so far."""
        if self.address:
            text = urllib.request.urlopen(f"{self.address}/metrics", timeout=30).read().decode()
            found = re.search(r"^vllm:iteration_tokens_total_count\S* (\S+)$", text, re.MULTILINE)
            self.count = int(float(found[1])) if found else 0
        return self.count


def make_trainer(policy: str, tokenizer: Any, given: Any, address: str) -> EPOTrainer:
    """Creates a trainer on vLLM, which keeps the weights that it has loaded."""
    bias = math.log((len(tokenizer) - 1) / (given.length - 1))
    place = (
        {"vllm_mode": "server", "vllm_server_base_url": address, "vllm_server_timeout": 900.0} if address else
        {"vllm_mode": "colocate"}
    )  # fmt: skip
    args = EPOConfig(
        **trainer_settings(use_cpu=True, bf16=False), use_vllm=True, vllm_max_model_length=8192,
        vllm_gpu_memory_utilization=0.1, per_device_train_batch_size=given.episodes, max_turns=given.turns,
        num_generations=given.episodes * int(os.environ["WORLD_SIZE"]), context="concatenated", max_prompt_length=512,
        require_think=False, max_completion_length=round(4 * given.length), prompt_template=make_template(),
        generation_kwargs={"logit_bias": {tokenizer.eos_token_id: bias}}, **place,
        vllm_group_port=int(os.environ["MASTER_PORT"]) + 7,
    )  # fmt: skip
    trainer = EPOTrainer(policy, SlowGames(given.answer), args=args, processing_class=tokenizer)
    trainer.vllm_generation.sync_weights = lambda: None
    return trainer


def measure(trainer: EPOTrainer, steps: Steps, given: Any) -> dict[str, list[tuple[float, int, int]]]:
    """Returns seconds, steps and sampled tokens of this rank, of each round of each way."""
    free, ranks = trainer.engine, trainer.ranks
    ways = {IN_STEP: (TurnGenerator(trainer), False), FREE: (free, False)}
    ways |= {SEEDED: (free, True)} if given.seeds else {}
    found: dict[str, list[tuple[float, int, int]]] = {way: [] for way in ways}
    for number in range(-1, given.rounds):
        for way, (engine, seeds) in ways.items():
            trainer.engine, trainer.args.request_seeds = engine, seeds
            ranks.gather([None])
            start, before = time.perf_counter(), steps.read()
            played = trainer.play([("train/0", 0)] * given.episodes)
            ranks.gather([None])
            tokens = sum(len(turn.response_ids) for episode in played for turn in episode.turns)
            assert all(len(episode.turns) == given.turns for episode in played)
            if number >= 0:
                found[way].append((time.perf_counter() - start, steps.read() - before, sum(ranks.gather([tokens]))))
    return found


def main() -> None:
    """Measures both ways and prints a table."""
    options = parser(__doc__)
    options.add_argument("--server", action="store_true", help="ask a server, from as many ranks as were launched")
    options.add_argument("--seeds", action="store_true", help="also with request_seeds")
    options.add_argument("--answer", type=float, default=0.0, help="seconds that a game takes for an answer")
    options.add_argument("--turns", type=int, default=6)
    options.add_argument("--episodes", type=int, default=12, help="of each rank")
    options.add_argument("--layers", type=int, default=2, help="layers of 128 units: a step takes longer")
    options.add_argument("--length", type=float, default=60.0, help="mean number of tokens of a response")
    given = options.parse_args()
    weights_without_nccl.keep_linear_weights()
    weights_without_nccl.patch_client()
    policy = os.path.join(tempfile.gettempdir(), f"bench-vllm-{os.environ['MASTER_PORT']}")
    address = f"http://127.0.0.1:{int(os.environ['MASTER_PORT']) + 1}" if given.server else ""
    tokenizer, is_first = make_tokenizer(), os.environ["RANK"] == "0"
    if is_first:
        save_policy(policy, given.layers)
    with serving(policy, address) if is_first and address else nullcontext():
        while not Path(policy, "tokenizer.json").is_file():
            time.sleep(1)
        trainer = make_trainer(policy, tokenizer, given, address)
        found = measure(trainer, Steps(trainer, address), given)
        trainer.accelerator.wait_for_everyone()
    if is_first:
        report(found, given)
    os._exit(0)  # vLLM's threads outlive the main one


def report(found: dict[str, list[tuple[float, int, int]]], given: Any) -> None:
    """Prints and writes what was measured."""
    rates = {way: statistics.median(tokens / seconds for seconds, _, tokens in rounds) for way, rounds in found.items()}
    rows = []
    for way, rounds in found.items():
        steps, tokens = (sum(numbers) for numbers in list(zip(*rounds, strict=True))[1:])
        cells = f"{rates[way]:.0f}", f"{rates[way] / rates[IN_STEP]:.2f}", f"{steps / len(rounds):.0f}"
        rows.append((way, *cells, f"{tokens / max(steps, 1):.1f}"))
    print(table(("way", "tokens/s", "x in step", "steps", "busy"), rows), flush=True)
    write(given.json, answer=given.answer, turns=given.turns, episodes=given.episodes, results=found)


if __name__ == "__main__":
    main()
