"""Every accelerate config in the tree is one that accelerate reads."""

from pathlib import Path

import pytest

CONFIGS = sorted((Path(__file__).parents[1] / "accelerate_configs").glob("*.yaml"))


def test_there_is_an_accelerate_config_for_every_setting():
    assert {path.stem for path in CONFIGS} == {"cpu", "single_gpu", "multi_gpu", "zero2", "zero3"}


@pytest.fixture(scope="module")
def load_config():
    from accelerate.commands.config.config_args import load_config_from_file

    return lambda path: load_config_from_file(str(path))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_reads_the_config_without_unknown_keys(path, load_config):
    config = load_config(path)
    assert config.num_processes == (1 if path.stem in {"cpu", "single_gpu"} else 8)
    assert config.mixed_precision == ("no" if path.stem == "cpu" else "bf16")
    assert bool(config.use_cpu) == (path.stem == "cpu")


@pytest.mark.parametrize("path", [path for path in CONFIGS if path.stem.startswith("zero")], ids=lambda path: path.stem)
def test_a_zero_config_names_its_stage_and_leaves_accumulation_to_the_trainer(path, load_config):
    deepspeed = load_config(path).deepspeed_config
    assert deepspeed["zero_stage"] == int(path.stem[-1])
    assert "gradient_accumulation_steps" not in deepspeed


def test_an_unknown_key_is_refused(tmp_path, load_config):
    broken = tmp_path / "broken.yaml"
    broken.write_text(CONFIGS[0].read_text() + "num_proceses: 2\n")
    with pytest.raises(ValueError, match="num_proceses"):
        load_config(broken)
