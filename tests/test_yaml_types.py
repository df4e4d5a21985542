"""A value of a YAML file that is of another kind than its option is refused by name; a string is left to the parser."""

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from trl import ModelConfig

from epo_trl.launch import AlgorithmArguments, RecipeError, parse_recipe
from epo_trl.launch.yaml_types import check_kinds
from epo_trl.trainers import EPOConfig


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
    anything: Any = None


@pytest.mark.parametrize(
    ("name", "value", "takes"),
    [
        ("count", 2.0, "an integer"),
        ("count", True, "an integer"),
        ("count", None, "an integer"),
        ("rate", False, "a number"),
        ("rate", [1.0], "a number"),
        ("flag", 1, "true or false"),
        ("word", 5, "a string"),
        ("word", ["a"], "a string"),
        ("maybe", True, "a number or null"),
        ("late", 1.5, "an integer or null"),
        ("words", {"a": 1}, "a list or null"),
        ("words", [1], "a list or null"),
        ("numbers", [True], "a list"),
        ("pairs", ["a"], "a string or 'name: value' pairs or null"),
    ],
)
def test_another_kind_is_refused(name, value, takes):
    with pytest.raises(RecipeError) as error:
        check_kinds({name: value}, [Options], "x.yaml")
    assert str(error.value) == f"{name}: expected {takes}, got {value!r} in x.yaml"


def test_what_yaml_makes_of_no_is_explained_where_a_word_is_taken():
    for name in ("word", "choice"):
        with pytest.raises(
            RecipeError, match=f"{name}: expected a string, got False in x.yaml; YAML reads no, .* quotes"
        ):
            check_kinds({name: False}, [Options], "x.yaml")


def test_what_is_right_and_what_the_parser_reads_pass():
    right = {
        "count": 3, "rate": 1, "flag": True, "word": "no", "choice": "steps", "maybe": None, "late": None,
        "words": ["a"], "numbers": [1, 2.5, "1e-3"], "pairs": {"a": None}, "anything": object(), "elsewhere": [],
    }  # fmt: skip
    check_kinds(right, [Options], "x.yaml")
    check_kinds({name: "1e-3" for name in right}, [Options], "x.yaml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("learning_rate: no\n", "learning_rate: expected a number.*got False in .*"),
        ("save_strategy: no\n", "save_strategy: expected .*got False .* put the word in quotes"),
        ("max_turns: 2.5\n", "max_turns: expected an integer.*got 2.5 in .*"),
        ("n_train: [3]\n", "n_train: expected .*got .3. in"),  # the environment's
    ],
)
def test_a_recipe_refuses_them(text, says, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=says):
        parse_recipe(EPOConfig, ModelConfig, AlgorithmArguments, environment="alfworld", argv=["--config", str(path)])
