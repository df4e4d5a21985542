"""The data of a shop: products, and goals, which say what a customer asks for."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

NO_BOUND = 1_000_000.0  # the bound of a goal that names no price, in dollars
_BOUNDS = tuple(10.0 * i for i in range(1, 100))  # dollars


@dataclass(frozen=True, slots=True)
class Product:
    """A product as its pages show it.

    Args:
        asin: Identifier that a results page shows, in upper case.
        title: Name of the product.
        category: Department of the shop, for example `"beauty"`.
        query: Search words under which the product was found, in lower case; products of one kind share them.
        path: Names of the nested categories, outermost first.
        price: Price that is paid, in dollars.
        price_tag: Price as shown, which may be a range.
        description: Text of the page "Description"; may be empty.
        features: Lines of the page "Features".
        options: Values that can be chosen, by the name of the option, for example `{"color": ("red", "blue")}`.
        attributes: Properties that the reward compares. No page lists them.
        reviews: Title, stars (0 to 5) and text of each review on the page "Reviews".
    """

    asin: str
    title: str
    category: str
    query: str
    path: tuple[str, ...]
    price: float
    price_tag: str
    description: str = ""
    features: tuple[str, ...] = ()
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    attributes: tuple[str, ...] = ()
    reviews: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Goal:
    """A task: an instruction, and what the reward compares with the purchase.

    Args:
        product: Product that the instruction was written for. Others may satisfy it too.
        instruction: Text that the agent is shown.
        attributes: Attributes that the instruction asks for; at least one.
        options: Option values that it asks for.
        price_bound: Largest price that it allows, in dollars; `NO_BOUND` if it names none.
    """

    product: Product
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    price_bound: float


def draw_price_bound(price: float, rng: random.Random) -> float:
    """Draws the bound that an instruction names: the larger one of two of the next four multiples of 10 dollars.

    Returns `NO_BOUND` for a price of 980 dollars or more, as in the WebShop release.
    """
    above = [bound for bound in _BOUNDS if bound > price][:4]
    return max(rng.sample(above, 2)) if len(above) >= 2 else NO_BOUND


def price_clause(bound: float) -> str:
    """Returns the end of an instruction that names the bound; empty for `NO_BOUND`."""
    return "" if bound == NO_BOUND else f", and price lower than {bound:.2f} dollars"
