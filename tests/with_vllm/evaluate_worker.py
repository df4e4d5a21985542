"""Plays a list with `VllmPolicy`, in parts of several sizes, and writes the responses. Run by test_vllm.py."""

import json
import os
import sys
from pathlib import Path

from trl import ModelConfig

from epo_trl.envs.toy import ToySuite
from epo_trl.evaluation import Protocol
from epo_trl.evaluation.play import play_chunks, protocol_context, protocol_settings, split_chunks
from epo_trl.models.vllm import load_vllm_policy
from epo_trl.rollout.spec import ResponseArguments


def main(path: str, folder: str, sizes: list[int]) -> None:
    """Plays eight episodes of four turns."""
    rules = Protocol(name="p", max_turns=4, history_length=2, temperature=0.8)
    policy, tokenizer = load_vllm_policy(
        ModelConfig(path, dtype="float32"), max_new_tokens=8, temperature=0.8, max_model_len=512, gpu_share=0.1
    )
    suite, found = ToySuite(), []
    options = ResponseArguments(prompt_template="compact", max_prompt_length=300, max_completion_length=8)
    context = protocol_context(rules, options, suite, tokenizer)
    tasks, settings = suite.task_ids("iid")[:8], protocol_settings(rules)
    for size in sizes:
        seeded = policy.seeded(5)
        parts = play_chunks(suite, split_chunks(tasks, size), lambda _, seeded=seeded: seeded, context, settings)
        episodes = [episode for part, _ in parts for episode in part]
        found.append([[turn.response_ids for turn in episode.turns] for episode in episodes])
    Path(folder, "responses.json").write_text(json.dumps(found))
    os._exit(0)  # vLLM's threads outlive the main one


if __name__ == "__main__":
    main(*sys.argv[1:3], json.loads(sys.argv[3]))
