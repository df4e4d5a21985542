"""Every accelerate config in the tree is one that accelerate reads and makes its objects from."""

import importlib.util
import os
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

CONFIGS = sorted((Path(__file__).parents[1] / "accelerate_configs").glob("*.yaml"))
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")


def test_there_is_an_accelerate_config_for_every_setting():
    names = {"cpu", "single_gpu", "multi_gpu", "zero2", "zero3", "zero3_offload", "zero3_2nodes", "fsdp2"}
    assert {path.stem for path in CONFIGS} == names


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_reads_the_config_and_refuses_unknown_keys(path, tmp_path):
    config = load_config_from_file(str(path))
    assert config.num_processes == (1 if path.stem in {"cpu", "single_gpu"} else 8 * config.num_machines)
    assert config.num_machines == (2 if path.stem == "zero3_2nodes" else 1)
    assert config.mixed_precision == ("no" if path.stem == "cpu" else "bf16")
    assert bool(config.use_cpu) == (path.stem == "cpu")
    broken = tmp_path / "broken.yaml"
    broken.write_text(path.read_text() + "num_proceses: 2\n")
    with pytest.raises(ValueError, match="num_proceses"):
        load_config_from_file(str(broken))


@pytest.fixture
def launched(monkeypatch):
    """Returns a function that sets the variables which `accelerate launch` gives its processes for a config."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    def launch(path, *options):
        args = launch_command_parser().parse_args(["--config_file", str(path), *options, "train.py"])
        args, defaults, _ = _validate_launch_command(args)
        if args.use_deepspeed:  # as accelerate's launch_command does
            args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        env = prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else prepare_multi_gpu_env(args)
        for name, value in env.items():
            if os.environ.get(name) != value:
                monkeypatch.setenv(name, value)
        return args

    return launch


@needs_deepspeed
@pytest.mark.parametrize(
    ("name", "stage", "offload"),
    [("zero2", 2, "none"), ("zero3", 3, "none"), ("zero3_offload", 3, "cpu"), ("zero3_2nodes", 3, "none")],
)
def test_a_zero_config_makes_its_plugin_and_leaves_accumulation_to_the_trainer(name, stage, offload, launched):
    from accelerate import DeepSpeedPlugin

    path = CONFIGS[0].with_name(f"{name}.yaml")
    launched(path, "--main_process_port", "0")  # any that is free: accelerate looks whether it is
    plugin = DeepSpeedPlugin()
    zero = plugin.deepspeed_config["zero_optimization"]
    assert zero["stage"] == plugin.zero_stage == stage
    assert (zero["offload_optimizer"]["device"], zero["offload_param"]["device"]) == (offload, offload)
    # without it a checkpoint under ZeRO-3 has no weights that load alone
    assert zero["stage3_gather_16bit_weights_on_model_save"] == (stage == 3)
    assert "gradient_accumulation_steps" not in load_config_from_file(str(path)).deepspeed_config


@needs_deepspeed
def test_two_nodes_are_half_of_the_processes_each_and_find_each_other_by_address_and_rank(launched):
    path = CONFIGS[0].with_name("zero3_2nodes.yaml")
    args = launched(path, "--machine_rank", "1", "--main_process_ip", "node0")
    assert (args.nnodes, args.node_rank, args.nproc_per_node) == ("2", 1, "8")
    assert (args.rdzv_backend, args.rdzv_endpoint) == ("static", "node0:29500")


def test_the_fsdp_config_makes_its_plugin(launched):
    from accelerate import FullyShardedDataParallelPlugin

    launched(CONFIGS[0].with_name("fsdp2.yaml"))
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True
    assert plugin.state_dict_type.name == "FULL_STATE_DICT" and plugin.cpu_ram_efficient_loading
