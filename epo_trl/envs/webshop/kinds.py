"""What the generated shop sells: kinds of product with their attributes, options and prices. All of it is invented.

The reward compares phrases by a fuzzy ratio, for which "pack of 2" and "pack of 12" are the same. All values of a list
here differ by that ratio.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

COLORS = ("black", "white", "navy blue", "red", "forest green", "grey", "pink", "mustard yellow", "brown", "teal")
_WEAR = ("machine wash", "quick drying", "slim fit", "long sleeve", "stretch fabric", "moisture wicking", "hand wash")
_FEET = ("rubber sole", "arch support", "memory foam", "non slip", "lace up", "elastic closure", "wide toe")
_SKIN = ("cruelty free", "paraben free", "fragrance free", "long lasting", "sensitive skin", "plant based", "oil free")
_TECH = (
    "fast charging",
    "noise cancelling",
    "water resistant",
    "easy setup",
    "long battery",
    "dual band",
    "hands free",
)
_ROOM = (
    "solid wood",
    "easy assembly",
    "space saving",
    "anti scratch",
    "heavy duty",
    "mid century",
    "height adjustable",
)
_FOOD = ("gluten free", "sugar free", "low sodium", "non gmo", "dairy free", "high protein", "resealable bag")
_CLOTHES = ("petite", "small", "medium", "large", "tall", "plus")
_SHOES = ("6", "7", "8", "9", "10", "11")
_BOTTLES = ("travel size", "small bottle", "family bottle", "refill pouch", "gift set")
_PACKS = ("single", "twin pack", "sampler", "carton", "value box")
_FLAVORS = ("vanilla", "dark chocolate", "salted caramel", "wild berry", "lemon", "ginger", "cinnamon", "mint")
_SCENTS = ("lavender", "rose", "citrus", "cedar", "coconut", "unscented")
_WATTS = ("5w", "18w", "30w", "65w", "96w")
_WIDTHS = ("narrow", "standard", "wide", "corner fit")


@dataclass(frozen=True)
class Kind:
    """A kind of product.

    Args:
        query: Its name, in lower case; also the search words under which the product is filed.
        category: Department.
        path: Names of the nested categories, outermost first.
        attributes: Attributes that its products may have.
        options: Values that its products may offer, by the name of the option.
        prices: Lowest and highest price, in dollars.
    """

    query: str
    category: str
    path: tuple[str, ...]
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    prices: tuple[float, float]


_WEAR_OPTIONS = {"color": COLORS, "size": _CLOTHES}
_CARE_OPTIONS = {"scent": _SCENTS, "size": _BOTTLES}
_FOOD_OPTIONS = {"flavor": _FLAVORS, "size": _PACKS}
_COLOR = {"color": COLORS}
_COLOR_POWER = {"color": COLORS, "power": _WATTS}
# department, categories, attributes, options, and the typical price of each kind in dollars
_SHELVES: tuple[tuple[str, str, tuple[str, ...], Mapping[str, tuple[str, ...]], Mapping[str, int]], ...] = (
    ("fashion", "Clothing > Shirts & Tops", _WEAR, _WEAR_OPTIONS, {"t-shirt": 15, "hoodie": 35, "rain jacket": 60}),
    ("fashion", "Clothing > Trousers", _WEAR, _WEAR_OPTIONS, {"yoga pants": 25, "cargo shorts": 30}),
    (
        *("fashion", "Shoes > Everyday", _FEET, {"color": COLORS, "size": _SHOES}),
        {"running shoes": 55, "hiking boots": 90, "house slippers": 20},
    ),
    ("beauty", "Beauty > Skin Care", _SKIN, _CARE_OPTIONS, {"face cream": 18, "body lotion": 12}),
    ("beauty", "Beauty > Hair Care", _SKIN, _CARE_OPTIONS, {"shampoo": 14, "hair oil": 16}),
    ("beauty", "Beauty > Makeup", _SKIN, _COLOR, {"eye liner": 9, "nail polish": 8}),
    ("electronics", "Electronics > Audio", _TECH, _COLOR, {"headphones": 70, "bluetooth speaker": 45}),
    ("electronics", "Electronics > Power", _TECH, _COLOR_POWER, {"wall charger": 22, "power bank": 32}),
    ("electronics", "Electronics > Network", _TECH, _COLOR, {"wireless router": 85, "security camera": 65}),
    (
        *("furniture", "Furniture > Tables", _ROOM, {"color": COLORS, "width": _WIDTHS}),
        {"coffee table": 120, "writing desk": 150},
    ),
    ("furniture", "Furniture > Seats", _ROOM, _COLOR, {"bar stool": 75, "office chair": 140}),
    ("furniture", "Furniture > Light", _ROOM, _COLOR_POWER, {"desk lamp": 30, "floor lamp": 55}),
    ("grocery", "Grocery > Snacks", _FOOD, _FOOD_OPTIONS, {"granola bars": 12, "trail mix": 16}),
    ("grocery", "Grocery > Drinks", _FOOD, _FOOD_OPTIONS, {"green tea": 10, "coffee beans": 20}),
)
KINDS = tuple(
    Kind(name, category, (*path.split(" > "), name.title()), attributes, options, (price / 2, price * 2.0))
    for category, path, attributes, options, prices in _SHELVES
    for name, price in prices.items()
)
BRANDS = (
    "Alderby", "Brixworth", "Calmera", "Dovetta", "Elmwick", "Farrow", "Glenholt", "Hazelby", "Ivorane", "Juniva",
    "Kestrelle", "Larkmoor", "Merrow", "Norvale", "Oakhurst", "Pellorin", "Quillon", "Rosemead", "Solvane", "Tarnby",
)  # fmt: skip
