"""The two WebShop task suites: a generated shop, and the products of the release."""

from __future__ import annotations

import os
from abc import abstractmethod
from functools import lru_cache

from epo_trl.envs.base import EnvError, Expert, Info, TaskSuite
from epo_trl.envs.webshop.env import WebShopEnv
from epo_trl.envs.webshop.generator import ShopSettings, generate, read_instruction
from epo_trl.envs.webshop.products import Catalogue, Goal
from epo_trl.envs.webshop.release import ReleaseSettings, data_folder, load
from epo_trl.envs.webshop.reward import Nouns, spacy_nouns
from epo_trl.envs.webshop.session import Shop
from epo_trl.envs.webshop.shopper import Shopper, Wish

PAGE_SIZE = 10  # products on a page of results, as in the release
Settings = ShopSettings | ReleaseSettings


@lru_cache(maxsize=4)
def _shop(settings: Settings, page_size: int) -> Shop:
    """Returns the shop of these settings; environments of one process share it."""
    return Shop(_catalogue(settings), page_size)


def _catalogue(settings: Settings) -> Catalogue:
    return generate(settings) if isinstance(settings, ShopSettings) else load(settings)


@lru_cache(maxsize=2)
def _nouns(model: str) -> Nouns | None:
    return spacy_nouns(model) if model else None


class _WebShopSuite(TaskSuite):
    """The common part of both suites. Task ids are `"<split>/<number>"`."""

    protocol = "webshop-500"
    prompt_template = "webshop"

    def __init__(self, shop: Settings, page_size: int, spacy_model: str, expert_mistakes: float) -> None:
        if page_size < 1:
            raise EnvError(f"page_size: expected an integer >= 1, got {page_size}")
        if not 0 <= expert_mistakes < 1:
            raise EnvError(f"expert_mistakes: expected a number from 0 and below 1, got {expert_mistakes}")
        self.shop, self.page_size, self.spacy_model = shop, page_size, spacy_model
        self.expert_mistakes = expert_mistakes

    def task_ids(self, split: str) -> list[str]:
        """Returns `"train/0"`, `"train/1"`, and so on."""
        self.check_split(split)
        return [f"{split}/{number}" for number in range(len(_catalogue(self.shop).goals[split]))]

    def goal(self, task_id: str) -> Goal:
        """Returns the goal of a task id.

        Raises:
            EnvError: If there is none.
        """
        split, _, number = task_id.partition("/")
        goals = _catalogue(self.shop).goals
        if not number.isdecimal() or int(number) >= len(goals.get(split, ())):
            known = ", ".join(f"'{name}/0' to '{name}/{len(part) - 1}'" for name, part in goals.items())
            raise EnvError(f"task_id: expected {known}, got {task_id!r}")
        return goals[split][int(number)]

    @property
    def nouns(self) -> Nouns | None:
        """Function that lists the nouns of a title; `None` for all words."""
        return _nouns(self.spacy_model)

    def make_env(self) -> WebShopEnv:
        """Creates a fresh environment."""
        return WebShopEnv(lambda: _shop(self.shop, self.page_size), self.goal, self.nouns)

    def make_expert(self, seed: int = 0) -> Expert:
        """Creates a `Shopper`; `seed` is that of its mistakes."""
        return Shopper(self._wish, self.expert_mistakes, seed)

    @abstractmethod
    def _wish(self, info: Info) -> Wish:
        """Returns the wish of an episode from its first info."""


class GeneratedWebShop(_WebShopSuite):
    """Goals in a generated shop. Needs no download. Train and test goals share neither a product nor a wish.

    The expert reads the instruction and sees only what the agent is shown.

    Args:
        shop: Settings of the shop.
        page_size: Number of products on a page of results.
        spacy_model: Name of a spaCy model that finds the nouns of titles; `""`: all words count, see `title_words`.
        expert_mistakes: See `Shopper`.
    """

    name = "webshop-generated"

    def __init__(
        self,
        shop: ShopSettings | None = None,
        *,
        page_size: int = PAGE_SIZE,
        spacy_model: str = "",
        expert_mistakes: float = 0.0,
    ) -> None:
        settings = shop or ShopSettings()
        super().__init__(settings, page_size, spacy_model, expert_mistakes)
        self.splits = ("train", "iid") if settings.n_iid else ("train",)

    def _wish(self, info: Info) -> Wish:
        return read_instruction(info["task"])


class WebShopData(_WebShopSuite):
    """Goals of the WebShop release, in its order: the first are the test list "iid", the next ones "dev".

    The expert **knows** what the reward compares: the instructions are free text that no script can read.

    Args:
        path: Folder of the release's JSON files; `$WEBSHOP_DATA` if `None`.
        catalogue: `"small"` or `"all"`.
        instructions: `"human"` or `"synthetic"`.
        n_iid: Number of test goals.
        n_dev: Number of goals of "dev".
        page_size: Number of products on a page of results.
        spacy_model: Name of a spaCy model that finds the nouns of titles; `""`: all words count.
        expert_mistakes: See `Shopper`.

    Raises:
        EnvError: If there is no such folder. Files are read on first use.
    """

    name = "webshop"

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        catalogue: str = "small",
        instructions: str = "synthetic",
        n_iid: int = 500,
        n_dev: int = 1000,
        *,
        page_size: int = PAGE_SIZE,
        spacy_model: str = "",
        expert_mistakes: float = 0.0,
    ) -> None:
        folder = str(data_folder(path).resolve())
        release = ReleaseSettings(folder, catalogue, instructions, n_iid, n_dev)
        super().__init__(release, page_size, spacy_model, expert_mistakes)
        sizes = {"train": 1, "iid": n_iid, "dev": n_dev}
        self.splits = tuple(split for split, size in sizes.items() if size)

    def content(self, split: str) -> list[tuple[object, ...]]:
        """Returns what the reward compares and the agent reads: another folder has other goals under the same ids."""
        goals = _catalogue(self.shop).goals[split]
        return [(g.product.asin, g.instruction, g.attributes, g.options, g.price_bound) for g in goals]

    def _wish(self, info: Info) -> Wish:
        return Wish.known(self.goal(info["task_id"]))
