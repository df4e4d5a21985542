"""Our worlds give what the stock Python wrapper gives, text for text, on the gold paths of 4 of the 30 task types.

The stock engine is noisy: the order of things of one name changes from load to load, and chance depends on which calls
the wrapper makes. Both are taken away from the stock engine for the comparison (a JVM option, and a seed before each
input). One difference is meant: after an ambiguous request the stock wrapper loses
the next action, some of a gold path among them; for the comparison the request is withdrawn there too.
"""

import pytest
from scienceworld_neighbours import Strangers, as_stock, first_difference, make_stock, play, play_stock

from epo_trl.envs.scienceworld import ScienceWorldSuite

pytestmark = [pytest.mark.games, pytest.mark.slow]

# The wrapper lists the valid actions at every step, which takes most of its time. Here it does so for this type only.
LISTED = ("find-plant",)


@pytest.fixture(scope="module")
def stock():
    env = make_stock()
    yield env
    env.close()


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    suite = ScienceWorldSuite(heldout_types=[], gold_folder=str(tmp_path_factory.mktemp("gold")))
    suite._gold.generate((task_type, 0) for task_type in PATHS)
    return suite


@pytest.fixture(scope="module")
def envs(suite):
    envs = [suite.make_env() for _ in range(3)]
    yield envs
    for env in envs:
        env.close()


class Neighbour:
    """Loads another task in the middle of the episode."""

    def __init__(self, env):
        self.env, self.turn = env, 0

    def __call__(self):
        self.turn += 1
        if self.turn == 2:
            self.env.reset(options={"task_id": "train/test-conductivity/0"})


# Heat, mixtures, a search and electricity; plants that grow are below. The engine finds these paths in seconds.
PATHS = ("freeze", "chemistry-mix", "find-plant", "power-component")


@pytest.mark.parametrize("task_type", PATHS)
def test_a_gold_path_gives_what_the_stock_wrapper_gives(task_type, suite, stock, envs, monkeypatch):
    if task_type not in LISTED:
        monkeypatch.setattr(stock, "get_valid_action_object_combinations", list)
    task_id, gold = f"train/{task_type}/0", suite._gold.path(task_type, 0)
    path = gold.actions[: gold.turns]
    assert len(path) > 2
    # Once, on a busy machine, one turn of the longest path differed and never again: so a difference has to repeat.
    for _ in range(2):
        expected = list(play_stock(stock, task_id, path))
        neighbour = Neighbour(envs[1])
        _, seen = play(envs[0], task_id, len(path), path, neighbour)
        difference = first_difference(expected, as_stock(seen))
        if not difference:
            break
    assert not difference, f"{task_type}: {difference}"
    assert seen[-1][2] and seen[-1][4]["score"] == 100


def test_what_is_made_among_strangers_is_what_the_stock_wrapper_makes(stock, envs):
    env, *others, task_id = *envs, "train/grow-fruit/3"
    actions, seen = play(env, task_id, 12, between=Strangers(others, ["train/find-animal/0", "train/boil/2"], task_id))
    assert not first_difference(list(play_stock(stock, task_id, actions)), as_stock(seen))
