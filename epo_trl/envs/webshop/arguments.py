"""Settings of WebShop for recipes and configs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from epo_trl.bounds import option
from epo_trl.envs.base import EnvError, TaskSuite
from epo_trl.envs.webshop.generator import ShopSettings
from epo_trl.envs.webshop.webshop_suite import PAGE_SIZE, GeneratedWebShop, WebShopData

GOODS = ("data", "generated")


@dataclass
class WebShopArguments:
    """The choice of WebShop products and goals."""

    # Settings that a resumed run may change: they do not change what is learned.
    MAY_CHANGE: ClassVar[frozenset[str]] = frozenset({"webshop_data"})

    goods: str = option("data", "'data': the products in webshop_data; 'generated': an invented shop, no download.")
    webshop_data: str | None = option(
        None, "Folder of the release's JSON files; by default $WEBSHOP_DATA. For goods='data'."
    )
    catalogue: str = option("small", "'small': the release's 1,000 products; 'all': its 1.18 million.")
    instructions: str = option(
        "synthetic", "'human': written by people, few for the small catalogue; 'synthetic': made from the products."
    )
    n_iid: int = option(500, "Number of test goals.")
    n_dev: int = option(1000, "Number of the release's goals after those, which training leaves out too.")
    n_train: int = option(4000, "Number of training goals of a generated shop.")
    n_products: int = option(1000, "Number of products of a generated shop.")
    hidden_attributes: int = option(
        1, "Number of a generated product's three attributes that only its features page shows."
    )
    departments: list[str] | None = option(
        None, "Departments of a generated shop: fashion, beauty, electronics, furniture, grocery; or all."
    )
    shop_seed: int = option(0, "Seed of the generated shop.")
    page_size: int = option(PAGE_SIZE, "Number of products on a page of results.")
    spacy_model: str = option(
        "",
        "spaCy model that finds the nouns of titles, as in the paper, for example 'en_core_web_sm'; by default the "
        "reward compares all words of titles.",
    )
    expert_mistakes: float = option(
        0.0,
        "Probability that the expert buys a random product of a page unchecked, and that it leaves out an option: for "
        "imperfect demonstrations, with keep_lost. (from 0 to below 1)",
    )

    def make_suite(self) -> TaskSuite:
        """Creates the task suite.

        Raises:
            EnvError: If a field is invalid, or the folder of the data is missing.
        """
        if self.goods == "data":
            return WebShopData(
                self.webshop_data,
                self.catalogue,
                self.instructions,
                self.n_iid,
                self.n_dev,
                page_size=self.page_size,
                spacy_model=self.spacy_model,
                expert_mistakes=self.expert_mistakes,
            )
        if self.goods != "generated":
            raise EnvError(f"goods: expected one of {', '.join(GOODS)}, got {self.goods!r}")
        sizes = self.n_products, self.n_train, self.n_iid, self.hidden_attributes
        shop = ShopSettings(*sizes, self.shop_seed, tuple(self.departments or ()))
        return GeneratedWebShop(
            shop, page_size=self.page_size, spacy_model=self.spacy_model, expert_mistakes=self.expert_mistakes
        )
