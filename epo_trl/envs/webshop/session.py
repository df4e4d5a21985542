"""A visit to the shop: the page that is shown, and what `search[...]` and `click[...]` do to it.

The pages are those of WebShop's text environment in the mode "text": the visible texts of a page, separated by [SEP].
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from epo_trl.envs.webshop.products import Goal, Product
from epo_trl.envs.webshop.search import ProductIndex

PAGE_SIZE = 10  # products on a page of results, as in the release
SEPARATOR = " [SEP] "
BACK, PREVIOUS, NEXT, BUY = "Back to Search", "< Prev", "Next >", "Buy Now"
SUB_PAGES = ("Description", "Features", "Reviews")
_ACTION = re.compile(r"\s*(search|click)\s*\[(.+)\]", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class Shop:
    """The products of a shop, and its goals by split, in order."""

    products: tuple[Product, ...]
    goals: Mapping[str, tuple[Goal, ...]] = field(default_factory=dict)

    @cached_property
    def index(self) -> ProductIndex:
        """The search index, built on first use."""
        return ProductIndex(self.products)

    @cached_property
    def by_asin(self) -> dict[str, Product]:
        """The products by their identifiers in lower case."""
        return {product.asin.lower(): product for product in self.products}


@dataclass(slots=True)
class Session:
    """A visit, cheap to create, copy (`copy.copy`) and step."""

    shop: Shop
    goal: Goal  # whose instruction every page shows
    page_size: int = PAGE_SIZE  # products on a page of results
    page: str = "search"  # `"search"`, `"results"`, `"item"`, one of `SUB_PAGES` or `"done"`
    query: str = ""  # words of the last search
    number: int = 1  # of the page of results, from 1
    found: tuple[int, ...] = ()  # indices of the products that the search found
    product: Product | None = None  # product that is shown
    chosen: dict[str, str] = field(default_factory=dict)  # chosen value of each option, by its name

    def act(self, action: str) -> bool:
        """Performs an action and returns whether the shop knew it; any other text changes nothing.

        A search is possible from every page. Action and label may be in upper or lower case, with any white space
        between their parts.
        """
        match = _ACTION.match(action)
        if match is None or self.page == "done":
            return False
        verb, argument = match[1].lower(), " ".join(match[2].lower().split())
        if verb == "search":
            if argument:
                self._search(argument)
            return bool(argument)
        label = self._label(argument)
        if label is not None:
            self._click(label)
        return label is not None

    @property
    def clickables(self) -> tuple[str, ...]:
        """Labels that can be clicked on this page, in lower case: buttons first, then products or options."""
        match self.page:
            case "search" | "done":
                return ()
            case "results":
                return tuple(text.lower() for text in (BACK, *self._turn_buttons, *(p.asin for p in self._shown)))
            case "item":
                values = [value for values in self.item.options.values() for value in values if value]
                return tuple(dict.fromkeys(text.lower() for text in (BACK, PREVIOUS, *SUB_PAGES, BUY, *values)))
        return BACK.lower(), PREVIOUS.lower()

    @property
    def actions(self) -> tuple[str, ...]:
        """What can be done on this page, as an agent writes it; a search stands for any words."""
        search = ("search[<words>]",) if self.page == "search" else ()
        return search + tuple(f"click[{label}]" for label in self.clickables)

    @property
    def content(self) -> tuple[str, ...]:
        """Visible texts of the page below the instruction."""
        match self.page:
            case "search":
                return ("Search",)
            case "done":
                return ("Thank you for shopping with us!",)
            case "results":
                count = f"Page {self.number} (Total results: {len(self.found)})"
                rows = [text for p in self._shown for text in (p.asin, p.title, p.price_tag)]
                return BACK, count, *self._turn_buttons, *rows
            case "item":
                item = self.item
                options = [text for name, values in item.options.items() for text in (name, *values)]
                prices = f"Price: {item.price_tag}", "Rating: N.A."  # the release's files have no ratings
                return BACK, PREVIOUS, *options, item.title, *prices, *SUB_PAGES, BUY
        return BACK, PREVIOUS, *self._details

    @property
    def text(self) -> str:
        """The whole page as one line."""
        if self.page == "done":
            return SEPARATOR.join(self.content)
        head = ("WebShop",) if self.page == "search" else ()
        return SEPARATOR.join((*head, "Instruction:", self.goal.instruction, *self.content))

    @property
    def item(self) -> Product:
        """The product of an item page or one after it."""
        assert self.product is not None
        return self.product

    @property
    def _shown(self) -> list[Product]:
        last = self.number * self.page_size
        return [self.shop.products[i] for i in self.found[last - self.page_size : last]]

    @property
    def _turn_buttons(self) -> tuple[str, ...]:
        previous = (PREVIOUS,) if self.number > 1 else ()
        return previous + ((NEXT,) if self.number * self.page_size < len(self.found) else ())

    @property
    def _details(self) -> tuple[str, ...]:
        item = self.item
        match self.page:
            case "Description":
                return (item.description,) if item.description else ()
            case "Features":
                return item.features
        reviews = [part for title, stars, text in item.reviews for part in (f'"{title}"', stars, text) if part]
        return tuple(reviews) or ("No reviews found",)

    def _label(self, argument: str) -> str | None:
        """Finds the label with this text or, as a word-level tokenizer writes it, with other white space."""
        if argument in self.clickables:
            return argument
        squeezed = argument.replace(" ", "")
        return next((label for label in self.clickables if label.replace(" ", "") == squeezed), None)

    def _search(self, words: str) -> None:
        self.page, self.query, self.number, self.product, self.chosen = "results", words, 1, None, {}
        self.found = self.shop.index.find(words)

    def _click(self, label: str) -> None:
        if label == BACK.lower():
            self.page, self.query, self.number, self.found, self.product, self.chosen = "search", "", 1, (), None, {}
        elif label == BUY.lower():
            self.page = "done"
        elif label in (NEXT.lower(), PREVIOUS.lower()):
            self._turn(label)
        elif self.page == "results":
            self.page, self.product = "item", self.shop.by_asin[label]
        elif label in map(str.lower, SUB_PAGES):
            self.page = label.capitalize()
        else:
            names = [name for name, values in self.item.options.items() if label in map(str.lower, values)]
            self.chosen = {**self.chosen, names[-1]: label}

    def _turn(self, label: str) -> None:
        if self.page == "results":
            self.number += 1 if label == NEXT.lower() else -1
        elif self.page == "item":
            self.page, self.product, self.chosen = "results", None, {}
        else:
            self.page = "item"
