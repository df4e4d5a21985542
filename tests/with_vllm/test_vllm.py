"""The rollout on TRL's vLLM backends, for real on a CPU: `make test-vllm`, in an environment of its own.

vLLM's CPU build needs three things that a GPU does not, all in `cpu_server/`: weights that stay where they are, a way
to send them without NCCL, and metadata under the name `vllm`. The model is loaded in float32, so that log-probabilities
compare. Not covered: NCCL, GPU kernels, tensor parallelism, sleep mode, ZeRO-3 and adapters together with vLLM.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from epo_trl.envs.toy import ToySuite
from epo_trl.models import build_model, build_tokenizer
from epo_trl.models.load import corpus

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MASTER_ADDR": "127.0.0.1", "TRL_EXPERIMENTAL_SILENCE": "1",
}  # fmt: skip
WORKER = str(Path(__file__).with_name("vllm_worker.py"))
EVALUATE_WORKER = str(Path(__file__).with_name("evaluate_worker.py"))
SECONDS = 300
pytestmark = pytest.mark.slow


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A tiny Llama on disk: vLLM loads by path, and a saved Qwen2 would get Qwen2's own tokenizer."""
    path = tmp_path_factory.mktemp("policy")
    tokenizer = build_tokenizer(corpus(ToySuite(), "compact"))
    build_model(tokenizer, family="llama", hidden_size=64, heads=2, max_position_embeddings=1024).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def server(policy, tmp_path):
    """Yields the process of `vllm serve` and the settings of a run with it. One per run, whose weights it ends with."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("vllm")), "serve", policy, "--port", str(port), "--dtype", "float32",
               "--max-model-len", "1024", "--logprobs-mode", "processed_logprobs",
               "--weight-transfer-config", '{"backend": "cpu_store"}']  # fmt: skip
    log = (tmp_path / "server.log").open("w")
    environment = {**os.environ, **SETTINGS, "VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(SECONDS):
            if process.poll() is not None:
                pytest.fail((tmp_path / "server.log").read_text()[-4000:])
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            except OSError:
                time.sleep(1)
        settings = {"vllm_mode": "server", "vllm_server_base_url": address, "vllm_group_port": free_port()}
        yield SimpleNamespace(pid=process.pid, settings=settings)
    finally:
        with contextlib.suppress(ProcessLookupError):  # a test has ended it
            os.killpg(process.pid, 9)
        process.wait()


def train(policy, folder, ranks, *, kind="grpo", stale=False, sleeping=False, victim=0, **settings):
    """Returns what each rank kept."""
    given = json.dumps({"settings": settings, "kind": kind, "stale": stale, "sleeping": sleeping, "victim": victim})
    launcher = [sys.executable]
    environment = {**os.environ, **SETTINGS}
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}"]
    else:
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [*launcher, WORKER, policy, str(folder), given],
        env=environment, timeout=SECONDS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-20_000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def differences(kept):
    """Returns the largest difference of log-probabilities between sampling and update, of each step."""
    return [log["sampling/sampling_logp_difference/max"] for log in kept[0]["steps"]]


def check(kept):
    """The first step compares the loaded weights, the later ones the weights that TRL has sent over."""
    assert len(kept[0]["steps"]) == 3 and max(differences(kept)) < 1e-5
    assert all(log["env/turns"] == 4.0 for log in kept[0]["steps"])
    assert kept[0]["steps"][-1]["grad_norm"] > 0
    assert all(rank["eval_turns"] == 4.0 and rank["same_temperature"] for rank in kept)


@pytest.mark.parametrize("context", ["windowed", "concatenated"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_colocated_vllm_samples_what_the_update_scores(policy, tmp_path, context, ranks):
    check(train(policy, tmp_path, ranks, vllm_mode="colocate", context=context, max_turns=4))


@pytest.mark.parametrize("context", ["windowed", "concatenated"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_vllm_server_samples_what_the_update_scores(policy, server, tmp_path, context, ranks):
    check(train(policy, tmp_path, ranks, context=context, max_turns=4, **server.settings))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_vllm_server_plays_one_batch_ahead_with_the_weights_of_one_rl_step_ago(policy, server, tmp_path, ranks):
    kept = train(policy, tmp_path, ranks, max_turns=4, rollout_ahead=True, request_seeds=True, **server.settings)
    first, *later = differences(kept)
    assert first < 1e-5 and min(later) > 1e-3
    for rank in kept:
        assert [log["lag/rl_steps"] for log in rank["steps"]] == [0.0, 1.0, 1.0]
        assert rank["eval_turns"] == 4.0 and rank["same_temperature"]


def test_all_ranks_end_within_two_minutes_when_the_server_dies_during_an_update(policy, server, tmp_path):
    # The batch ahead may be complete by then: the weights for the next one meet the dead server.
    with pytest.raises(AssertionError, match=r"the vLLM server at http://127.0.0.1|host='127.0.0.1'"):
        train(policy, tmp_path, 2, max_turns=4, rollout_ahead=True, victim=server.pid, **server.settings)
    assert time.time() - (tmp_path / "killed").stat().st_mtime < 120


@pytest.mark.parametrize("critic", ["separate", "value_head"])
def test_vllm_is_sent_the_policy_without_its_critic(policy, tmp_path, critic):
    check(train(policy, tmp_path, 1, kind="ppo", critic=critic, vllm_mode="colocate", max_turns=4))


def test_vllm_sleeps_between_rollouts_and_not_between_turns(policy, tmp_path):
    kept = train(policy, tmp_path, 1, sleeping=True, vllm_mode="colocate", context="concatenated", max_turns=4)
    check(kept)
    rollouts = 3 + 2  # and one for each list of the evaluation
    assert kept[0]["asked"] == ["weights", "kv_cache", "sleep 2"] * rollouts


def test_an_evaluation_with_vllm_does_not_depend_on_the_size_of_its_parts(policy, tmp_path):
    """Each response has a seed of its own, whatever vLLM samples beside it."""
    done = subprocess.run(
        [sys.executable, EVALUATE_WORKER, policy, str(tmp_path), "[8, 3]"],
        env={**os.environ, **SETTINGS}, timeout=SECONDS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    whole, parts = json.loads((tmp_path / "responses.json").read_text())
    assert whole == parts and all(len(episode) == 4 for episode in whole)
    assert len({tuple(turn) for episode in whole for turn in episode}) > 8


def test_lean_requests_get_the_samples_and_log_probabilities_of_plain_ones(tmp_path):
    """The benchmark compares them, and stops at a difference."""
    script = Path(__file__).parents[2] / "benchmarks" / "vllm_python.py"
    small = ["--requests", "8", "--tokens", "12", "--rounds", "1", "--json", str(tmp_path / "found.json")]
    done = subprocess.run(
        [sys.executable, str(script), *small],
        env={**os.environ, **SETTINGS}, timeout=SECONDS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert len(json.loads((tmp_path / "found.json").read_text())["results"]) == 3


def test_weights_that_are_not_sent_are_seen_in_the_log_probabilities(policy, tmp_path):
    first, *later = differences(train(policy, tmp_path, 1, stale=True, vllm_mode="colocate", max_turns=4))
    assert first < 1e-5 and min(later) > 1e-2


def test_the_prefix_cache_is_hit_more_with_every_turn(policy, tmp_path):
    turns = 12
    [kept] = train(policy, tmp_path, 1, vllm_mode="colocate", context="concatenated", max_turns=turns)
    cached = [tokens for number, tokens in kept["cached"] if number == "0"][:turns]  # of the first rollout's episode 0
    assert cached == sorted(cached) and cached[-1] > cached[turns // 2] > 0, "in blocks of 128 tokens"
