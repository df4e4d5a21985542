"""The WebShop task suite, in a generated shop or with the products of the release."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from epo_trl.bounds import Count, CountOrZero, OneOf, Range, check_bounds, option
from epo_trl.envs.base import EnvError, Info, TaskSuite, split_task_id
from epo_trl.envs.webshop.env import WebShopEnv
from epo_trl.envs.webshop.generator import ATTRIBUTES, generate, read_instruction
from epo_trl.envs.webshop.kinds import KINDS
from epo_trl.envs.webshop.products import Goal
from epo_trl.envs.webshop.release import CATALOGUES, INSTRUCTIONS, data_folder, load
from epo_trl.envs.webshop.reward import spacy_nouns, title_words
from epo_trl.envs.webshop.session import PAGE_SIZE, Session, Shop
from epo_trl.envs.webshop.shopper import Shopper, Wish


@dataclass(eq=False)
class WebShopSuite(TaskSuite):
    """Products and goals of WebShop.

    A generated shop needs no download. Its train and test goals share neither a product nor a wish, and its expert
    reads the instruction and sees only what the agent is shown.

    The release's goals come in its order: the first are the test list "iid", the next ones "dev". Their expert
    **knows** what the reward compares: the instructions are free text that no script can read.

    Task ids are `"<split>/<number>"`. Files are read, and products generated, on first use.
    `EpoTrlError` if a field is invalid, or the folder of the release is missing.
    """

    # Settings that a resumed run may change: they do not change what is learned.
    MAY_CHANGE: ClassVar[frozenset[str]] = frozenset({"webshop_data"})
    protocol = "webshop-500"
    prompt_template = "webshop"

    goods: Annotated[str, OneOf(("data", "generated"))] = option(
        "data", "'data': the products in webshop_data; 'generated': an invented shop, no download."
    )
    webshop_data: str | None = option(
        None, "Folder of the release's JSON files; by default $WEBSHOP_DATA. For goods='data'."
    )
    catalogue: Annotated[str, OneOf(CATALOGUES)] = option(
        "small", "'small': the release's 1,000 products; 'all': its 1.18 million."
    )
    instructions: Annotated[str, OneOf(INSTRUCTIONS)] = option(
        "synthetic", "'human': written by people, few for the small catalogue; 'synthetic': made from the products."
    )
    n_iid: CountOrZero = option(500, "Number of test goals.")
    n_dev: CountOrZero = option(1000, "Number of the release's goals after those, which training leaves out too.")
    n_train: Count = option(4000, "Number of training goals of a generated shop.")
    n_products: Annotated[int, Range(least=5)] = option(1000, "Number of products of a generated shop.")
    hidden_attributes: Annotated[int, Range(least=0, most=ATTRIBUTES)] = option(
        1, "Number of a generated product's three attributes that only its features page shows."
    )
    departments: list[str] | None = option(
        None, "Departments of a generated shop: fashion, beauty, electronics, furniture, grocery; or all."
    )
    shop_seed: int = option(0, "Seed of the generated shop.")
    page_size: Count = option(PAGE_SIZE, "Number of products on a page of results.")
    spacy_model: str = option(
        "",
        "spaCy model that finds the nouns of titles, as in the paper, for example 'en_core_web_sm'; by default the "
        "reward compares all words of titles.",
    )
    expert_mistakes: Annotated[float, Range(least=0, below=1)] = option(
        0.0,
        "Probability that the expert buys a random product of a page unchecked, and that it leaves out an option: for "
        "imperfect demonstrations, with keep_lost.",
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        known = tuple(dict.fromkeys(kind.category for kind in KINDS))
        unknown = [name for name in self.departments or () if name not in known]
        if unknown:
            raise EnvError(f"departments: expected names from {', '.join(known)}, got {unknown[0]!r}")
        is_generated = self.goods == "generated"
        self.name = "webshop-generated" if is_generated else "webshop"
        self._folder = None if is_generated else data_folder(self.webshop_data).resolve()
        sizes = {"train": 1, "iid": self.n_iid, "dev": 0 if is_generated else self.n_dev}
        self.splits = tuple(split for split, size in sizes.items() if size)

    @property
    def shop(self) -> Shop:
        """The shop, which the suites and environments of one process share."""
        if self._folder:
            return load(self._folder, self.catalogue, self.instructions, self.n_iid, self.n_dev)
        return generate(
            self.n_products,
            self.n_train,
            self.n_iid,
            hidden_attributes=self.hidden_attributes,
            seed=self.shop_seed,
            departments=tuple(self.departments or ()),
        )

    def task_ids(self, split: str) -> list[str]:
        """Returns `"train/0"`, `"train/1"`, and so on."""
        self.check_split(split)
        return [f"{split}/{number}" for number in range(len(self.shop.goals[split]))]

    def content(self, split: str) -> list[tuple[object, ...]] | None:
        """Returns what the reward compares and the agent reads: another folder has other goals under the same ids."""
        if self.goods == "generated":
            return None
        goals = self.shop.goals[split]
        return [(g.product.asin, g.instruction, g.attributes, g.options, g.price_bound) for g in goals]

    def goal(self, task_id: str) -> Goal:
        """Returns the goal of a task id; `EnvError` if there is none."""
        goals = self.shop.goals
        split, number = split_task_id(task_id, {split: len(part) for split, part in goals.items()})
        return goals[split][number]

    def make_env(self) -> WebShopEnv:
        """Creates a fresh environment."""
        nouns = spacy_nouns(self.spacy_model) if self.spacy_model else title_words
        return WebShopEnv(lambda task_id: Session(self.shop, self.goal(task_id), self.page_size), nouns)

    def make_expert(self, seed: int = 0) -> Shopper:
        """Creates an expert; `seed` is that of its mistakes."""
        return Shopper(self._wish, self.expert_mistakes, seed)

    def _wish(self, info: Info) -> Wish:
        """Returns the wish of an episode from its first info."""
        if self.goods == "generated":
            return read_instruction(info["task"])
        goal = self.goal(info["task_id"])
        return Wish(goal.product.query, goal.attributes, goal.options, goal.price_bound, goal.product.asin)
