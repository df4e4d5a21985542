"""Where WebShop's products and goals come from: the release's files, or the generator."""

import random
from itertools import combinations

import pytest
from webshop_release import write_release

from epo_trl.envs import EnvError
from epo_trl.envs.webshop import WebShopSuite
from epo_trl.envs.webshop.generator import read_instruction
from epo_trl.envs.webshop.kinds import KINDS
from epo_trl.envs.webshop.products import NO_BOUND
from epo_trl.envs.webshop.reward import SAME, score_purchase, token_set_ratio
from epo_trl.envs.webshop.shopper import Wish

SMALL = {"n_products": 300, "n_train": 600, "n_iid": 150}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_release(tmp_path_factory.mktemp("webshop"))


def release(folder, **settings):
    return WebShopSuite(**{"webshop_data": str(folder), "instructions": "human", "n_iid": 1, "n_dev": 1, **settings})


def generate(**settings):
    return WebShopSuite(goods="generated", **{**SMALL, **settings}).shop


def test_products_are_read_as_the_release_reads_them(folder):
    products = {product.asin: product for product in release(folder).shop.products}
    assert list(products) == ["B000000001", "B000000002", "B000000003", "B000000004"]
    mug, tumbler, ranged, bare = products.values()
    assert mug.title == "Stoneware Mug with Lid" and mug.query == "coffee mug"
    assert mug.path == ("Home & Kitchen", "Dining", "Mugs")
    assert mug.options == {"color": ("navy | blue", "red"), "size": ("small", "large")}
    assert (mug.price, mug.price_tag) == (12.5, "$12.5") and mug.attributes == ("non slip", "easy clean")
    assert (tumbler.price, tumbler.price_tag, tumbler.features) == (1010.0, "$1010.0", ("One line",))
    assert 10 <= ranged.price <= 20 and ranged.price_tag == "$10.0 to $20.0" and ranged.options == {}
    assert (bare.price, bare.price_tag, bare.features, bare.description) == (100.0, "$100.0", ("",), "")
    assert bare.attributes == ()


def test_human_goals_have_attributes_and_a_known_product(folder):
    goals = {
        goal.instruction.split(", and price")[0]: goal for part in release(folder).shop.goals.values() for goal in part
    }
    assert goals.keys() == {"i want a mug", "a mug please", "a tumbler"}
    mug = goals["i want a mug"]
    assert mug.options == ("red", "large") and mug.attributes == ("non slip",) and mug.product.asin == "B000000001"
    assert mug.price_bound in (30.0, 40.0, 50.0)
    assert mug.instruction == f"i want a mug, and price lower than {mug.price_bound:.2f} dollars"
    assert goals["a tumbler"].price_bound == NO_BOUND and goals["a tumbler"].instruction == "a tumbler"


def test_synthetic_goals_combine_all_options(folder):
    goals = [goal for part in release(folder, instructions="synthetic").shop.goals.values() for goal in part]
    mugs = [goal for goal in goals if goal.product.asin == "B000000001"]
    assert sorted(goal.options for goal in mugs) == [
        ("navy | blue", "large"), ("navy | blue", "small"), ("red", "large"), ("red", "small"),
    ]  # fmt: skip
    assert len({goal.price_bound for goal in mugs}) == 1
    assert any("Find me non slip mugs with color: red, and size: small, and price" in goal.instruction for goal in mugs)
    assert len(goals) == 5  # the tumbler has no instruction


def test_goals_are_in_the_release_s_shuffled_order(folder):
    """Its tests are the first goals after `random.seed(233); random.shuffle(goals)`."""
    order = ["i want a mug", "a mug please", "a tumbler"]
    random.seed(233)
    random.shuffle(order)
    goals = release(folder).shop.goals
    assert [goals[split][0].instruction.split(", and")[0] for split in ("iid", "dev", "train")] == order


def test_a_missing_file_or_folder_is_named_with_the_fix(tmp_path, monkeypatch):
    write_release(tmp_path, without=("items_ins_v2_1000.json", "items_human_ins.json"))
    with pytest.raises(EnvError, match="items_ins_v2_1000.json, items_human_ins.json is missing.*setup.sh"):
        release(tmp_path).task_ids("iid")
    with pytest.raises(EnvError, match="items_shuffle.json, items_ins_v2.json"):
        release(tmp_path, catalogue="all").task_ids("iid")
    monkeypatch.setenv("WEBSHOP_DATA", str(tmp_path / "no"))
    with pytest.raises(EnvError, match="WEBSHOP_DATA: expected a folder, got .*no'.*--goods generated"):
        WebShopSuite()


@pytest.mark.parametrize("seed", [0, 1])
def test_no_test_goal_leaks_into_training(seed):
    goals = generate(shop_seed=seed).goals
    train, iid = goals["train"], goals["iid"]
    assert (len(train), len(iid)) == (600, 150)
    for key in (
        lambda goal: goal.instruction,
        lambda goal: goal.product.asin,
        lambda goal: (goal.product.query, frozenset(goal.attributes), frozenset(goal.options)),
    ):
        assert set(map(key, train)) & set(map(key, iid)) == set()


def test_every_generated_goal_is_met_by_its_product_and_says_what_it_wants():
    for part in generate().goals.values():
        assert len({goal.instruction for goal in part}) == len(part)
        for goal in part:
            chosen = {name: v for name, values in goal.product.options.items() for v in values if v in goal.options}
            assert score_purchase(goal, goal.product, chosen) == 1
            read = read_instruction(goal.instruction)
            assert read == Wish(goal.product.query, goal.attributes, goal.options, goal.price_bound)


def test_a_title_shows_all_but_the_hidden_attributes():
    for hidden in (0, 1, 3):
        for product in generate(hidden_attributes=hidden).products[:50]:
            absent = [attribute for attribute in product.attributes if attribute not in product.title]
            assert len(absent) == hidden
            assert all(attribute in " ".join(product.features) for attribute in product.attributes)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.query)
def test_the_reward_distinguishes_the_values_of_a_kind(kind):
    for values in (kind.attributes, *kind.options.values()):
        assert [pair for pair in combinations(values, 2) if token_set_ratio(*pair) > SAME] == []


def test_a_shop_of_chosen_departments_sells_nothing_else():
    shop = generate(departments=["grocery", "beauty"])
    assert {product.category for product in shop.products} == {"grocery", "beauty"}
