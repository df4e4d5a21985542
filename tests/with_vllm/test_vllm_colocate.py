"""The rollout on TRL's vLLM backend, for real on a CPU: `make test-vllm`, in an environment of its own.

vLLM's CPU build needs two things that a GPU does not: Linear weights must stay where they are (its CPU kernels pack and
drop them, and a weight sync then fails), and the model must be loaded in float32, so that log-probabilities compare.
"""

import os

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
    MASTER_PORT="29541",
)  # fmt: skip

import functools  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402

vllm = pytest.importorskip("vllm")

from epo_trl.envs.toy import ToySuite  # noqa: E402
from epo_trl.models import build_model, build_tokenizer  # noqa: E402
from epo_trl.models.load import corpus  # noqa: E402
from epo_trl.trainers import EPOConfig, EPOTrainer  # noqa: E402


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A tiny Llama on disk: vLLM loads by path, and a saved Qwen2 would get Qwen2's own tokenizer."""
    path = tmp_path_factory.mktemp("policy")
    tokenizer = build_tokenizer(corpus(ToySuite(), "compact"))
    build_model(tokenizer, family="llama", hidden_size=64, heads=2, max_position_embeddings=1024).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    import trl.generation.vllm_generation as backend
    from vllm.model_executor.layers import utils

    def keep_weight(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", keep_weight)
    monkeypatch.setattr(backend, "LLM", functools.partial(vllm.LLM, dtype="float32"))


def test_vllm_samples_what_the_update_scores_before_and_after_a_weight_sync(policy, tmp_path):
    """The first step compares the loaded weights, the later ones the weights that TRL has sent over."""
    args = EPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, use_vllm=True, vllm_mode="colocate", vllm_max_model_length=512,
        vllm_gpu_memory_utilization=0.1, per_device_train_batch_size=8, num_generations=4, max_steps=3,
        learning_rate=1e-2, max_turns=3, max_prompt_length=300, max_completion_length=8, prompt_template="compact",
        save_strategy="no", logging_steps=1, report_to=[], gradient_checkpointing=False, eval_episodes=4,
    )  # fmt: skip
    trainer = EPOTrainer(policy, ToySuite(), args=args)
    trainer.train()
    steps = [log for log in trainer.state.log_history if "loss" in log]
    assert len(steps) == 3
    for log in steps:
        assert log["env/turns"] == 3.0
        assert log["sampling/sampling_logp_difference/max"] < 1e-4
    assert steps[-1]["grad_norm"] > 0
    metrics = trainer.evaluate()
    assert metrics["eval_iid/turns"] == 3.0
    assert trainer.vllm_generation.temperature == args.temperature
