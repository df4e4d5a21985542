"""A shop that is generated: products, and goals whose train and test lists share neither a product nor a wish.

Scores on generated goals are not comparable with published WebShop numbers, see docs/webshop.md.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import lru_cache
from zlib import crc32

from epo_trl.envs.base import EnvError
from epo_trl.envs.webshop.kinds import BRANDS, KINDS, Kind
from epo_trl.envs.webshop.products import NO_BOUND, Goal, Product, draw_price_bound, price_clause
from epo_trl.envs.webshop.session import Shop
from epo_trl.envs.webshop.shopper import Wish

ATTRIBUTES = 3  # of a product
_TEST_SHARE = 5  # one in five products and one in five wishes belong to the test list
_VALUES = 4  # of an option of a product
_ATTEMPTS = 200  # draws per goal
_LETTERS = "0123456789ABCDEFGHJKLMNPQRSTUVWXYZ"
_SENTENCES = (
    "find me {attributes} {query}{options}{price}",
    "i need {attributes} {query}{options}{price}",
    "i am looking for {query}, {attributes}{options}{price}",
    "please buy {query}, {attributes}{options}{price}",
)
_FEATURES = ("Customers like that it is {}", "Designed to be {}", "{}, as tested by our team")
_DESCRIPTIONS = (
    "{query} of {brand}, for every day.",
    "{brand} has made {query} for twenty years.",
    "By {brand}: {query} that last.",
)
_REVIEWS = (
    ("Does what it says", "5", "I would buy it again."),
    ("Fine", "4", "Arrived on time."),
    ("Hm", "2", "Too late."),
)


@lru_cache(maxsize=4)
def generate(
    n_products: int, n_train: int, n_iid: int, *, hidden_attributes: int, seed: int, departments: tuple[str, ...] = ()
) -> Shop:
    """Generates a shop: the same for the same arguments, in every process.

    A goal's list depends on its product and on its wish (kind, attributes, options), so the lists stay disjoint
    whatever their lengths. The instructions of a list are all different. The arguments are fields of `WebShopSuite`.

    Raises:
        EnvError: If there are too few products for that many goals.
    """
    kinds = [kind for kind in KINDS if kind.category in departments or not departments]
    products = tuple(
        _product(random.Random(f"webshop/{seed}/product/{i}"), kinds[i % len(kinds)], ATTRIBUTES - hidden_attributes)
        for i in range(n_products)
    )
    sizes = {"train": n_train, "iid": n_iid}
    return Shop(products, {split: _goals(seed, split, count, products) for split, count in sizes.items() if count})


def _product(rng: random.Random, kind: Kind, shown: int) -> Product:
    """Draws a product, of whose attributes the title shows the first `shown`."""
    brand = rng.choice(BRANDS)
    attributes = tuple(rng.sample(kind.attributes, ATTRIBUTES))
    low, high = kind.prices
    price = round(rng.uniform(low, high)) - 0.01
    features = [rng.choice(_FEATURES).format(attribute) for attribute in reversed(attributes)]  # the hidden ones first
    reviews = rng.sample(_REVIEWS, rng.randrange(len(_REVIEWS) + 1))
    return Product(
        asin="B0" + "".join(rng.choices(_LETTERS, k=8)),
        title=", ".join([f"{brand} {kind.query}".title(), *attributes[:shown]]),
        category=kind.category,
        query=kind.query,
        path=kind.path,
        price=price,
        price_tag=f"${price:.2f}",
        description=rng.choice(_DESCRIPTIONS).format(query=kind.query, brand=brand),
        features=tuple(features),
        options={name: _some(rng, values) for name, values in kind.options.items()},
        attributes=attributes,
        reviews=tuple(reviews),
    )


def _some(rng: random.Random, values: tuple[str, ...]) -> tuple[str, ...]:
    """Draws the values that a product offers, in the order of the list."""
    chosen = rng.sample(values, min(_VALUES, len(values)))
    return tuple(value for value in values if value in chosen)


def _goals(seed: int, split: str, count: int, products: Sequence[Product]) -> tuple[Goal, ...]:
    rng, is_test = random.Random(f"webshop/{seed}/goals/{split}"), split != "train"
    mine = [product for product in products if _is_test(product.asin) == is_test]
    found: dict[str, Goal] = {}
    for _ in range(_ATTEMPTS * count if mine else 0):
        goal = _goal(rng, rng.choice(mine))
        wish = goal.product.query, sorted(goal.attributes), sorted(goal.options)
        if _is_test(wish) == is_test:
            found.setdefault(goal.instruction, goal)
        if len(found) == count:
            return tuple(found.values())
    raise EnvError(
        f"n_{split}: expected at most about {len(found)} goals with {len(products)} products, got {count}; raise "
        "n_products"
    )


def _goal(rng: random.Random, product: Product) -> Goal:
    attributes = tuple(rng.sample(product.attributes, rng.choice((1, 2))))
    names = [name for name in product.options if rng.random() < 0.8]
    options = {name: rng.choice(product.options[name]) for name in names}
    bound = draw_price_bound(product.price, rng)
    instruction = rng.choice(_SENTENCES).format(
        attributes=", ".join(attributes),
        query=product.query,
        options=" with " + ", and ".join(f"{name}: {value}" for name, value in options.items()) if options else "",
        price=price_clause(bound),
    )
    return Goal(product, instruction, attributes, tuple(options.values()), bound)


def _is_test(key: object) -> bool:
    """Returns whether a product's identifier, or a wish whatever its wording and price, belongs to the test list."""
    return crc32(repr(key).encode()) % _TEST_SHARE == 0


_WORD = re.compile(r"[\w-]+")
_PRICE = re.compile(r", and price lower than ([0-9.]+) dollars$")
_OPTION = re.compile(r"[a-z]+: (.*)")


def read_instruction(instruction: str) -> Wish:
    """Parses the instruction of a generated goal; `EnvError` if it is not one of the generator's sentences."""
    price = _PRICE.search(instruction)
    rest, _, options = (instruction[: price.start()] if price else instruction).partition(" with ")
    said = _WORD.findall(rest)
    kind = next((kind for kind in KINDS if kind.query in said), None)
    if kind is None:
        raise EnvError(f"task: expected an instruction of the generated shop, got {instruction!r}")
    return Wish(
        kind.query,
        tuple(word for word in said if word in kind.attributes),
        tuple(match[1] for part in options.split(", and ") if (match := _OPTION.fullmatch(part))),
        float(price[1]) if price else NO_BOUND,
    )
