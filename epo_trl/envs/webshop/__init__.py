"""WebShop: buy the product that an instruction asks for, in a shop that is shown as text."""

from epo_trl.envs.webshop.env import WebShopEnv
from epo_trl.envs.webshop.reward import score_purchase
from epo_trl.envs.webshop.shopper import Shopper
from epo_trl.envs.webshop.webshop_suite import WebShopSuite

__all__ = ["Shopper", "WebShopEnv", "WebShopSuite", "score_purchase"]
