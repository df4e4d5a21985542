"""A tiny release of WebShop on disk, with the keys and quirks of the real files. All texts are invented."""

import json


def row(asin, **other):
    return {
        "asin": asin, "name": "Stoneware Mug with Lid", "category": "garden", "query": "Coffee Mug ",
        "product_category": "Home & Kitchen › Dining › Mugs", "pricing": "$12.50", "full_description": "Keeps warm.",
        "small_description": ["Holds a pint", "Non slip base"], "customization_options": None, "images": ["x"],
        "seller_name": "ignored", **other,
    }  # fmt: skip


MUG = {
    "Color": [{"value": " Navy/Blue ", "image": None}, {"value": "Red"}],
    "Size": [{"value": "Small"}, {"value": "Large"}],
    "Style": None,
}
ROWS = [
    row("B000000001", customization_options=MUG),
    row("B000000002", name="Glass Tumbler", query="tumbler", pricing="$1,010.00", small_description="One line"),
    row("B000000003", pricing="$10.00$20.00", customization_options={}),
    row("B000000004", pricing="", small_description=None, full_description=None),
    row("B000000001", name="a repeated id"),
    row("nan"),
    row("B0000000000", name="an id that is too long"),
]
ATTRIBUTES = {
    "B000000001": {
        "attributes": ["non slip", "easy clean"],
        "instruction": "Find me non slip mugs",
        "instruction_attributes": ["non slip"],
    },
    "B000000002": {"attributes": ["clear glass"], "instruction": None, "instruction_attributes": None},
    "B000000003": {"attributes": [], "instruction": "Find me mugs", "instruction_attributes": ["easy clean"]},
}
HUMAN = {
    "B000000001": [
        {
            "instruction": "i want a mug.",
            "instruction_attributes": ["non slip"],
            "instruction_options": ["red", "large"],
        },
        {"instruction": "skipped", "instruction_attributes": [], "instruction_options": []},
        {"instruction": "a mug please", "instruction_attributes": ["easy clean"], "instruction_options": []},
    ],
    "B000000002": [{"instruction": "a tumbler", "instruction_attributes": ["clear glass"], "instruction_options": []}],
    "B000000009": [{"instruction": "unknown", "instruction_attributes": ["x"], "instruction_options": []}],
}


def write_release(folder, without=()):
    """Writes the small release, except for the named files."""
    files = {"items_shuffle_1000.json": ROWS, "items_ins_v2_1000.json": ATTRIBUTES, "items_human_ins.json": HUMAN}
    for name, content in files.items():
        if name not in without:
            (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder
