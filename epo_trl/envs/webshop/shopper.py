"""Scripted players of WebShop: an expert, and the rule of the paper as a weak baseline."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from epo_trl.envs.base import Info
from epo_trl.envs.webshop.session import BUY, NEXT, PREVIOUS

Step = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Wish:
    """What a shopper looks for."""

    query: str  # the kind of product
    attributes: tuple[str, ...]  # that the product must have
    options: tuple[str, ...]  # values to choose
    price_bound: float  # largest price, in dollars
    asin: str = ""  # identifier of the product to buy, if it is known; then its attributes are not checked


class Shopper:
    """Searches for the goal, opens the products whose titles fit best, checks them, chooses the options and buys.

    It judges products by what their pages show. If the search finds nothing that fits, it buys the last product seen.

    `read_wish` returns the wish of an episode from the first info. `mistakes` is the probability that it opens a random
    product of a page and buys it unchecked, and that it leaves out an option.
    """

    def __init__(self, read_wish: Callable[[Info], Wish], mistakes: float = 0.0, seed: int = 0) -> None:
        self._read_wish = read_wish
        self._mistakes, self._rng = mistakes, random.Random(seed)

    def reset(self, observation: str, info: Info) -> None:
        """Starts an episode."""
        self._wish = self._read_wish(info)
        self._rejected: set[str] = set()
        self._opened = ""
        self._clicked: set[str] = set()  # options of the opened product that are chosen or left out
        self._unchecked = bool(self._wish.asin)  # whether it buys the opened product whatever its pages say
        self._checked: set[str] = set()  # wished attributes that the opened product has

    def act(self, observation: str, info: Info) -> Step:
        """Returns `(thought, action)`; the thought gives the reason."""
        match info["page"]:
            case "search":
                words = " ".join((*self._wish.attributes, self._wish.query, *self._wish.options))
                return "i search for what is asked", f"search[{words}]"
            case "results":
                return self._choose(info)
            case "item":
                return self._inspect(info)
        self._checked |= self._named(" ".join(info["content"]))
        return "i have read this page", _click(PREVIOUS)

    def _choose(self, info: Info) -> Step:
        rows = _rows(info["content"])
        fitting = [row for row in rows if self._fits(*row)]
        if not fitting and _click(NEXT) in info["actions"]:
            return "nothing here fits", _click(NEXT)
        choices = fitting or rows
        if not choices:
            return "nothing was found, so i search for less", f"search[{self._wish.query}]"
        best = max(choices, key=lambda row: len(self._named(row[1])))  # the first of equals
        if self._slips():
            best, self._unchecked = self._rng.choice(rows), True
        self._opened, self._checked, self._clicked = best[0], self._named(best[1]), set()
        return "this one fits best", f"click[{best[0].lower()}]"

    def _fits(self, asin: str, title: str, price: str) -> bool:
        wish = self._wish
        if wish.asin:
            return asin == wish.asin
        is_kind = wish.query in title.lower().replace(",", "").split()
        return is_kind and asin not in self._rejected and _price(price) <= wish.price_bound

    def _inspect(self, info: Info) -> Step:
        labels = [action[len("click[") : -1] for action in info["actions"]]
        open_options = [value for value in self._wish.options if value not in self._clicked]
        unread = set() if self._unchecked else set(self._wish.attributes) - self._checked
        if unread and "features" not in self._checked:
            self._checked.add("features")
            return "its title does not say all", "click[features]"
        last_chance = self._unchecked or self._opened in self._rejected
        if not last_chance and (unread or not set(open_options) <= set(labels)):
            self._rejected.add(self._opened)
            return "it lacks what is asked", _click(PREVIOUS)
        for value in open_options:
            if value in labels:
                self._clicked.add(value)
                if self._slips():
                    continue
                return f"it has to be {value}", f"click[{value}]"
        return "this is what is asked", _click(BUY)

    def _slips(self) -> bool:
        return self._rng.random() < self._mistakes

    def _named(self, text: str) -> set[str]:
        return {attribute for attribute in self._wish.attributes if attribute in text.lower()}


def _click(label: str) -> str:
    return f"click[{label.lower()}]"


def _rows(content: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Returns `(id, title, price)` of each product on a page of results."""
    first = next((i for i in range(2, len(content)) if content[i] not in (PREVIOUS, NEXT)), len(content))
    return [content[i : i + 3] for i in range(first, len(content) - 2, 3)]


def _price(tag: str) -> float:
    """Returns the lowest price of a price tag."""
    return float(tag.split(" to ")[0].lstrip("$"))
