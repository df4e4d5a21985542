"""The shop's search: BM25 over the texts of the products, by the package bm25s."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import numpy

from epo_trl.envs.base import EnvError
from epo_trl.envs.webshop.products import Product

RESULTS = 50  # the largest number of results of a search, as in the WebShop release
_K1, _B = 0.9, 0.4  # as in Pyserini, which the release uses
_WORD = re.compile(r"\w+")


class ProductIndex:
    """An index of products. Like the release's it covers title, description, first feature and options.

    Unlike Lucene's it does not stem words: "shoe" does not find "shoes".

    Raises:
        EnvError: If bm25s is not installed.
    """

    def __init__(self, products: Sequence[Product]) -> None:
        try:
            import bm25s
        except ImportError as error:
            raise EnvError("webshop: the package bm25s is missing; run `pip install 'epo-trl[webshop]'`") from error
        self._index = bm25s.BM25(k1=_K1, b=_B, method="lucene")
        self._index.index([_words(_text(product)) for product in products], show_progress=False)
        self._known = self._index.vocab_dict.keys()
        self.find = lru_cache(maxsize=4096)(self._find)

    def _find(self, query: str) -> tuple[int, ...]:
        """Returns the indices of at most `RESULTS` products with a word of the query, best first, ties by index."""
        words = [word for word in _words(query) if word in self._known]
        if not words:
            return ()
        scores = self._index.get_scores(words)
        found = numpy.flatnonzero(scores > 0)
        if len(found) > RESULTS:
            found = numpy.flatnonzero(scores >= numpy.partition(scores, -RESULTS)[-RESULTS])
        return tuple(sorted(found.tolist(), key=lambda i: (-scores[i], i))[:RESULTS])


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _text(product: Product) -> str:
    options = (f"{name}: {', '.join(values)}" for name, values in product.options.items())
    return " ".join([product.title, product.description, *product.features[:1], *options])
