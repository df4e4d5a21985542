"""A value of a YAML file that is of another kind than its option is refused by name; a string is left to the parser."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from trl import ModelConfig
from typed import parse_recipe

from epo_trl.bounds import OneOf
from epo_trl.cli.command_line import AlgorithmArguments, CommandLine
from epo_trl.cli.options import check_types, read_settings
from epo_trl.errors import InputError
from epo_trl.trainers import EPOConfig
from epo_trl.yaml_files import read_yaml, to_yaml


@dataclass
class Options:
    """One field of each kind that a configuration has."""

    count: int = 1
    rate: float = 0.5
    flag: bool = False
    word: str = "a"
    choice: Literal["no", "steps"] = "no"
    maybe: float | None = None
    late: int = field(default=None)  # type: ignore[assignment] - as transformers has it
    words: list[str] | None = None
    numbers: list[float] = field(default_factory=list)
    pairs: dict[str, Any] | str | None = None
    both: tuple[int, int] = (1, 2)
    anything: Any = None


@pytest.mark.parametrize(
    ("name", "value", "takes"),
    [
        ("count", 2.5, "an integer"),
        ("count", True, "an integer"),
        ("count", None, "an integer"),
        ("rate", False, "a number"),
        ("rate", [1.0], "a number"),
        ("flag", 1, "true or false"),
        ("word", 5, "a string"),
        ("word", ["a"], "a string"),
        ("maybe", True, "a number"),
        ("late", 1.5, "an integer"),
        ("words", {"a": 1}, "a list"),
        ("words", [1], "a list, each element a string"),
        ("numbers", [True], "a list, each element a number"),
        ("numbers", ["1e-3"], "a list, each element a number"),
        ("pairs", ["a"], "'name: value' pairs or a string"),
        ("both", [3, 4], "another field type, such as list[...], since YAML has no tuples"),
    ],
)
def test_another_kind_is_refused(name, value, takes):
    with pytest.raises(InputError) as error:
        check_types({name: value}, [Options], Path("x.yaml"))
    hint = "; put the word in quotes" if isinstance(value, int) and takes == "a string" else ""
    assert str(error.value) == f"{name}: expected {takes}, got {value!r} in x.yaml{hint}"


def test_an_integer_written_as_a_float_is_shown_as_an_integer():
    with pytest.raises(InputError, match=r"count: expected an integer, got 50\.0 in x\.yaml; write 50$"):
        check_types({"count": 50.0}, [Options], Path("x.yaml"))


def test_what_yaml_makes_of_no_is_explained_where_a_word_is_taken():
    for name in ("word", "choice"):
        with pytest.raises(
            InputError, match=f"{name}: expected a string, got False in x.yaml; YAML reads no, .* quotes"
        ):
            check_types({name: False}, [Options], Path("x.yaml"))


def test_what_is_right_and_what_the_parser_reads_pass():
    right = {
        "count": 3, "rate": 1, "flag": True, "word": "no", "choice": "steps", "maybe": None, "late": None,
        "words": ["a"], "numbers": [1, 2.5], "pairs": {"a": None}, "anything": object(), "elsewhere": [],
    }  # fmt: skip
    check_types(right, [Options], Path("x.yaml"))
    check_types({name: "1e-3" for name in right}, [Options], Path("x.yaml"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("learning_rate: no\n", "learning_rate: expected a number.*got False in .*"),
        ("save_strategy: no\n", "save_strategy: expected a string, got False .* put the word in quotes"),
        ("dtype: bf16\n", "dtype: expected one of 'auto', 'bfloat16', 'float16', 'float32', got 'bf16'$"),
        ("max_turns: 2.5\n", "max_turns: expected an integer.*got 2.5 in .*"),
        ("n_train: [3]\n", "n_train: expected .*got .3. in"),  # the environment's
        ("on: 5\n", "--config: expected names that are strings, got True in .* put the word in quotes"),
        ("1: 5\n", "--config: expected names that are strings, got 1 in .*config.yaml$"),
        ("max_turns: 5\nmax_turns: 6\n", "--config: .*'max_turns' occurs 2 times"),
    ],
)
def test_a_recipe_refuses_them(text, says, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=says):
        parse_recipe(EPOConfig, ModelConfig, AlgorithmArguments, environment="alfworld", argv=["--config", str(path)])


def test_a_word_is_a_list_of_one_as_on_the_command_line():
    values = {"task_types": "look_at_obj_in_light", "lora_target_modules": "all-linear", "report_to": "none"}
    for line in (
        CommandLine([], None, values, "alfworld", "grpo"),
        CommandLine([f"--{name}={value}" for name, value in values.items()], None, {}, "alfworld", "grpo"),
    ):
        read = read_settings(line, EPOConfig, ModelConfig)
        assert {name: read[name] for name in values} == {
            "task_types": ["look_at_obj_in_light"], "lora_target_modules": ["all-linear"], "report_to": "none"
        }  # fmt: skip


def test_an_exponent_without_a_dot_is_a_number_wherever_it_stands(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("a: 1e-5\nb: {c: [2E3, -2.e+1]}\nd: '1e5'\ne: e5\nf: 1e5x\ng: 1e\nh: 12\n")
    expected = {"a": 1e-5, "b": {"c": [2000.0, -20.0]}, "d": "1e5", "e": "e5", "f": "1e5x", "g": "1e", "h": 12}
    assert read_yaml(file, "--config") == expected
    file.write_text(to_yaml({"z": "1e-5", **expected}))  # a study writes the configs of its runs
    assert read_yaml(file, "--config") == {"z": "1e-5", **expected}


def test_a_date_is_a_string(tmp_path):
    """JSON has no dates, and a chat template asks for text."""
    file = tmp_path / "x.yaml"
    file.write_text("a: {date_string: 2026-01-01}\nb: 2001-12-14t21:59:43.10-05:00\n")
    expected = {"a": {"date_string": "2026-01-01"}, "b": "2001-12-14t21:59:43.10-05:00"}
    assert read_yaml(file, "--config") == expected
    file.write_text(to_yaml(expected))
    assert read_yaml(file, "--config") == expected


NUMBERS = [
    ("010", "010"), ("1:30", "1:30"), ("1:30.5", "1:30.5"), ("-08", "-08"), ("+1_000:0", "+1_000:0"),
    ("0", 0), ("-12", -12), ("1_000", 1000), ("0x1F", 31), ("0b101", 5), ("0.5", 0.5), (".5", 0.5), ("1_0.5", 10.5),
    ("1.", 1.0), ("-1.5e-3", -0.0015), ("-.inf", float("-inf")), ("x1", "x1"), ("1x", "1x"), (".", "."),
]  # fmt: skip


@pytest.mark.parametrize(("written", "read"), NUMBERS)
def test_a_number_is_decimal_without_a_prefix(written, read, tmp_path):
    """YAML 1.1 takes 010 for 8 and 1:30 for 90."""
    file = tmp_path / "x.yaml"
    for text in (f"a: {written}\n", to_yaml({"a": read})):
        file.write_text(text)
        assert read_yaml(file, "--config") == {"a": read}


@pytest.mark.parametrize("text", ["a: 0x_", "a: !!int x", "a: !!timestamp 2026-02-31", f"a: {'[' * 5000}"])
def test_what_yaml_cannot_read_is_refused(text, tmp_path):
    (file := tmp_path / "x.yaml").write_text(text)
    with pytest.raises(InputError, match="--config: expected a readable YAML file, got .*x.yaml: "):
        read_yaml(file, "--config")


def test_zeros_before_an_integer_and_times_are_left_to_the_parser():
    line = CommandLine([], None, {"max_steps": "010", "run_name": "1:30"}, "alfworld", "grpo")
    read = read_settings(line, EPOConfig, ModelConfig, AlgorithmArguments)
    assert (read["max_steps"], read["run_name"]) == (10, "1:30")


def test_the_error_names_the_scales_of_rewards_that_a_config_can_have():
    with pytest.raises(InputError, match="scale_rewards: expected one of 'group', 'batch', 'none', got 'x'"):
        EPOConfig("x", use_cpu=True, scale_rewards="x")
    assert EPOConfig("x", use_cpu=True, scale_rewards=False).scale_rewards == "none"
    assert str(OneOf((0, 2, 3))) == "one of 0, 2, 3"
