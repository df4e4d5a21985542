"""Two processes on the CPU, by DDP over gloo, DeepSpeed ZeRO-3 or FSDP2: they agree, do not hang, equal one process."""

import json
import shutil
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from distributed_worker import (
    NUCLEUS,
    PPO,
    SETTINGS,
    TABLE,
    WORLD,
    KeepWeights,
    gathered,
    inject_first,
    inject_ppo,
    nucleus_model,
    weights_with,
)
from launcher import HAS_DEEPSPEED, launch, launched_once, needs_deepspeed
from run_kit import StopAt
from trainer_kit import GROUP, ROWS, difference, make_episodes, make_model, make_ppo, make_trainer, with_episodes
from transformers import AutoModelForCausalLM, Trainer

from epo_trl.models.critic import CRITIC_FILE
from epo_trl.runs.files import FINISHED, STATE_FILE
from epo_trl.trainers.epo_trainer import METHODS, EPOTrainer

pytestmark = pytest.mark.slow

MODES = ["ddp", pytest.param("zero3", marks=needs_deepspeed)]
RUNS = ["ddp-grpo", "ddp-guards-nonfinite", "ddp-ppo-value_head"]
RUNS += ["ddp-dapo-30", "ddp-again-30", "ddp-dapo-1", "ddp-table", "ddp-eye"]
RUNS += ["ddp-ahead-batch", "ddp-ahead-behind", "ddp-ahead-again", "ddp-ahead-dead"]
RUNS += ["fsdp-ppo-separate"]
RUNS_OF_DEEPSPEED = ["zero3-grpo", "zero3-guards-sigterm", "zero3-ppo-separate"]
RUNS_OF_DEEPSPEED += ["zero3-nucleus-tied", "zero3-nucleus-untied", "zero3-eye"]
RUNS_OF_DEEPSPEED += ["zero3-half-separate", "zero3-half-value_head", "zero3-half-adapters"]


def left_by(folder):
    """Returns the folder of a run, and what both ranks wrote there."""
    results = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(WORLD)]
    return folder, results, [torch.load(folder / f"weights{rank}.pt") for rank in range(WORLD)]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Returns a function that gives the folder of a run, and what both ranks wrote there."""
    runs = RUNS + RUNS_OF_DEEPSPEED * HAS_DEEPSPEED
    folder = launched_once(tmp_path_factory, "distributed_worker.py", runs)

    return lambda run: left_by(folder / run)


@pytest.fixture(params=MODES)
def ranks(request, launched):
    """Returns what both ranks wrote, and the folder."""
    folder, results, weights = launched(f"{request.param}-grpo")
    expected = {"ddp": "DistributedType.MULTI_CPU", "zero3": "DistributedType.DEEPSPEED"}[request.param]
    assert [r["kind"] for r in results] == [expected] * WORLD
    return results, weights, folder


def test_ranks_with_different_numbers_of_turns_do_not_wait_for_each_other(ranks):
    results, *_ = ranks
    assert [turns for turns, _ in results[0]["played"]] == [1, 1, 1, 1]
    assert [turns for turns, _ in results[1]["played"]] == [3, 3, 3, 1]


def test_an_exception_in_one_ranks_game_aborts_that_episode_alone(ranks):
    results, *_ = ranks
    assert [stop for _, stop in results[1]["played"]] == ["truncated"] * 3 + ["aborted"]
    logged = [entry["env/aborted"] for entry in results[0]["log"] if "env/aborted" in entry]
    assert logged == [1 / ROWS] * 3  # the episodes made by hand have an aborted one too


def test_the_history_is_the_same_on_every_rank(ranks):
    (one, other), *_ = ranks
    assert one["rl_step"] == other["rl_step"] == 3
    assert one["history"] == other["history"]
    assert len({entry["0"] for entry in one["history"]["entries"]}) == 3


def test_the_weights_are_the_same_on_every_rank(ranks):
    _, (one, other), _ = ranks
    for name in ("first", "last"):
        assert difference(one[name], other[name]) == 0.0


@pytest.mark.parametrize("mode", MODES)
def test_ranks_train_what_text_reaches_of_a_model_with_a_vision_tower(launched, mode):
    """DDP would wait for the gradients of the rest, and end the second RL step without saying why."""
    _, _, (one, other) = launched(f"{mode}-eye")
    assert difference(one["after"], other["after"]) == 0.0
    moved = {name for name, weight in one["after"].items() if not torch.equal(weight, one["before"][name])}
    assert moved == {name for name in one["after"] if "vision" not in name and "multi_modal" not in name}


def test_evaluation_spreads_lists_that_do_not_divide_evenly(ranks):
    results, _, folder = ranks
    assert all(r["evaluated"] == {"iid": 5, "ood": 5} for r in results)
    assert [path.name for path in (folder / "run" / "evaluations").iterdir()] == ["step_000003.json"]


def test_the_checkpoint_has_the_history_and_a_model_that_loads_alone_and_knows_its_ranks(ranks, tmp_path):
    results, (weights, _), folder = ranks
    checkpoint = folder / "run" / "checkpoint-3"
    state = json.loads((checkpoint / STATE_FILE).read_text())
    history = torch.load(checkpoint / METHODS, weights_only=True)["epo"]["history"]
    assert (state["rl_step"], history) == (3, results[0]["history"])
    with pytest.raises(ValueError, match=f"world_size: {WORLD} there, 1 now"):
        make_trainer(tmp_path, trust_checkpoint=True, **SETTINGS).train(resume_from_checkpoint=str(checkpoint))
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert difference(dict(model.named_parameters()), weights["last"]) == 0.0


def test_loss_gradient_and_history_are_those_of_one_process(ranks, tmp_path):
    """SGD with rate 1, so the weights moved by the gradient."""
    (result, _), (weights, _), _ = ranks
    keep = KeepWeights()
    trainer = make_trainer(tmp_path, max_steps=1, callbacks=[keep], **SETTINGS)
    inject_first(trainer, make_episodes())
    trainer.train()
    start = dict(make_model().named_parameters())
    moved = {name: start[name].detach() - value for name, value in keep.weights.items()}
    assert max(float(value.abs().max()) for value in moved.values()) > 0.1
    assert difference(keep.weights, weights["first"]) < 1e-5
    alone, together = trainer.state.log_history[0], result["log"][0]
    for name in ("loss", "grad_norm", "reward", "entropy/early_turns", "entropy/late_turns", "epo/entropy_loss"):
        assert together[name] == pytest.approx(alone[name], rel=2e-5, abs=1e-5), name
    entries = [state["entries"][0]["0"] for state in (trainer.methods["epo"].history.state_dict(), result["history"])]
    assert entries[0] == pytest.approx(entries[1], rel=1e-6)


@needs_deepspeed
@pytest.mark.parametrize("run", ["zero3-nucleus-tied", "zero3-nucleus-untied"])
def test_the_terms_inside_nuclei_are_those_of_one_process(launched, tmp_path, run):
    """In the second step the policy is not the reference any more; a head of its own is split by ZeRO-3."""
    _, results, (weights, other) = launched(run)
    keep = KeepWeights(2)
    model = nucleus_model(run.split("-")[-1], tmp_path / "start")
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    trainer = with_episodes(make_trainer(tmp_path, model=model, callbacks=[keep], **NUCLEUS))
    trainer.train()
    assert difference(weights, other) == 0.0
    assert difference(keep.weights, weights) < 2e-5 < 0.05 < difference(start, weights)
    for alone, together in zip(trainer.state.log_history[:2], results[0]["log"][:2], strict=True):
        own = ("siren/entropy", "siren/peak_share")
        for name in ("loss", "grad_norm", "ref-nucleus/entropy", "ref-nucleus/choice_share", *own):
            assert together[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-5), name


# ------------------------------------------------------------------------------------------------------------- guards


@pytest.mark.parametrize(
    ("mode", "end"), [("ddp", "nonfinite"), pytest.param("zero3", "sigterm", marks=needs_deepspeed)]
)
def test_ranks_agree_to_skip_an_update_and_to_stop(launched, mode, end):
    """One rank alone has the NaN, one rank alone gets the signal."""
    folder, results, (one, other) = launched(f"{mode}-guards-{end}")
    assert difference(one[0], one[1]) == 0.0 < difference(one[1], one[2])
    assert all(difference(*pair) == 0.0 for pair in zip(one, other, strict=True))
    assert all(value.isfinite().all() for value in one[-1].values())
    skipped = [entry["guard/skipped_updates"] for entry in results[0]["log"] if "guard/skipped_updates" in entry]
    run = folder / "run"
    if end == "sigterm":
        assert skipped == [0, 1, 1] and [r["preempted"] for r in results] == [True] * WORLD
        assert (run / "checkpoint-3" / STATE_FILE).is_file()
        assert AutoModelForCausalLM.from_pretrained(run / "checkpoint-3")
    else:
        assert skipped == [0, 1, 1, 2] and difference(one[2], one[3]) == 0.0
        saved = run / "_nonfinite"
        assert sorted(path.name for path in saved.iterdir()) == [f"step_000004_rank{rank}.pt" for rank in range(WORLD)]
        assert all(f"rank {r}: losses" in results[r]["error"] for r in range(WORLD))


# ------------------------------------------------------------------------------------------------------------ methods


@pytest.mark.parametrize("name", TABLE)
def test_a_methods_statistics_are_those_of_all_ranks(launched, tmp_path, name):
    """Two updates on one group over two ranks lead to the weights that one process gets to."""
    _, _, (one, other) = launched("ddp-table")
    alone = weights_with(name, tmp_path, slice(None))
    start = dict(make_model().named_parameters())
    assert difference(one[name], other[name]) == 0.0
    assert difference({key: value.detach() for key, value in start.items()}, {key: alone[key] for key in start}) > 1e-2
    assert difference(alone, one[name]) < 1e-5


# --------------------------------------------------------------------------------------------------- choosing of groups


@pytest.mark.parametrize("rounds", [30, 1])
def test_groups_of_equal_outcomes_are_replaced_on_both_ranks_until_the_limit_is_reached(launched, rounds):
    _, results, (one, other) = launched(f"ddp-dapo-{rounds}")
    unwanted = []
    for batch in zip(*(result["trained"] for result in results), strict=True):
        episodes = [tuple(episode) for part in batch for episode in part]
        groups = [episodes[first : first + GROUP] for first in range(0, len(episodes), GROUP)]
        assert len(groups) == 3 and all(len({task for task, _ in group}) == 1 for group in groups)
        unwanted.append(sum(len({won for _, won in group}) == 1 for group in groups))
    counted, replaced = (
        [line[f"rollout/{name}_groups"] for line in results[0]["log"] if f"rollout/{name}_groups" in line]
        for name in ("unwanted", "resampled")
    )
    assert counted == unwanted and len(counted) == 3 and sum(replaced) >= 2
    assert any(unwanted) is (rounds == 1)
    assert difference(one["last"], other["last"]) == 0.0


def test_ranks_that_replace_groups_resume_bit_equal_inside_a_batch(launched):
    _, straight, (whole, _) = launched("ddp-dapo-30")
    _, resumed, (again, other) = launched("ddp-again-30")
    assert [r["trained"] for r in resumed] == [r["trained"][2:] for r in straight]
    assert difference(again["last"], whole["last"]) == difference(other["last"], whole["last"]) == 0.0


# ----------------------------------------------------------------------------------------------------- one batch ahead


def test_ranks_that_play_one_batch_ahead_train_as_in_turn_with_the_weights_before(launched):
    """Although their episodes end after other numbers of turns, and an environment of one rank dies."""
    _, (result, _), (one, other) = launched("ddp-ahead-batch")
    _, _, (in_turn, _) = launched("ddp-ahead-behind")
    assert difference(one["last"], in_turn["last"]) == difference(other["last"], in_turn["last"]) == 0.0
    log = [line for line in result["log"] if "lag/rl_steps" in line]
    assert [line["lag/rl_steps"] for line in log] == [0.0, 1.0, 1.0, 1.0]
    assert max(abs(line["sampling/importance_sampling_ratio/mean"] - 1) for line in log[1:]) > 1e-3
    assert [line["env/aborted"] for line in log] == [1 / 8] * 4 and "eval_iid/success_rate" in result["log"][-1]


def test_a_rank_without_episodes_to_replace_waits_for_the_other(launched):
    _, results, (one, other) = launched("ddp-ahead-again")
    assert difference(one["last"], other["last"]) == 0.0
    assert [line["lag/rl_steps"] for line in results[0]["log"] if "lag/rl_steps" in line] == [0.0, 1.0, 1.0, 1.0]
    sizes = set(zip(*(result["sizes"] for result in results), strict=True))
    assert sizes & {(4, 0), (0, 4)} and (4, 4) in sizes


def test_ranks_end_together_when_the_server_of_one_dies_during_an_update(launched):
    _, (one, other), _ = launched("ddp-ahead-dead")
    assert one["error"] == other["error"] and one["sizes"] == other["sizes"] and len(one["sizes"]) > 1
    assert "max_aborted_share" in one["error"] and "rank 1" in one["error"] and "refused" in one["error"]
    assert not one["playing"] and not other["playing"]


# ---------------------------------------------------------------------------------------------------------------- PPO


@pytest.fixture(params=[("ddp", "value_head"), pytest.param(("zero3", "separate"), marks=needs_deepspeed)])
def ppo(request, launched):
    """Returns the mode, the kind of critic, what both ranks wrote, and the folder."""
    mode, critic = request.param
    folder, results, weights = launched(f"{mode}-ppo-{critic}")
    return mode, critic, [result["log"] for result in results], weights, folder


def test_policy_and_critic_after_two_steps_are_those_of_one_process(ppo, tmp_path):
    _, critic, (log, _), (weights, other), _ = ppo
    keep = KeepWeights(2)
    trainer = make_ppo(tmp_path, callbacks=[keep, StopAt(2)], critic=critic, **PPO)
    start = gathered(trainer.model)
    inject_ppo(trainer, slice(None), rollouts=2)
    trainer.train()
    assert difference(weights["second"], other["second"]) == difference(weights["last"], other["last"]) == 0.0
    for part in (True, False):
        alone, together, before = (
            {name: p for name, p in named.items() if ("critic." in name) == part}
            for named in (keep.weights, weights["second"], start)
        )
        assert difference(alone, before) > 1e-2
        assert difference(alone, together) < 1e-5
    for mine, theirs in zip(trainer.state.log_history[:2], log, strict=False):
        for name in ("critic/value_loss", "critic/value", "gae/advantage_turns_2", "epo/entropy_loss"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name


@needs_deepspeed
@pytest.mark.parametrize("kind", ["separate", "value_head", "adapters"])
def test_policy_and_critic_train_in_bfloat16_where_weights_are_loaded_in_parts(launched, kind):
    """DeepSpeed leaves such weights in their precision, and gathers together only weights of one precision."""
    _, _, (one, other) = launched(f"zero3-half-{kind}")
    assert {value.dtype for value in one["last"].values()} == {torch.bfloat16}
    assert difference(one["last"], other["last"]) == 0.0
    for part in (True, False):
        before, after = ({n: p for n, p in one[key].items() if ("critic." in n) == part} for key in ("before", "last"))
        assert difference(before, after) > 1e-3


def test_ranks_with_different_numbers_of_turns_play_on_with_a_critic(ppo):
    *_, (one, other), _, _ = ppo
    steps = [line for line in one if "critic/value_loss" in line]
    assert [line["env/aborted"] for line in steps] == [1 / ROWS] * 3
    assert steps[-1]["env/turns"] == (4 * 1 + 3 * 3) / 7  # the aborted one does not count


def test_the_checkpoint_of_several_ranks_has_policy_and_critic_apart(ppo):
    mode, critic, _, (weights, _), folder = ppo
    checkpoint = folder / "run" / "checkpoint-2"
    model, info = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    saved = {f"critic.{name}": value for name, value in safetensors.torch.load_file(checkpoint / CRITIC_FILE).items()}
    assert difference({**dict(model.named_parameters()), **saved}, weights["second"]) == 0.0


def test_ranks_resume_bit_equal_with_a_critic_and_end_once(launched, tmp_path):
    """In new processes."""
    runs = [run for run in RUNS + RUNS_OF_DEEPSPEED * HAS_DEEPSPEED if "-ppo-" in run]
    resumed, ended = ([run.replace("-ppo-", f"-{what}-") for run in runs] for what in ("resume", "end"))
    for run in runs:
        shutil.copytree(launched(run)[0], tmp_path / run)
        shutil.rmtree(tmp_path / run / "run" / "checkpoint-3")
    launch("distributed_worker.py", resumed + ended, tmp_path)
    for run, *again in zip(runs, resumed, ended, strict=True):
        _, (result, _), (weights, _) = launched(run)
        assert (result["kind"] == "DistributedType.FSDP") == run.startswith("fsdp")
        assert difference(weights["second"], weights["last"]) > 1e-4
        for name in again:
            assert difference(torch.load(tmp_path / name / "weights0.pt")["last"], weights["last"]) == 0.0
        end = tmp_path / run / "run"
        for name in ("model.safetensors", CRITIC_FILE):
            assert (end / name).read_bytes() == (end / "checkpoint-3" / name).read_bytes()
        assert (end / FINISHED).is_file()


@pytest.mark.parametrize(("version", "kept"), [(1, torch.bfloat16), (2, None)])
def test_fsdp2_in_bfloat16_does_not_round_what_the_model_returns(monkeypatch, version, kept):
    """The model computes log-probabilities in float32, of which accelerate's policy leaves 8 bits."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, mixed_precision_policy="bf16")

    def create(trainer):
        trainer.accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))

    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", create)
    EPOTrainer.create_accelerator_and_postprocess(EPOTrainer.__new__(EPOTrainer))
    policy = plugin.mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.bfloat16)
    assert (policy.buffer_dtype if version == 1 else policy.output_dtype) == kept
