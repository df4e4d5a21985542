"""Every recipe config builds its config objects, and a wrong one says what is wrong."""

import importlib
import json
import sys
import warnings
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from trl import ModelConfig
from typed import parse_recipe

from epo_trl.cli import evaluation
from epo_trl.cli.evaluation import EvaluationArguments
from epo_trl.cli.imitation import DemonstrationArguments, ImitationConfig
from epo_trl.cli.options import AlgorithmArguments, read_command_line
from epo_trl.envs.registry import environment_arguments
from epo_trl.evaluation import get_protocol
from epo_trl.lab.study.config import load_study, plan
from epo_trl.trainers import EPOConfig, EPOPPOConfig

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"
OWN = {"my_env": "guess", "tools": "HighLow", "textworld_express": "textworld-express"}  # modules beside the configs
CONFIGS = sorted(path for path in RECIPES.glob("*/*.yaml") if path.parent.name not in OWN)
NAME = lambda path: f"{path.parent.name}-{path.stem}"  # noqa: E731
RL = [path for path in CONFIGS if not path.stem.startswith(("sft_", "eval_"))]
CPU = ("--bf16", "false", "--use_cpu", "true")
# A config says these even where they are the defaults: what is played, how a batch is put together, on what machine,
# whether EPO is on, and beside a success_reward of its own what an invalid action costs.
READERS_NEED = {
    "games", "max_turns", "num_generations", "per_device_train_batch_size", "gradient_accumulation_steps", "use_cpu",
    "bf16", "epo_lambda", "invalid_action_penalty", "algorithm",
}  # fmt: skip


def types_of(path):
    """Returns the classes that a config is read into, beside the environment's settings."""
    if path.stem.startswith("sft_"):
        return DemonstrationArguments, ImitationConfig, ModelConfig
    if path.stem.startswith("eval_"):
        return EvaluationArguments, ModelConfig
    return EPOPPOConfig if path.stem.startswith("ppo_") else EPOConfig, ModelConfig, AlgorithmArguments


def parse(path, *arguments):
    """Returns the suite and the config objects."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return parse_recipe(*types_of(path), argv=["--config", str(path), *arguments])


def machine(path):
    """Returns the options with which a config is read on any machine."""
    return () if path.stem.startswith("eval_") else CPU


def values(path):
    """Returns what a config says, and all that its objects hold."""
    _, *objects = parse(path, *machine(path))
    return yaml.safe_load(path.read_text()) | fields_of(objects)


def fields_of(objects):
    return {field.name: getattr(one, field.name) for one in objects for field in fields(one)}


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """The recipes can be imported, and a folder looks like the real games: only a task list would be read from it."""
    monkeypatch.syspath_prepend(str(RECIPES))
    (tmp_path / "json_2.1.1" / "train").mkdir(parents=True)
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    monkeypatch.setenv("WEBSHOP_DATA", str(tmp_path))


@pytest.mark.parametrize("path", RL, ids=NAME)
def test_an_rl_config_builds(path, monkeypatch):
    monkeypatch.setattr(EPOConfig, "world_size", 8 if "8gpu" in path.stem else 1, raising=False)
    suite, args, model_args, _ = parse(path, *CPU)
    assert args.generation_batch_size % args.num_generations == 0
    if args.eval_strategy != "no":
        assert args.eval_steps % 1 == 0 and args.save_steps % args.eval_steps in (0, args.save_steps)
    assert suite.name.startswith(path.parent.name)
    assert model_args.model_name_or_path


@pytest.mark.parametrize(
    ("path", "model", "rl_steps", "own"),
    [
        ("alfworld/qwen2.5-3b_8gpu.yaml", "Qwen/Qwen2.5-3B-Instruct", 150, {"smoothing_alpha": 0.1, "max_turns": 50}),
        (
            "scienceworld/qwen2.5-7b_8gpu.yaml",
            "Qwen/Qwen2.5-7B-Instruct",
            125,
            {"smoothing_alpha": 0.05, "max_turns": 30},
        ),
    ],
)
def test_the_paper_s_table_is_the_8_gpu_config(path, model, rl_steps, own, monkeypatch):
    monkeypatch.setattr(EPOConfig, "world_size", 8, raising=False)
    _, args, model_args, _ = parse(RECIPES / path, *CPU)
    assert model_args.model_name_or_path == model
    assert args.generation_batch_size == 128 and args.num_generations == 8
    assert args.total_rl_steps(args.max_steps, args.tasks_per_rl_step * 1000) == rl_steps
    table = {
        **own, "epo_lambda": 0.001, "smoothing_beta_start": 2.0, "smoothing_beta_end": 1.0,
        "smoothing_decay": 3.0, "kappa_low": 0.0, "kappa_high": 2.0, "history_length": 2,
        "max_prompt_length": 2048, "max_completion_length": 512, "learning_rate": 5e-6, "epsilon": 0.2, "beta": 0.01,
        "success_reward": 10.0, "invalid_action_penalty": 0.1, "temperature": 1.0, "weight_decay": 0.01,
        "loss_type": "dapo", "num_iterations": 1, "max_grad_norm": 1.0, "context": "windowed", "vllm_mode": "colocate",
    }  # fmt: skip
    assert {name: getattr(args, name) for name in table} == table
    assert args.eval_steps == 5 * args.micro_steps_per_rl_step / args.gradient_accumulation_steps


@pytest.mark.parametrize(
    ("path", "rate"), [("alfworld/ppo_qwen2.5-3b_8gpu.yaml", 5e-6), ("scienceworld/ppo_qwen2.5-7b_8gpu.yaml", 3e-6)]
)
def test_the_paper_s_ppo_is_the_8_gpu_config(path, rate, monkeypatch):
    monkeypatch.setattr(EPOConfig, "world_size", 8, raising=False)
    _, args, *_ = parse(RECIPES / path, *CPU)
    table = {
        "generation_batch_size": 128, "num_generations": 1, "learning_rate": rate, "critic_learning_rate": rate,
        "gamma": 1.0, "gae_lambda": 1.0, "critic": "separate", "epsilon": 0.2, "beta": 0.01,
        "bootstrap_truncated": False,
    }  # fmt: skip
    assert {name: getattr(args, name) for name in table} == table


PPO = [path for path in RL if path.stem.startswith("ppo_")]


@pytest.mark.parametrize("path", PPO, ids=NAME)
def test_ppo_differs_from_grpo_in_groups_and_critic_alone(path):
    """Same games, rules, sampling and budget of updates: what is compared is the method."""
    ppo, grpo = (values(p) for p in (path, path.with_name(path.name.removeprefix("ppo_"))))
    own = {field.name for field in fields(EPOPPOConfig)} - {field.name for field in fields(EPOConfig)}
    differ = {key for key in ppo.keys() | grpo.keys() if ppo.get(key) != grpo.get(key)}
    assert "gae_lambda" in differ
    allowed = {"algorithm", "credit", "num_generations", "output_dir", "scale_rewards", "vllm_enable_sleep_mode"}
    if path.stem == "ppo_qwen2.5-1.5b_1gpu":
        allowed |= {"tokens_per_pass", "vllm_gpu_memory_utilization"}  # two models have activations
    if path.stem == "ppo_qwen2.5-7b_8gpu":
        allowed.add("learning_rate")  # the paper's table
    assert differ - own <= allowed


@pytest.mark.parametrize("name", ["alfworld", "alfworld-real", "scienceworld", "webshop"])
def test_every_algorithm_of_make_train_has_its_recipe_and_config(name):
    from make_train import ALGORITHMS, ENVIRONMENTS

    environment = ENVIRONMENTS[name]
    assert {"grpo", "grpo_epo", "ppo", "ppo_epo"} <= ALGORITHMS.keys()
    assert (RECIPES / environment.folder / f"sft_tiny_cpu{environment.ending}.yaml").is_file()
    for algorithm in ALGORITHMS.values():
        assert (RECIPES / f"{environment.folder}_{algorithm.recipe}").is_file()
        config = RECIPES / environment.folder / f"{algorithm.config}{environment.ending}.yaml"
        parse(config, *algorithm.overrides)


@pytest.mark.parametrize("path", sorted(path for name in OWN for path in RECIPES.glob(f"{name}/*.yaml")), ids=NAME)
def test_a_config_beside_its_environment_is_read_from_anywhere(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    suite, *_ = parse(path, *machine(path))
    assert suite.name == OWN[path.parent.name] and len(suite.task_ids("train")) >= 200


@pytest.mark.parametrize("path", CONFIGS, ids=NAME)
def test_a_config_repeats_no_default_but_those_that_a_reader_needs(path):
    written, world = yaml.safe_load(path.read_text()), path.parent.name
    _, *objects = parse_recipe(*types_of(path), environment=world, argv=machine(path))
    default = fields_of([environment_arguments(world)(), *objects])
    now = values(path)
    assert {key for key in written if key in default and now[key] == default[key]} <= READERS_NEED


@pytest.mark.parametrize(
    ("environment", "ending", "in_all", "in_tests"),
    [
        ("alfworld", "", ("games", "task_types", "room_types", "max_receptacles"), ("n_iid", "n_ood")),
        ("alfworld", "_real", ("games",), ()),
        ("scienceworld", "", ("task_types", "heldout_types", "tests_per_type"), ()),
        ("webshop", "", ("goods", "departments", "n_products", "hidden_attributes", "page_size"), ("n_iid",)),
    ],
)
def test_training_and_evaluation_of_the_tiny_model_use_the_same_lists_and_prompts(
    environment, ending, in_all, in_tests
):
    names = ("tiny_cpu", "eval_tiny_cpu", "sft_tiny_cpu")
    read = {name: values(RECIPES / environment / f"{name}{ending}.yaml") for name in names}
    for key in (*in_all, "prompt_template", "max_prompt_length"):
        assert len({str(config[key]) for config in read.values()}) == 1, key
    assert read["tiny_cpu"]["history_length"] == read["sft_tiny_cpu"]["history_length"]
    played = get_protocol(read["eval_tiny_cpu"]["protocol"])
    assert read["tiny_cpu"]["context"] == read["sft_tiny_cpu"]["context"] == played.context
    for key in (*in_tests, "protocol", "max_completion_length"):
        assert read["tiny_cpu"][key] == read["eval_tiny_cpu"][key], key


def test_a_pretrained_model_s_warm_start_shows_the_prompts_of_its_rl():
    warm, rl = (values(RECIPES / "alfworld" / f"{name}.yaml") for name in ("sft_pretrained", "pretrained"))
    same = ("games", "task_types", "room_types", "max_receptacles", "prompt_template", "history_length", "few_shot")
    for key in (*same, "max_prompt_length", "max_turns", "use_peft"):
        assert warm[key] == rl[key], key
    assert rl["model_name_or_path"] == warm["output_dir"]
    played = yaml.safe_load((RECIPES / "alfworld" / "eval_pretrained.yaml").read_text())["protocol"]
    for name in (rl["protocol"], played):
        assert get_protocol(name).max_turns == warm["max_turns"] == rl["max_turns"]
    assert warm["prompt_label_rate"] == 0 and warm["max_length"] > warm["max_prompt_length"]


def evaluate(*arguments):
    config = str(RECIPES / "alfworld" / "eval_tiny_cpu.yaml")
    evaluation.main(read_command_line(["--config", config, "--model_name_or_path", "tiny", *arguments]))


def test_the_evaluation_recipe_reports_each_list(tmp_path, capsys):
    output = tmp_path / "report.json"
    evaluate("--eval_episodes", "3", "--max_completion_length", "4", "--output", str(output))
    reports = json.loads(output.read_text())["reports"]
    assert [(report["split"], report["episodes"]) for report in reports] == [("iid", 3), ("ood", 3)]
    assert "alfworld-tiny20" in capsys.readouterr().out


def test_the_evaluation_of_the_pretrained_recipe_plays_its_lists_as_its_run_does():
    files = (RECIPES / "alfworld" / f"{name}.yaml" for name in ("pretrained", "eval_pretrained"))
    rl, own = (yaml.safe_load(file.read_text()) for file in files)
    assert own == {name: rl[name] for name in own} and {"n_iid", "max_prompt_length", "protocol"} <= own.keys()


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(ROOT.glob("studies/*.yaml")), ids=lambda path: path.stem)
def test_the_recipes_take_the_configs_of_a_shipped_study(path, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(RECIPES))
    evolution = importlib.import_module("agent_evol").EvolutionArguments
    study = load_study(path)
    runs = {run.arm: run for run in plan(study, tmp_path)}.values()  # seeds differ in nothing to check
    assert study.question and runs
    for run in [*runs, *{run.needs.recipe: run.needs for run in runs if run.needs}.values()]:
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(dict(run.settings)))
        types = types_of(run.config)
        if run.recipe.stem == "agent_evol":
            types = (evolution, *types[1:])
        any_environment = run.recipe.stem in ("sft", "train", "agent_evol")
        environment = None if any_environment else run.recipe.stem.partition("_")[0]
        argv = ["--config", str(tmp_path / "config.yaml"), *CPU]
        monkeypatch.syspath_prepend(str(run.config.parent))  # as the study does
        parse_recipe(*types, environment=environment, argv=argv)
