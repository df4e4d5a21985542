"""The reward of WebShop (Yao et al. 2022, arXiv 2207.01206, section 3.1): how well a purchase fits a goal, from 0 to 1.

The paper's equation, with u for the goal and y for the purchase:

    r = r_type * (|u_att & y_att| + |u_opt & y_opt| + [y_price <= u_price]) / (|u_att| + |u_opt| + 1)

`r_type` is 0 if the titles share no noun, 0.1 if they share less than a tenth of the goal's nouns, 0.5 if they share at
most a fifth and neither the search words nor two nested categories agree, else 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from epo_trl.envs.base import EnvError
from epo_trl.envs.webshop.products import Goal, Product

SAME = 85  # two phrases whose token-set ratio is larger count as equal
Nouns = Callable[[str], Sequence[str]]
_WORD = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*")
_TOKEN = re.compile(r"\w+")
_STOP_WORDS = frozenset(
    "a an and at by each for from in into is it its of on or our per the this to up with your".split()
)


def has_attribute(product: Product, wanted: str) -> bool:
    """Returns whether one of the product's attributes is nearly equal, or a text of the product contains the words."""
    if any(token_set_ratio(attribute, wanted) > SAME for attribute in product.attributes):
        return True
    texts = (product.title, " ".join(product.features), product.description)
    return any(wanted in text.lower() for text in texts)


def count_options(wanted: Sequence[str], chosen: Sequence[str]) -> int:
    """Counts the wanted option values that are nearly equal to a chosen one."""
    return sum(any(token_set_ratio(value, want) > SAME for value in chosen) for want in wanted)


def kind_factor(wanted: Product, bought: Product, nouns: Nouns) -> float:
    """Computes `r_type`: 0, 0.1, 0.5 or 1."""
    wanted_nouns = nouns(wanted.title)
    shared = len(set(wanted_nouns) & set(nouns(bought.title)))
    match = shared / len(wanted_nouns) if wanted_nouns else 0.2
    if match == 0:
        return 0.0
    if match < 0.1:
        return 0.1
    related = wanted.query == bought.query or len(set(wanted.path) & set(bought.path)) >= 2
    return 1.0 if related or match > 0.2 else 0.5


@lru_cache(maxsize=4096)
def title_words(title: str) -> tuple[str, ...]:
    """Lists the words of a title in lower case, without numbers and function words.

    The paper compares nouns that spaCy tags; this needs no model, and counts adjectives too. See `spacy_nouns`.
    """
    return tuple(word for word in _WORD.findall(title.lower()) if word not in _STOP_WORDS)


@lru_cache(maxsize=2)
def spacy_nouns(model: str) -> Nouns:
    """Loads a spaCy model and returns a function that lists the nouns and proper nouns of a title in lower case.

    Raises:
        EnvError: If spaCy or the model is not installed.
    """
    try:
        import spacy

        tagger = spacy.load(model, disable=["parser", "ner", "lemmatizer"])
    except (ImportError, OSError) as error:
        raise EnvError(
            f"spacy_model: expected an installed model, got {model!r} ({error}); run `pip install spacy` and "
            f"`python -m spacy download {model}`, or leave the field empty"
        ) from error

    @lru_cache(maxsize=4096)
    def nouns(title: str) -> tuple[str, ...]:
        return tuple(token.text.lower() for token in tagger(title) if token.pos_ in ("NOUN", "PROPN"))

    return nouns


def score_purchase(goal: Goal, product: Product, chosen: Mapping[str, str], nouns: Nouns = title_words) -> float:
    """Computes the reward of a purchase, in [0, 1]; 1 is a success.

    `chosen` has an option's value by its name; `nouns` lists the nouns of a title, with repetitions.
    """
    attributes = sum(has_attribute(product, wanted) for wanted in goal.attributes)
    options = count_options(goal.options, tuple(chosen.values()))
    price = product.price <= goal.price_bound
    share = (attributes + options + price) / (len(goal.attributes) + len(goal.options) + 1)
    return kind_factor(goal.product, product, nouns) * share


def token_set_ratio(one: str, other: str) -> int:
    """Computes the similarity of two phrases, from 0 to 100, whatever the order and the repetition of their words.

    It is 100 if the words of one phrase are among those of the other. The WebShop release uses this measure, from the
    package thefuzz.
    """
    first, second = (set(_TOKEN.findall(text.lower())) for text in (one, other))
    if not first or not second:
        return 0
    shared = first & second
    if shared and (first == shared or second == shared):
        return 100
    common = " ".join(sorted(shared))
    rest = (" ".join(sorted(words - shared)) for words in (first, second))
    whole = [f"{common} {words}".strip() for words in rest]
    pairs = [(whole[0], whole[1])]
    if shared:
        pairs += [(common, text) for text in whole]
    return round(max(_ratio(*pair) for pair in pairs))


def _ratio(one: str, other: str) -> float:
    """Returns twice the length of the longest common subsequence over the sum of both lengths, in percent."""
    row = [0] * (len(other) + 1)
    for letter in one:
        before = row
        row = [0]
        for i, candidate in enumerate(other):
            row.append(before[i] + 1 if letter == candidate else max(before[i + 1], row[i]))
    return 200 * row[-1] / (len(one) + len(other))
