"""What the generated shop sells: kinds of product with their attributes, options and prices. All of it is invented.

The reward compares phrases by a fuzzy ratio, for which "pack of 2" and "pack of 12" are the same. All values of a list
here differ by that ratio. Each is one word, which a tiny model can copy in one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

COLORS = ("black", "white", "navy", "red", "green", "grey", "pink", "yellow", "brown", "teal")
_WEAR = ("machine-washable", "quick-drying", "slim-fit", "wrinkle-free", "stretchy", "breathable", "lightweight")
_FEET = ("slip-resistant", "waterproof", "lace-up", "wide-fit", "cushioned", "vegan", "ankle-high")
_SKIN = ("cruelty-free", "paraben-free", "fragrance-free", "long-lasting", "plant-based", "oil-free", "hypoallergenic")
_TECH = ("fast-charging", "noise-cancelling", "water-resistant", "battery-powered", "dual-band", "hands-free", "slim")
_ROOM = ("space-saving", "scratch-resistant", "heavy-duty", "height-adjustable", "handmade", "foldable", "stackable")
_FOOD = ("gluten-free", "sugar-free", "low-sodium", "non-gmo", "dairy-free", "high-protein", "organic")
_CLOTHES = ("petite", "small", "medium", "large", "tall", "plus")
_SHOES = ("us6", "us7", "us8", "us9", "us10", "us11")
_BOTTLES = ("travel", "mini", "regular", "family", "refill")
_PACKS = ("single", "twin", "sampler", "carton", "bulk")
_FLAVORS = ("vanilla", "chocolate", "caramel", "berry", "lemon", "ginger", "cinnamon", "mint")
_SCENTS = ("lavender", "rose", "citrus", "cedar", "coconut", "unscented")
_POWERS = ("low", "medium", "high", "turbo")
_WIDTHS = ("narrow", "standard", "wide", "corner")


@dataclass(frozen=True)
class Kind:
    """A kind of product."""

    query: str  # its name, in lower case; also the search words under which the product is filed
    category: str
    path: tuple[str, ...]  # names of the nested categories, outermost first
    attributes: tuple[str, ...]  # attributes that its products may have
    options: Mapping[str, tuple[str, ...]]  # values that its products may offer, by the name of the option
    prices: tuple[float, float]  # lowest and highest price, in dollars


_WEAR_OPTIONS = {"color": COLORS, "size": _CLOTHES}
_SHOE_OPTIONS = {"color": COLORS, "size": _SHOES}
_CARE_OPTIONS = {"scent": _SCENTS, "size": _BOTTLES}
_FOOD_OPTIONS = {"flavor": _FLAVORS, "size": _PACKS}
_COLOR = {"color": COLORS}
_COLOR_POWER = {"color": COLORS, "power": _POWERS}
_COLOR_WIDTH = {"color": COLORS, "width": _WIDTHS}
# department, categories, attributes, options, and the typical price of each kind in dollars
_SHELVES: tuple[tuple[str, str, tuple[str, ...], Mapping[str, tuple[str, ...]], Mapping[str, int]], ...] = (
    ("fashion", "Clothing > Shirts & Tops", _WEAR, _WEAR_OPTIONS, {"t-shirt": 15, "hoodie": 35, "raincoat": 60}),
    ("fashion", "Clothing > Trousers", _WEAR, _WEAR_OPTIONS, {"leggings": 25, "shorts": 30}),
    ("fashion", "Shoes > Everyday", _FEET, _SHOE_OPTIONS, {"sneakers": 55, "boots": 90, "slippers": 20}),
    ("beauty", "Beauty > Skin Care", _SKIN, _CARE_OPTIONS, {"moisturizer": 18, "lotion": 12}),
    ("beauty", "Beauty > Hair Care", _SKIN, _CARE_OPTIONS, {"shampoo": 14, "conditioner": 16}),
    ("beauty", "Beauty > Makeup", _SKIN, _COLOR, {"eyeliner": 9, "lipstick": 8}),
    ("electronics", "Electronics > Audio", _TECH, _COLOR, {"headphones": 70, "speaker": 45}),
    ("electronics", "Electronics > Power", _TECH, _COLOR_POWER, {"charger": 22, "powerbank": 32}),
    ("electronics", "Electronics > Network", _TECH, _COLOR, {"router": 85, "webcam": 65}),
    ("furniture", "Furniture > Tables", _ROOM, _COLOR_WIDTH, {"table": 120, "desk": 150}),
    ("furniture", "Furniture > Seats", _ROOM, _COLOR, {"stool": 75, "armchair": 140}),
    ("furniture", "Furniture > Light", _ROOM, _COLOR_POWER, {"lamp": 30, "chandelier": 55}),
    ("grocery", "Grocery > Snacks", _FOOD, _FOOD_OPTIONS, {"granola": 12, "popcorn": 16}),
    ("grocery", "Grocery > Drinks", _FOOD, _FOOD_OPTIONS, {"tea": 10, "coffee": 20}),
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
