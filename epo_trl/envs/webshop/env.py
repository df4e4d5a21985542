"""`WebShopEnv`: a visit to the shop behind the interface of `epo_trl.envs.base`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from epo_trl.envs.base import NOT_RUNNING, EnvError, Info, TextEnv
from epo_trl.envs.webshop.reward import Nouns, score_purchase, title_words
from epo_trl.envs.webshop.session import Session


class WebShopEnv(TextEnv):
    """A WebShop environment that plays any goal of its suite.

    An action is `search[words]` or `click[label]`. The episode ends with `click[buy now]`, whose reward is the paper's,
    from 0 to 1; every other step's is 0. A reward of exactly 1 wins. The environment never truncates.

    Besides the required keys, `info` holds `accepted`, `score` (100 times the reward), `state_key`, `task_id`, `page`
    (name of the page), `content` (tuple of its texts below the instruction), `actions` (tuple of what can be done) and
    `chosen` (tuple of the chosen option values). Searches cannot be listed, so `admissible_actions` is `None`.
    `visit` starts a visit for the goal of a task id, or raises `EnvError`; `nouns` are those of `score_purchase`.
    """

    is_deterministic = True

    def __init__(self, visit: Callable[[str], Session], nouns: Nouns = title_words) -> None:
        self._visit, self._nouns = visit, nouns
        self._session: Session | None = None
        self._task_id = ""

    def copy(self) -> WebShopEnv:
        """Returns an independent environment in the same state; both share the shop."""
        twin = copy.copy(self)
        twin._session = copy.copy(self._session)
        return twin

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Returns the search page of `options["task_id"]` and the info. The shop is deterministic: `seed` is unused.

        Raises:
            EnvError: If there is no task id, or it is unknown.
        """
        task_id = str((options or {}).get("task_id"))
        self._session, self._task_id = self._visit(task_id), task_id
        return self._session.text, self._info(self._session, 0.0, accepted=True)

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Returns `(observation, reward, terminated, truncated, info)`."""
        session = self._session
        if session is None or session.page == "done":
            raise EnvError(NOT_RUNNING)
        accepted = session.act(action)
        bought = session.page == "done"
        reward = score_purchase(session.goal, session.item, session.chosen, self._nouns) if bought else 0.0
        return session.text, reward, bought, False, self._info(session, reward, accepted)

    def _info(self, session: Session, reward: float, accepted: bool) -> Info:
        chosen = tuple(session.chosen.values())
        asin = session.product.asin if session.product else ""
        return {
            "admissible_actions": None,
            "accepted": accepted,
            "won": reward == 1,
            "score": 100 * reward,
            "task": session.goal.instruction,
            "task_type": session.goal.product.category,
            "task_id": self._task_id,
            "state_key": "|".join((session.page, session.query, str(session.number), asin, *sorted(chosen))),
            "page": session.page,
            "content": session.content,
            "actions": session.actions,
            "chosen": chosen,
        }
