"""The data of a shop: products, and goals, which say what a customer asks for."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

NO_BOUND = 1_000_000.0  # the bound of a goal that names no price, in dollars
_BOUNDS = tuple(10.0 * i for i in range(1, 100))  # dollars


@dataclass(frozen=True, slots=True)
class Product:
    """A product as its pages show it."""

    asin: str  # identifier that a results page shows, in upper case
    title: str
    category: str  # department of the shop, for example `"beauty"`
    query: str  # search words under which the product was found, in lower case; products of one kind share them
    path: tuple[str, ...]  # names of the nested categories, outermost first
    price: float  # price that is paid, in dollars
    price_tag: str  # price as shown, which may be a range
    description: str = ""  # text of the page "Description"; may be empty
    features: tuple[str, ...] = ()  # lines of the page "Features"
    # Values that can be chosen, by the name of the option, for example `{"color": ("red", "blue")}`.
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    attributes: tuple[str, ...] = ()  # properties that the reward compares. No page lists them
    # Title, stars (0 to 5) and text of each review on the page "Reviews".
    reviews: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Goal:
    """A task: an instruction, and what the reward compares with the purchase."""

    product: Product  # product that the instruction was written for. Others may satisfy it too
    instruction: str  # text that the agent is shown
    attributes: tuple[str, ...]  # attributes that the instruction asks for; at least one
    options: tuple[str, ...]  # option values that it asks for
    price_bound: float  # largest price that it allows, in dollars; `NO_BOUND` if it names none


def draw_price_bound(price: float, rng: random.Random) -> float:
    """Draws the bound that an instruction names: the larger one of two of the next four multiples of 10 dollars.

    Returns `NO_BOUND` for a price of 980 dollars or more, as in the WebShop release.
    """
    above = [bound for bound in _BOUNDS if bound > price][:4]
    return max(rng.sample(above, 2)) if len(above) >= 2 else NO_BOUND


def price_clause(bound: float) -> str:
    """Returns the end of an instruction that names the bound; empty for `NO_BOUND`."""
    return "" if bound == NO_BOUND else f", and price lower than {bound:.2f} dollars"
