"""WebShop: buy the product that an instruction asks for, in a shop that is shown as text."""

from epo_trl.envs.webshop.env import WebShopEnv
from epo_trl.envs.webshop.generator import ShopSettings
from epo_trl.envs.webshop.reward import score_purchase
from epo_trl.envs.webshop.shopper import FirstResult, Shopper
from epo_trl.envs.webshop.webshop_suite import GeneratedWebShop, WebShopData

__all__ = [
    "FirstResult",
    "GeneratedWebShop",
    "ShopSettings",
    "Shopper",
    "WebShopData",
    "WebShopEnv",
    "score_purchase",
]
