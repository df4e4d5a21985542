"""Reads the JSON files of the WebShop release: products, attributes and instructions."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product as combinations
from pathlib import Path
from typing import Any

from epo_trl.envs.base import EnvError
from epo_trl.envs.webshop.products import Goal, Product, draw_price_bound, price_clause
from epo_trl.envs.webshop.session import Shop

INSTRUCTIONS = ("human", "synthetic")
CATALOGUES = {"small": "_1000", "all": ""}  # the end of the files' names
_SHUFFLE_SEED = 233  # the release's: so goal 0 is goal 0 of every other implementation
_NO_PRICE = 100.0  # dollars, for a product without a price
_HOW_TO_GET = (
    "Run the setup of the WebShop release (`./setup.sh -d small` or `-d all`) and set WEBSHOP_DATA or webshop_data to "
    "its folder `data`; or set goods to generated (--goods generated), which needs no download."
)


def data_folder(path: str | os.PathLike[str] | None = None) -> Path:
    """Returns the folder of the release's files: `path`, or `$WEBSHOP_DATA`; `EnvError` if there is no such folder."""
    given = os.fspath(path) if path is not None else os.environ.get("WEBSHOP_DATA", "")
    folder = Path(os.path.expandvars(given)).expanduser()
    if not given or not folder.is_dir():
        raise EnvError(f"webshop_data or WEBSHOP_DATA: expected a folder, got {given!r}. {_HOW_TO_GET}")
    return folder


@lru_cache(maxsize=1)
def load(folder: Path, catalogue: str, instructions: str, n_iid: int, n_dev: int) -> Shop:
    """Reads the release. Prices that the release draws anew in every process are drawn once here, by product.

    The first `n_iid` goals are those of the test, as in the paper, the next `n_dev` those of the list "dev".

    Raises:
        EnvError: If a file is missing or no JSON, or too few goals are left to train on.
    """
    suffix = CATALOGUES[catalogue]
    items, synthetic, human = f"items_shuffle{suffix}.json", f"items_ins_v2{suffix}.json", "items_human_ins.json"
    if missing := [name for name in (items, synthetic, human) if not (folder / name).is_file()]:
        raise EnvError(f"{folder}: {', '.join(missing)} is missing (catalogue: {catalogue}). {_HOW_TO_GET}")
    texts = _read(folder / synthetic)
    found = _products(_read(folder / items), texts)
    if instructions == "human":
        goals = _human_goals(found, _read(folder / human))
    else:
        goals = _synthetic_goals(found, texts)
    random.Random(_SHUFFLE_SEED).shuffle(goals)
    first = n_iid + n_dev
    if len(goals) <= first:
        raise EnvError(
            f"n_dev: expected fewer than the {len(goals)} goals of {folder} (instructions: {instructions}) for n_iid "
            f"and n_dev, got {n_iid} and {n_dev}; choose smaller lists, or instructions: synthetic"
        )
    lists = {"train": goals[first:], "iid": goals[:n_iid], "dev": goals[n_iid:first]}
    return Shop(tuple(found), {split: tuple(part) for split, part in lists.items() if part})


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EnvError(f"{path}: cannot be read as JSON ({error}); download it again") from error


def _products(rows: Iterable[Mapping[str, Any]], texts: Mapping[str, Any]) -> list[Product]:
    """Converts the rows, without those that have an unusable or repeated id."""
    found: dict[str, Product] = {}
    for row in rows:
        asin = str(row["asin"])
        if asin == "nan" or len(asin) > 10 or asin in found:
            continue
        prices = [float(re.sub(r"[^\d.]", "", text)) for text in str(row.get("pricing") or "").split("$")[1:]]
        lines = row["small_description"]
        found[asin] = Product(
            asin=asin,
            title=str(row["name"]),
            category=str(row["category"]),
            query=str(row["query"]).lower().strip(),
            path=tuple(part.strip() for part in str(row["product_category"]).split("›")),
            price=_price(asin, prices),
            price_tag=" to ".join(f"${price}" for price in (prices or [_NO_PRICE])[:2]),
            description=str(row["full_description"] or ""),
            features=tuple(map(str, lines if isinstance(lines, list) else [lines or ""])),
            options=dict(_options(row.get("customization_options") or {})),
            attributes=tuple((texts.get(asin) or {}).get("attributes") or ()),
        )
    return list(found.values())


def _price(asin: str, prices: Sequence[float]) -> float:
    if len(prices) < 2:
        return prices[0] if prices else _NO_PRICE
    return random.Random(f"webshop price {asin}").uniform(*prices[:2])


def _options(rows: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, values in rows.items():
        if values is not None:
            texts = (" ".join(str(value["value"]).split()) for value in values)
            yield name.lower(), tuple(text.replace("/", " | ").lower() for text in texts)


def _human_goals(products: Iterable[Product], texts: Mapping[str, Any]) -> list[Goal]:
    goals = []
    for item in products:
        for i, row in enumerate(texts.get(item.asin, ())):
            if row["instruction_attributes"]:
                bound = draw_price_bound(item.price, random.Random(f"webshop bound {item.asin} {i}"))
                text = row["instruction"].strip(".") + price_clause(bound)
                options = row["instruction_options"]
                values = tuple(options.values() if isinstance(options, Mapping) else options)
                goals.append(Goal(item, text, tuple(row["instruction_attributes"]), values, bound))
    return goals


def _synthetic_goals(products: Iterable[Product], texts: Mapping[str, Any]) -> list[Goal]:
    goals = []
    for item in products:
        row = texts.get(item.asin) or {}
        if not row.get("instruction") or not row.get("instruction_attributes"):
            continue
        bound = draw_price_bound(item.price, random.Random(f"webshop bound {item.asin}"))
        names = sorted(item.options)
        for values in combinations(*(item.options[name] for name in names)):
            options = ", and ".join(f"{name}: {value}" for name, value in zip(names, values, strict=True))
            text = row["instruction"] + (f" with {options}" if options else "") + price_clause(bound)
            goals.append(Goal(item, text, tuple(row["instruction_attributes"]), values, bound))
    return goals
