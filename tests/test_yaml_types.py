"""A value of a YAML file is read as on the command line, and refused where the command line would refuse it."""

import pytest
from trl import ModelConfig
from typed import parse_recipe

from epo_trl.cli.options import AlgorithmArguments, CommandLine, RecipeParser, read_settings
from epo_trl.errors import InputError
from epo_trl.trainers import EPOConfig
from epo_trl.yaml_files import read_yaml, to_yaml

TYPES = (EPOConfig, ModelConfig, AlgorithmArguments)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_turns: 2.5", "--max_turns.*: invalid int value: '2.5'"),
        ("max_turns: null", "max_turns: expected an integer >= 1, got None"),
        ("learning_rate: no", "--learning_rate.*: invalid float value: 'False'"),
        ("save_strategy: no", "--save_strategy.*: invalid choice: 'False' .choose from 'no', "),
        ("n_train: [3]", "n_train: expected an integer >= 0, got .3."),  # the environment's
        ("max_turnz: 5", "--max_turnz: no option of epo-trl; did you mean --max_turns"),
        ("max_turnz: null", "--max_turnz: no option of epo-trl; did you mean --max_turns"),
        ("dtype: bf16", "--dtype: invalid choice: 'bf16' .choose from 'auto', 'bfloat16', 'float16', 'float32'"),
        ("max_turns: much", "--max_turns.*: invalid int value: 'much'"),
        ("on: 5", "--config: expected a YAML file with 'name: value' pairs"),
        ("max_turns: 5\nmax_turns: 6", "--config: .*'max_turns' occurs more than once"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_name(text, says, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(f"{text}\n")
    with pytest.raises(InputError, match=says):
        parse_recipe(*TYPES, environment="alfworld", argv=["--config", str(path)])


def test_what_is_right_and_what_the_parser_reads_pass():
    """A word is a list of one, as on the command line, and a number may be in quotes."""
    words = {"task_types": "look_at_obj_in_light", "report_to": "none", "learning_rate": "1e-3", "max_turns": "7"}
    others = {"kappa_high": 3, "max_steps": 5, "use_cpu": True, "method_kwargs": {"a": None}, "eval_episodes": None}
    for values, options in ((words | others, []), (others, [f"--{name}={value}" for name, value in words.items()])):
        read = read_settings(CommandLine(options, None, values, "alfworld", "grpo"), *TYPES)
        assert {name: read[name] for name in (*words, *others)} == {
            **others, "task_types": ["look_at_obj_in_light"], "report_to": "none", "learning_rate": 1e-3,
            "max_turns": 7,
        }  # fmt: skip


def test_the_command_line_overrides_the_yaml_file():
    line = CommandLine(
        ["--max_turns=7", "--no_require_think"], None, {"max_turns": "9", "n_iid": 2}, "alfworld", "grpo"
    )
    parser = RecipeParser(line, TYPES)
    read, _ = parser.parse_known_args(parser.words)
    assert (read.max_turns, read.require_think, read.n_iid) == (7, False, 2)


def test_an_exponent_without_a_dot_is_a_number_wherever_it_stands(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("a: 1e-5\nb: {c: [2E3, -2.e+1]}\nd: '1e5'\ne: e5\nf: 1e5x\ng: 1e\nh: 12\n")
    expected = {"a": 1e-5, "b": {"c": [2000.0, -20.0]}, "d": "1e5", "e": "e5", "f": "1e5x", "g": "1e", "h": 12}
    assert read_yaml(file, "--config") == expected
    file.write_text(to_yaml({"z": "1e-5", **expected}))  # a study writes the configs of its runs
    assert read_yaml(file, "--config") == {"z": "1e-5", **expected}
