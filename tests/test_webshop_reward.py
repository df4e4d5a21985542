"""The reward of WebShop, on goals and purchases that were worked out by hand."""

import random
from dataclasses import replace

import pytest

from epo_trl.envs import EnvError
from epo_trl.envs.webshop.products import NO_BOUND, Goal, Product, draw_price_bound, price_clause
from epo_trl.envs.webshop.reward import (
    has_attribute,
    kind_factor,
    score_purchase,
    spacy_nouns,
    title_words,
    token_set_ratio,
)

MUG = Product(
    asin="B000000001",
    title="Acme Stoneware Coffee Mug",
    category="kitchen",
    query="coffee mug",
    path=("Home & Kitchen", "Kitchen & Dining", "Mugs"),
    price=18.5,
    price_tag="$18.5",
    description="Keeps a drink warm. Dishwasher safe.",
    features=("Made of clay", "BPA free lid"),
    options={"color": ("navy blue", "red"), "size": ("small", "large")},
    attributes=("non slip", "easy clean"),
)
GOAL = Goal(MUG, "i need a mug", ("non slip", "easy clean"), ("navy blue", "large"), 30.0)
RIGHT = {"color": "navy blue", "size": "large"}


def score(product=MUG, chosen=RIGHT, goal=GOAL):
    return score_purchase(goal, product, chosen)


@pytest.mark.parametrize(
    ("product", "chosen", "total"),
    [
        (MUG, RIGHT, 1.0),
        (MUG, {}, 3 / 5),  # 2 attributes and the price of 2 + 2 + 1
        (MUG, {"color": "red", "size": "large"}, 4 / 5),
        (replace(MUG, price=30.01), RIGHT, 4 / 5),
        (replace(MUG, price=30.0), RIGHT, 1.0),
        (replace(MUG, attributes=("easy clean",)), RIGHT, 4 / 5),
        (replace(MUG, attributes=()), {}, 1 / 5),
    ],
)
def test_each_missed_part_costs_its_share(product, chosen, total):
    assert score(product, chosen) == total


def test_a_goal_without_options_counts_attributes_and_price_alone():
    goal = replace(GOAL, options=(), attributes=("easy clean",))
    assert score(goal=goal) == 1.0  # options that were not asked for cost nothing
    assert score(replace(MUG, price=99.0), goal=goal) == 1 / 2


def test_the_kind_multiplies_the_share():
    other = replace(MUG, title="Acme Lamp", query="lamp", path=("Tools", "Lamps"))
    assert score(other) == 1.0  # 1 of 4 words
    assert score(replace(other, title="Zenith Lamp")) == 0.0
    half = replace(GOAL, product=replace(MUG, title="Acme Stoneware Coffee Mug Kiln Fired"))
    assert score(other, {}, half) == 0.5 * 3 / 5  # 1 of 6 words


LONG = replace(MUG, title=" ".join(f"word{chr(97 + i)}" for i in range(20)), query="a", path=("p", "q"))


@pytest.mark.parametrize(
    ("shared", "query", "path", "factor"),
    [
        (0, "a", ("p", "q"), 0.0),  # nothing of the title agrees: even the same search words do not help
        (1, "a", ("p", "q"), 0.1),  # 1/20 < 0.1
        (2, "b", ("x", "y"), 0.5),  # 0.1
        (4, "b", ("p", "y"), 0.5),  # 0.2, and one category in common is not enough
        (4, "b", ("q", "p"), 1.0),  # two are, in any order
        (2, "a", ("x", "y"), 1.0),
        (5, "b", ("x", "y"), 1.0),  # 0.25 > 0.2
    ],
)
def test_the_kind_follows_the_paper_s_four_cases(shared, query, path, factor):
    words = [f"word{chr(97 + i)}" for i in range(shared)]
    bought = replace(LONG, title=" ".join(["other", *words]), query=query, path=path)
    assert kind_factor(LONG, bought, title_words) == factor


def test_a_goal_without_nouns_is_matched_by_search_words_or_categories():
    nameless = replace(MUG, title="12345")
    assert kind_factor(nameless, replace(MUG, query="x", path=()), title_words) == 0.5
    assert kind_factor(nameless, MUG, title_words) == 1.0


@pytest.mark.parametrize(
    ("wanted", "has"),
    [
        ("easy clean", True),
        ("easy to clean", True),  # the words of the attribute are among these
        ("slip non", True),
        ("easy cleaning", True),  # 20/23 of the letters: a ratio of 87
        ("bpa free", True),  # in the features
        ("dishwasher safe", True),  # in the description
        ("stoneware", True),  # in the title
        ("machine washable", False),
    ],
)
def test_an_attribute_is_found_in_the_list_and_in_the_texts(wanted, has):
    assert has_attribute(MUG, wanted) is has


@pytest.mark.parametrize(
    ("one", "other", "ratio"),  # thefuzz 0.22, on rapidfuzz 3
    [
        ("navy blue", "light blue", 62),
        ("long sleeve", "long sleeves", 96),
        ("x-large", "large", 100),
        ("black", "block", 80),
        ("Red, RED", "red", 100),
        ("", "red", 0),
        ("a b", "c d", 33),
    ],
)
def test_the_ratio_is_that_of_the_release(one, other, ratio):
    assert token_set_ratio(one, other) == token_set_ratio(other, one) == ratio


def test_the_words_of_a_title_are_neither_numbers_nor_function_words():
    assert title_words("Pack of 2 Men's T-Shirts for the Gym, 100% Cotton") == (
        *("pack", "men's", "t-shirts", "gym", "cotton"),
    )


def test_the_price_bound_is_one_of_the_next_four_tens_but_never_the_first():
    drawn = {draw_price_bound(18.5, random.Random(seed)) for seed in range(100)}
    assert drawn == {30.0, 40.0, 50.0}
    assert draw_price_bound(985.0, random.Random(0)) == NO_BOUND
    assert price_clause(30.0) == ", and price lower than 30.00 dollars" and price_clause(NO_BOUND) == ""


def test_a_spacy_model_that_is_missing_is_named_with_the_fix():
    with pytest.raises(EnvError, match="spacy_model: .*'no_such_model'.*spacy download no_such_model"):
        spacy_nouns("no_such_model")
