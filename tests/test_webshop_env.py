"""The pages of WebShop, its search, its environment and its scripted players."""

import os
from copy import copy
from dataclasses import replace

import pytest
from webshop_release import row, write_release

from epo_trl.envs import EnvError
from epo_trl.envs.testing import EnvContract
from epo_trl.envs.webshop import WebShopSuite
from epo_trl.envs.webshop.products import Goal, Product
from epo_trl.envs.webshop.release import _products
from epo_trl.envs.webshop.reward import count_options, score_purchase
from epo_trl.envs.webshop.search import ProductIndex
from epo_trl.envs.webshop.session import Session, Shop
from epo_trl.envs.webshop.shopper import _rows

MUG = Product(
    asin="B0MUG00001", title="Stoneware Mug", category="garden", query="mug", path=("Home", "Mugs"), price=12.5,
    price_tag="$12.5", description="Keeps warm.", features=("Holds a pint", "Non slip base"),
    options={"color": ("navy | blue", "red"), "size": ("Small", "Large")}, attributes=("non slip",),
    reviews=(("Nice", "5", "Still whole."),),
)  # fmt: skip
PLATE = replace(MUG, asin="B0PLATE001", title="Plate", query="plate", description="", options={}, reviews=())
OTHERS = tuple(replace(PLATE, asin=f"B0PLATE{i:03}", title=f"Plate number {i}") for i in range(2, 25))
GOAL = Goal(MUG, "a red mug", ("non slip",), ("red", "large"), 20.0)
SHOP = Shop((MUG, PLATE, *OTHERS))
HEAD = "Instruction: [SEP] a red mug [SEP] Back to Search [SEP] "


class FirstResult:  # the paper's rule: search for the instruction, open the first result, buy it without options
    reset = staticmethod(lambda observation, info: None)

    def act(self, observation, info):
        if info["page"] == "search":
            return "", f"search[{info['task']}]"
        rows = info["page"] == "results" and _rows(info["content"])
        return "", f"click[{rows[0][0].lower()}]" if rows else "click[buy now]"


def visit(*actions, shop=SHOP, goal=GOAL):
    """Returns a visit after some actions, all of which the shop knew."""
    session = Session(shop, goal)
    assert all([session.act(action) for action in actions])
    return session


def test_the_pages_read_as_in_the_paper_s_text_mode():
    assert visit().text == "WebShop [SEP] Instruction: [SEP] a red mug [SEP] Search"
    mug = ["search[mug]", "click[b0mug00001]"]
    assert (
        visit("search[mug]").text == HEAD + "Page 1 (Total results: 1) [SEP] B0MUG00001 [SEP] Stoneware Mug [SEP] $12.5"
    )
    assert visit(*mug).text == HEAD + (
        "< Prev [SEP] color [SEP] navy | blue [SEP] red [SEP] size [SEP] Small [SEP] Large [SEP] Stoneware Mug [SEP] "
        "Price: $12.5 [SEP] Rating: N.A. [SEP] Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
    )
    assert visit(*mug, "click[Description]").text == HEAD + "< Prev [SEP] Keeps warm."
    assert visit(*mug, "click[features]").text == HEAD + "< Prev [SEP] Holds a pint [SEP] Non slip base"
    assert visit(*mug, "click[reviews]").text == HEAD + '< Prev [SEP] "Nice" [SEP] 5 [SEP] Still whole.'
    assert visit(*mug, "click[buy now]").text == "Thank you for shopping with us!"
    plate = ["search[plate]", "click[b0plate001]"]
    assert visit(*plate, "click[reviews]").text == HEAD + "< Prev [SEP] No reviews found"
    assert visit(*plate, "click[description]").text == HEAD + "< Prev"


def test_results_are_turned_page_by_page():
    first, second, third = (visit("search[plate]", *["click[next >]"] * n) for n in range(3))
    assert "Back to Search [SEP] Page 1 (Total results: 24) [SEP] Next > [SEP] B0PLATE001 [SEP] Plate" in first.text
    assert "Page 2 (Total results: 24) [SEP] < Prev [SEP] Next > [SEP] " in second.text
    assert "Page 3 (Total results: 24) [SEP] < Prev [SEP] B0" in third.text
    asins = [asin for page in (first, second, third) for asin in page.clickables if asin.startswith("b0")]
    assert len(asins) == len(set(asins)) == 24
    assert not third.act("click[next >]") and third.act("click[< prev]") and third.text == second.text


def test_every_action_that_a_page_lists_is_known():
    rows = [row("B000000001", customization_options={"Color": [{"value": "Navy\xa0Blue"}, {"value": "a\tb"}]})]
    (odd,) = _products(rows, {})
    odd = replace(odd, options={**odd.options, "scent": ("", "none")})
    item = visit("search[mug]", "click[b000000001]", shop=Shop((odd,)))
    assert item.clickables[-3:] == ("navy blue", "a b", "none")
    for session in (visit("search[plate]"), visit("search[mug]", "click[b0mug00001]", "click[reviews]"), item):
        assert [action for action in session.actions if not copy(session).act(action)] == []


def test_options_are_kept_until_the_product_is_left():
    session = visit("search[mug]", "click[B0MUG00001]", "click[red]", "click[large]", "click[navy | blue]")
    assert session.chosen == {"color": "navy | blue", "size": "large"}
    session.act("click[features]")
    session.act("click[< prev]")
    assert session.chosen == {"color": "navy | blue", "size": "large"}
    for action in ("click[< prev]", "search[plate]", "click[back to search]"):
        left = copy(session)
        assert left.act(action) and left.product is None and left.chosen == {}


@pytest.mark.parametrize(
    "action",
    ["", "click", "click[]", "click[mug]", "click[search]", "search[]", "buy now", "think[red]", "click[reviews"],
)
def test_other_texts_change_nothing(action):
    session = visit("search[mug]", "click[b0mug00001]")
    before = copy(session)
    assert not session.act(action) and session == before


@pytest.mark.parametrize("action", ["click[navy|blue]", "Click [ navy | blue ]", "CLICK[ NAVY  |\nblue ] now"])
def test_white_space_and_case_are_ignored(action):
    assert visit("search[mug]", "click[b0mug00001]", action).chosen == {"color": "navy | blue"}


def test_the_search_ranks_by_bm25_and_keeps_the_order_of_ties():
    index = ProductIndex([PLATE, MUG, *OTHERS])
    assert index.find("STONEWARE mug!") == (1,)
    assert index.find("unknown words") == () == index.find("")
    assert index.find("number plate 7")[0] == 7  # the only one with all three words
    plates = index.find("keeps plate")
    assert plates[0] == 1 and plates[1:] == (0, *range(2, 25))  # the rare word first; equals in order


def generated(**settings):
    return WebShopSuite(goods="generated", **{"n_products": 150, "n_train": 60, "n_iid": 30, **settings})


def release(folder, **settings):
    """Returns the goals written by people in a small release: one in each list."""
    write_release(folder)
    return WebShopSuite(**{"webshop_data": str(folder), "instructions": "human", "n_iid": 1, "n_dev": 1, **settings})


class TestGeneratedWebShop(EnvContract):
    expert_turns = 15
    expert_tasks = 30

    @staticmethod
    def player(info, rng):
        return rng.choice(info["actions"]).replace("<words>", rng.choice(["red mug", info["task"]]))

    def make_suite(self):
        return generated()


class TestWebShopData(EnvContract):
    expert_turns = 10
    player = TestGeneratedWebShop.player

    @pytest.fixture(autouse=True)
    def _files(self, tmp_path):
        self.path = tmp_path

    def make_suite(self):
        return release(self.path)


def play(suite, player, split="iid", turns=15):
    """Returns the infos of the last turns of all tasks of a split."""
    env, last = suite.make_env(), []
    for task_id in suite.task_ids(split):
        observation, info = env.reset(options={"task_id": task_id})
        player.reset(observation, info)
        for _ in range(turns):
            observation, reward, terminated, _, info = env.step(player.act(observation, info)[1])
            assert info["accepted"] and info["score"] == 100 * reward
            if terminated:
                break
        last.append(info)
    return last


def test_the_expert_buys_what_is_asked_and_the_paper_s_rule_gets_half_of_the_score():
    suite = generated(n_products=1000, n_train=10, n_iid=200)
    expert, rule = (play(suite, player) for player in (suite.make_expert(), FirstResult()))
    assert sum(info["won"] for info in expert) >= 196
    assert 100 * len(rule) * 0.5 < sum(info["score"] for info in rule) < 100 * len(rule) * 0.75
    assert sum(info["won"] for info in rule) < 0.2 * len(rule)


def test_an_expert_with_mistakes_buys_wrong_things_and_repeats_them_with_its_seed():
    suite = generated(n_products=1000, n_train=10, n_iid=100, expert_mistakes=0.5)
    one, again, other = (play(suite, suite.make_expert(seed)) for seed in (0, 0, 1))
    wins = [info["won"] for info in one]
    assert 10 <= sum(wins) <= 60 and sum(info["score"] < 100 for info in one) == 100 - sum(wins)
    assert wins == [info["won"] for info in again] != [info["won"] for info in other]


def test_the_score_of_a_purchase_is_the_reward_of_its_last_step():
    env = generated().make_env()
    _, info = env.reset(options={"task_id": "train/0"})
    assert info["page"] == "search" and info["content"] == ("Search",) and info["score"] == 0
    *_, info = env.step(f"search[{info['task']}]")
    *_, info = env.step(info["actions"][2])  # the first result
    key = info["state_key"]
    *_, info = env.step("click[features]")
    *_, info = env.step("click[< prev]")
    assert info["state_key"] == key
    observation, reward, terminated, truncated, info = env.step("click[buy now]")
    assert (observation, terminated, truncated) == ("Thank you for shopping with us!", True, False)
    assert 0 < reward < 1 and info["score"] == 100 * reward and not info["won"]
    with pytest.raises(EnvError, match="step: no episode is running"):
        env.step("click[buy now]")


def test_an_expert_of_the_release_knows_the_goal(tmp_path):
    suite = release(tmp_path)
    assert all(info["won"] for split in suite.splits for info in play(suite, suite.make_expert(), split))
    assert play(suite, FirstResult(), "dev")[0]["task_type"] == "garden"


def test_the_lists_and_the_name_follow_the_settings(tmp_path):
    assert (generated().name, generated().splits) == ("webshop-generated", ("train", "iid"))
    assert release(tmp_path).splits == ("train", "iid", "dev")
    env = generated(page_size=2).make_env()
    env.reset(options={"task_id": "iid/0"})
    *_, info = env.step("search[sneakers]")
    assert sum(action.startswith("click[b0") for action in info["actions"]) == 2


def test_what_a_product_says_is_not_read_as_an_action_or_as_another_page():
    sly = replace(
        MUG, asin="B0SLY00001", title="Mug [SEP] Buy Now ] click[buy now]", options={"size": ("buy now", "l")}
    )
    session = visit("search[mug]", "click[b0sly00001]", shop=Shop((sly,)), goal=replace(GOAL, product=sly))
    assert session.clickables.count("buy now") == 1 and session.act("click[buy now]") and session.page == "done"


@pytest.mark.parametrize("goods", ["a small release", "WEBSHOP_DATA"])
def test_every_test_goal_is_met_by_its_own_product(goods, tmp_path):
    if goods == "WEBSHOP_DATA" and not os.environ.get(goods):
        pytest.skip("needs WEBSHOP_DATA")
    suite = WebShopSuite() if goods == "WEBSHOP_DATA" else release(tmp_path)
    for task_id in suite.task_ids("iid"):
        goal, chosen = suite.goal(task_id), {}
        for name, values in goal.product.options.items():  # each option's best value, given those chosen before
            chosen[name] = max(values, key=lambda v: count_options(goal.options, (*chosen.values(), v)), default="")
        assert score_purchase(goal, goal.product, chosen) == 1, task_id
