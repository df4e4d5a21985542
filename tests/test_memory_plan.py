"""The plan of a run on numbers computed by hand, its rates from a log, and the command."""

import dataclasses
import json
from importlib import import_module

import pytest
from test_memory import SHAPE
from trainer_kit import make_trainer

from epo_trl.cli import main
from epo_trl.launch.command_line import RecipeError
from epo_trl.launch.plain_settings import plain_settings
from epo_trl.memory import GPUS, Assumed, Hardware, Machines, Run, find_hardware, make_plan, memory_per_gpu, read_rates
from epo_trl.memory.batch import WITH_SCORES, batch_of, count_evaluations, count_passes
from epo_trl.memory.rates import compute_rates
from epo_trl.memory.report import as_json, as_text, print_table, shown
from epo_trl.memory.speed import Turn, forward_flops, reading_flops, sampling_speed
from epo_trl.methods.base import Need
from epo_trl.methods.registry import METHODS

# 2 x 4 x 2 GPUs = 16 episodes, 8 tasks, 4 updates, 10 RL steps.
SETTINGS = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "steps_per_generation": 4, "num_iterations": 1,
    "num_generations": 2, "max_steps": 40, "context": "windowed", "max_turns": 6, "max_prompt_length": 10,
    "max_completion_length": 5, "beta": 0.0, "eval_strategy": "steps", "eval_steps": 20, "eval_on_start": True,
}  # fmt: skip
GPU = Hardware("card", gpu_gb=5, tflops=1e-6, bandwidth_gb_s=1e-6)
TURN = Turn(turns=3, prompt=10, response=5)
VLLM = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.2}
LOGGED = {"completions/mean_length": 30.0, "env/turns": 5.0, "time/env": 1.0, "time/text": 1.0}


def plan(settings=SETTINGS, server_gpus=0, rates=None, gpus=2, **assumed):
    return make_plan(settings, set(settings), SHAPE, Machines(GPU, gpus, server_gpus), Assumed(**assumed), rates)


# ------------------------------------------------------------------------------------------------------- the formulas


def test_operations_and_speed_are_those_computed_by_hand():
    """372 weights on 45 tokens, the head's 400 on 15 responses, attention 2 x 4 x 3 turns x 15²; all times 2."""
    assert SHAPE.matrix_parameters == 372
    assert forward_flops(SHAPE, TURN, 16) == 2 * 16 * (372 * 45 + 400 * 15 + 2 * 4 * 3 * 15**2) == 900_480
    assert forward_flops(SHAPE, TURN, 16, head=False) == 900_480 - 2 * 16 * 6000
    assert reading_flops(SHAPE, TURN, 16) == 2 * 16 * (372 * 30 + 2 * 4 * 3 * 10**2)
    whole = dataclasses.replace(TURN, concatenated=True)
    assert forward_flops(SHAPE, whole, 16) == 2 * 16 * (372 * 45 + 400 * 15 + 2 * 4 * 45**2)
    # a token of 8 episodes: 2 x 1172 bytes of weights, and 16 bytes of keys and values for each of 12.5 tokens
    assert sampling_speed(SHAPE, TURN, 8, bandwidth=2344 + 8 * 16 * 12.5) == 8.0
    assert sampling_speed(SHAPE, TURN, 8, bandwidth=3944.0, gpus=2) == 8.0  # an engine of both: twice as fast
    assert sampling_speed(SHAPE, whole, 8, bandwidth=2344 + 8 * 16 * 22.5) == 8.0


@pytest.mark.parametrize(
    ("changes", "policy", "critic"),
    [
        ({}, 3 + 1, 0),  # the batch makes several updates, so the old log-probabilities are computed too
        ({"gradient_accumulation_steps": 4}, 3, 0),
        ({"gradient_accumulation_steps": 4, **VLLM}, 3 + 1, 0),
        ({"gradient_accumulation_steps": 4, **VLLM, "vllm_importance_sampling_correction": False}, 3, 0),
        ({"gradient_checkpointing": True, "beta": 0.01}, 4 + 1 + 1, 0),
        ({"use_peft": True, "entropy_method": ["epo", "ref-nucleus"]}, 2 + 1 + 1, 0),
        ({"num_iterations": 2}, 2 * 3 + 1, 0),
        # no old log-probabilities, so the scores of the behaviour policy need a pass; otherwise it is the same pass
        ({"gradient_accumulation_steps": 4, "entropy_method": ["epo", "ea"]}, 3 + 1, 0),
        ({"gradient_accumulation_steps": 4, "entropy_method": "kl-cov"}, 3 + 1, 0),
        ({"entropy_method": ["epo", "ea"]}, 3 + 1, 0),
        ({"beta": 0.01, "entropy_method": ["epo", "ref-nucleus"]}, 3 + 1 + 2, 0),
        ({"algorithm": "ppo", "critic": "separate"}, 3 + 1, 3 + 1),
        ({"algorithm": "ppo", "critic": "separate", "critic_use_peft": True, "num_iterations": 2}, 7, 2 * 2 + 1),
        ({"algorithm": "ppo", "critic": "value_head"}, 3 + 1, 0),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_each_setting_adds_its_passes(changes, policy, critic):
    settings = SETTINGS | changes
    passes = count_passes(settings, batch_of(settings, 2).rounds)
    assert (passes.policy, passes.critic) == (policy, critic)


def test_the_methods_that_need_scores_are_known():
    found = {name: named_class(place) for slot in METHODS.values() for name, place in slot.items()}
    assert {name for name, kind in found.items() if Need.SCORES in kind.needs} == WITH_SCORES


def named_class(place):
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def test_adapters_take_their_own_memory():
    """Rank 2 on each linear layer: 2 layers x 2 x (4 x 4 + 2 x 6 + 3 x 14) = 280 weights in fp32, of 4 bytes."""
    assert SHAPE.adapter_parameters(2) == 280
    parts = memory_per_gpu(SHAPE, Run(gpus=1, zero_stage=0, batch_tokens=10, lora_rank=2))
    assert [parts[name] for name in ("weights", "gradients", "optimizer", "reference")] == [
        2 * 1172 + 4 * 280, 4 * 280, 8 * 280, 0,
    ]  # fmt: skip
    both = memory_per_gpu(SHAPE, Run(gpus=1, zero_stage=0, batch_tokens=10, lora_rank=2, critic=True))
    assert both["gradients"] == 4 * 280 + 2 * 776  # a critic that is trained whole
    both = memory_per_gpu(SHAPE, Run(gpus=1, zero_stage=0, batch_tokens=10, lora_rank=2, critic=True, critic_lora=True))
    assert both["gradients"] == 2 * 4 * 280


# ----------------------------------------------------------------------------------------------------------- the plan


def test_a_plan_is_as_computed_by_hand():
    found = plan(turns=3, tokens_per_second=12, mfu=0.5, env_seconds=0.01, eval_episodes=8)
    expected = {
        "batch": {"episodes of an RL step": 16, "tasks of an RL step": 8, "optimizer steps of an RL step": 4,
                  "RL steps": 10},
        "tokens": {"sampled in an RL step": 240, "read in an RL step": 480, "of the run": 7200},
        "seconds of an RL step": {"reading prompts": 433_920 / 1e6, "sampling": 240 / 24, "environments": 0.24,
                                  "update": 4 * 900_480 / 1e6, "all": 14.27584},
        # played at the start and after 20 and 40 steps, at half of an RL step's episodes
        "run": {"training": 142.7584 / 3600, "evaluations": 3 * 0.5 * 10.67392 / 3600, "all": 158.76928 / 3600,
                "GPU-hours": 2 * 158.76928 / 3600},
    }  # fmt: skip
    for part, values in expected.items():
        assert {name: found.value(part, name) for name in values} == pytest.approx(values), part


def test_memory_is_that_of_the_longest_episodes_of_the_config():
    found = plan(SETTINGS | VLLM | {"max_turns": 7}, turns=3)
    run = Run(gpus=2, batch_tokens=2 * 7 * 15, reference=False, gradient_checkpointing=False)
    own = memory_per_gpu(SHAPE, run)["total"] / 1e9
    assert found.value("memory of a GPU", "all") == pytest.approx(own + 0.2 * 5)
    assert not found.fits  # 4 GB of overhead, and 1 GB of vLLM
    assert "DOES NOT FIT on 5 GB" in as_text(found)
    assert plan(SETTINGS | VLLM | {"vllm_enable_sleep_mode": True}, turns=3).fits


def test_without_numbers_limits_are_taken_and_said_to_be_limits():
    found = plan(SETTINGS | VLLM)
    values = {row.name: (row.value, row.because) for row in found.rows if row.part == "a turn"}
    assert values == {
        "turns of an episode": (6, "at most: max_turns"),
        "prompt of a turn": (10, "at most: max_prompt_length"),
        "response of a turn": (5, "at most: max_completion_length"),
    }
    assert any("a run stays below them" in line for line in found.left_out)
    (row,) = (row for row in found.rows if row.name == "sampling")
    # half of 1000 bytes a second: 2344 + 8 x 200 bytes for 8 tokens
    assert row.value == pytest.approx(16 * 6 * 5 / 2 / (8 * 500 / 3944))
    evaluations = [row.because for row in found.rows if row.name == "evaluations"]
    assert evaluations == ["left out: 3, and the number of episodes is unknown; set eval_episodes"]
    two_lists_of_4 = plan(SETTINGS | VLLM | {"eval_episodes": 4})
    assert two_lists_of_4.rows == plan(SETTINGS | VLLM, eval_episodes=8).rows


def test_a_server_generates_on_its_own_gpus_which_are_paid_too():
    settings = SETTINGS | VLLM | {"vllm_mode": "server"}
    alone, served = plan(SETTINGS | VLLM, tokens_per_second=12), plan(settings, server_gpus=4, tokens_per_second=12)
    for name, factor in {"sampling": 2, "reading prompts": 2, "update": 1, "environments": 1}.items():
        assert alone.value("seconds of an RL step", name) == pytest.approx(
            factor * served.value("seconds of an RL step", name)
        )
    assert served.value("run", "GPU-hours") == pytest.approx(6 * served.value("run", "all"))
    assert not any(row.name == "vLLM beside it" for row in served.rows)


@pytest.mark.parametrize(
    ("changes", "given", "message"),
    [
        ({"num_generations": 3}, {}, "num_generations: expected a divisor of 16, .*got 3"),
        ({"max_steps": -1}, {}, "max_steps: expected an integer >= 1, got -1"),
        ({"max_turns": "many"}, {}, "max_turns: expected an integer >= 1.*got 'many'"),
        ({"steps_per_generation": None, "generation_batch_size": 6}, {}, "generation_batch_size: .*got 6"),
        ({"use_vllm": False}, {}, "tokens_per_second: expected a number > 0, got nothing"),
        ({"context": "concatenated"}, {}, "prompt_tokens: expected .*got nothing"),
        ({}, {"mfu": 30}, "mfu: expected a number above 0, at most 1.*got 30"),
        ({}, {"turns": 0}, "turns: expected a number > 0.*got 0"),
        ({}, {"env_seconds": float("nan")}, "env_seconds: expected a number >= 0.*got nan"),
        ({}, {"server_gpus": 2}, "server_gpus: expected 0.*got 2 with vllm_mode 'colocate'"),
        ({"vllm_mode": "server"}, {}, "server_gpus: expected .*vllm_mode 'server'.*got 0"),
    ],
    ids=lambda value: ",".join(value) or "-" if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_is_missing_or_impossible_is_named(changes, given, message):
    with pytest.raises(ValueError, match=message):
        plan(SETTINGS | VLLM | changes, **given)


def test_the_sizes_of_a_batch_follow_from_what_is_set():
    unset = SETTINGS | {"steps_per_generation": None, "gradient_accumulation_steps": 8}
    assert (batch_of(unset, 2).episodes, batch_of(unset, 2).updates) == (32, 1)
    assert batch_of(unset | {"generation_batch_size": 64}, 2).rounds == 16
    assert batch_of(SETTINGS | {"max_steps": -1}, 2, rl_steps=7).rl_steps == 7
    assert count_evaluations(SETTINGS, 10, 4) == 3
    assert count_evaluations(SETTINGS | {"eval_steps": 0.25}, 10, 4) == 1 + 4  # a share of the run
    assert count_evaluations(SETTINGS | {"eval_strategy": "no"}, 10, 4) == 1


def test_a_gpu_is_found_by_name_or_by_its_numbers():
    assert find_hardware("h100") is not None and find_hardware("h100").tflops == GPUS["H100"].tflops
    assert find_hardware("A100", gpu_gb=40) == dataclasses.replace(GPUS["A100"], gpu_gb=40)
    assert find_hardware(None, 24, 100, 500) == Hardware("GPU", 24, 100, 500)
    with pytest.raises(ValueError, match="gpu: expected one of A100-40GB, A100, H100.*got 'K80'"):
        find_hardware("K80")
    with pytest.raises(ValueError, match="gpu: expected one of .*; got no gpu and no tflops, bandwidth_gb_s"):
        find_hardware(None, gpu_gb=24)
    with pytest.raises(ValueError, match="tflops: expected a number > 0.*got -1"):
        find_hardware("H100", tflops=-1)


# ---------------------------------------------------------------------------------------------------------- the rates


def test_rates_are_those_of_a_log_whatever_its_steps():
    """4 updates are an RL step; a process plays 2 x 4 episodes of 5 turns."""
    settings = SETTINGS | {"model": "m", "world_size": 2}
    played = {"time/generate": 10.0, "rollout/prompt_tokens": 8.0, **LOGGED}
    twice = [{"step": 2, "time/update": 90, **played, "time/generate": 99.0}, {"step": 4, "time/update": 4.0}]
    twice += [{"step": 6, "time/update": 3.0, **played}, {"step": 8, "time/update": 5.0}, {"step": 8, "eval_x": 1}]
    found = compute_rates(twice, settings, "run")
    # 12 seconds of updates in 1.5 RL steps
    assert (found.update_seconds, found.generate_seconds, found.env_seconds) == (8 / 40, 10 / 40, 2 / 40)
    assert (found.turns, found.response_tokens, found.prompt_tokens) == (5, 6, 8)
    assert found.about == "m on 2 process(es)"
    once = [{"step": 8, **played, "time/update": 90.0}, {"step": 16, **played, "time/update": 8.0}]
    assert compute_rates(once, settings, "run").update_seconds == 8 / 40
    del once[1]["rollout/prompt_tokens"]
    assert compute_rates(once, settings, "run").prompt_tokens is None
    with pytest.raises(ValueError, match="rates: expected .*got 0 in run"):
        compute_rates(once[:1], settings, "run")


def test_a_plan_by_rates_is_the_measured_time_of_as_many_turns():
    settings = SETTINGS | {"model": "m", "world_size": 2}
    log = [{"step": step, "time/update": 8.0, "time/generate": 10.0, **LOGGED} for step in (4, 8)]
    rates = compute_rates(log, settings, "run")
    found = plan(rates=rates)
    seconds = {"generation": 10, "environments": 2, "update": 8, "all": 20}
    assert {name: found.value("seconds of an RL step", name) for name in seconds} == pytest.approx(seconds)
    assert found.value("a turn", "response of a turn") == 6 and found.value("a turn", "prompt of a turn") == 10
    assert plan(SETTINGS | {"steps_per_generation": 8}, rates=rates).value("seconds of an RL step", "all") == 40
    assert plan(rates=rates, turns=2.5).value("seconds of an RL step", "update") == 4


def test_the_rates_of_a_real_run_add_up_to_its_steps(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=3, save_strategy="steps", save_steps=3)
    trainer.train()
    rates = read_rates(tmp_path)
    logged = [entry for entry in trainer.state.log_history if "time/update" in entry][1:]
    turns = len(trainer.last_episodes) * rates.turns
    seconds = (rates.generate_seconds + rates.env_seconds + rates.update_seconds) * turns
    assert seconds == pytest.approx(sum(entry["step_time"] for entry in logged) / 2, rel=1e-3)
    played = [turn for episode in trainer.last_episodes for turn in episode.turns]
    prompts = sum(len(turn.prompt_ids) for turn in played) / len(played)
    responses = sum(len(turn.response_ids) for turn in played) / len(trainer.last_episodes)
    assert logged[-1]["rollout/prompt_tokens"] == pytest.approx(prompts)
    assert logged[-1]["completions/mean_length"] == pytest.approx(responses)


def test_a_folder_without_a_log_is_named(tmp_path):
    with pytest.raises(ValueError, match=rf"rates: expected .*got {tmp_path}, which has no checkpoint"):
        read_rates(tmp_path)
    with pytest.raises(ValueError, match="rates: expected the output_dir of a run, got .*which is not a folder"):
        read_rates(tmp_path / "none")
    checkpoint = tmp_path / "checkpoint-2"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text('{"log_history": []}')
    with pytest.raises(ValueError, match="epo_state.json cannot be read"):
        read_rates(tmp_path)
    (checkpoint / "epo_state.json").write_text('{"settings": {}}')
    with pytest.raises(ValueError, match="rates: expected the log of an RL run"):
        read_rates(tmp_path)


# -------------------------------------------------------------------------------------------------------- the command


def test_the_settings_of_a_config_are_those_that_are_said_and_the_defaults():
    settings, said = plain_settings("alfworld/ppo_qwen2.5-3b_8gpu", ["--max_turns", "30", "--seed=7"])
    assert (settings["algorithm"], settings["num_generations"], settings["max_turns"]) == ("ppo", 1, 30)
    assert (settings["max_prompt_length"], settings["critic"], settings["seed"]) == (2048, "separate", 7)
    assert {"max_turns", "seed", "beta"} <= said and "max_prompt_length" not in said
    with pytest.raises(RecipeError, match="--max_turn: expected a field of a training config; did you mean max_turns"):
        plain_settings("alfworld/tiny_cpu", ["--max_turn", "30"])
    with pytest.raises(RecipeError, match="options: expected pairs.*got '30'"):
        plain_settings("alfworld/tiny_cpu", ["30"])


def test_the_command_plans_a_shipped_config(capsys):
    words = ["memory", "--config", "alfworld/qwen2.5-3b_8gpu", "--gpus", "8", "--gpu", "H100"]
    assert main([*words, "--json", "--turns", "20"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["title"] == "Qwen2.5-3B, 8 x H100" and found["fits"] is True
    numbers = {part: {name: row["value"] for name, row in rows.items()} for part, rows in found["plan"].items()}
    assert numbers["batch"] == {"episodes of an RL step": 128, "tasks of an RL step": 16,
                                "optimizer steps of an RL step": 16, "RL steps": 150}  # fmt: skip
    assert numbers["tokens"]["sampled in an RL step"] == 128 * 20 * 512
    assert all(row["because"] for row in found["plan"]["seconds of an RL step"].values())
    assert main([*words, "--max_turns", "10"]) == 0
    out = capsys.readouterr().out
    assert "at most: max_turns" in out and "GPU-hours" in out and "\x1b" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--json"], "--json: expected only with --config, got True"),
        (["--config", "trap/tiny_cpu", "--critic"], "--critic: expected only without --config"),
        (["--config", "trap/tiny_cpu"], "--gpus: expected one number of training GPUs with --config, got nothing"),
        (["--config", "trap/tiny_cpu", "--gpus", "1"], "gpu: expected one of A100"),
        (
            ["--config", "trap/tiny_cpu", "--gpus", "1", "--gpu", "L4"],
            "model_name_or_path: expected an existing folder",
        ),
        (
            ["--config", "trap/sft_tiny_cpu", "--gpus", "1", "--gpu", "L4"],
            "model_name_or_path: expected a folder or a Hub id, got 'tiny'",
        ),
        (["--config", "no/such", "--gpus", "1", "--gpu", "L4"], "--config: expected a YAML file"),
        (
            ["--config", "trap/tiny_cpu", "--gpus", "1", "--gpu", "L4", "--mfu", "2"],
            "mfu: expected a number above 0, at most 1, got 2.0",
        ),
    ],
)
def test_a_wrong_word_is_one_line(words, message, capsys):
    assert main(["memory", *words]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"epo-trl: error: {message}") and err.count("\n") == 1


def test_a_plan_can_be_read_in_every_form(capsys):
    found = plan(SETTINGS | VLLM)
    hostile = dataclasses.replace(found, left_out=("a\x1b[31m run",))
    print_table(hostile)
    table = capsys.readouterr().out
    assert "sampling" in table and "rests on" in table and "\x1b[31m" not in table + as_text(hostile)
    assert json.loads(as_json(found))["plan"]["run"]["GPU-hours"]["unit"] == "GPU-h"
    assert [shown(value) for value in (2_457_600_000, 14.27584, 0.00123, 7.0)] == [
        "2,457,600,000",
        "14.3",
        "0.00123",
        "7",
    ]
