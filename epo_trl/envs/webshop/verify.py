"""Checks a shop: whether its files are complete, its goals can be met, and what two scripted players score."""

from __future__ import annotations

from epo_trl.envs.base import Expert
from epo_trl.envs.webshop.release import data_folder, missing_files
from epo_trl.envs.webshop.reward import count_options, score_purchase
from epo_trl.envs.webshop.shopper import FirstResult
from epo_trl.envs.webshop.webshop_suite import WebShopSuite

TURNS = 15


def verify_release(path: str | None, catalogue: str, instructions: str, goals: int) -> tuple[list[str], bool]:
    """Checks the files of the release below a folder, then its shop: see `verify_shop`.

    Raises:
        EnvError: If there is no folder, or a file cannot be read.
    """
    folder = data_folder(path)
    missing = missing_files(folder, catalogue)
    if missing:
        return [f"missing: {folder / name}" for name in missing], False
    return verify_shop(WebShopSuite(webshop_data=str(folder), catalogue=catalogue, instructions=instructions), goals)


def verify_shop(suite: WebShopSuite, goals: int) -> tuple[list[str], bool]:
    """Checks that the first test goals can be met, and plays them with the expert and with the paper's rule.

    Args:
        suite: Suite with a test list.
        goals: Maximum number of test goals.

    Returns:
        Lines for a terminal, and whether all is well.
    """
    tasks = suite.task_ids("iid")[:goals]
    best = {task_id: _best_reward(suite, task_id) for task_id in tasks}
    unmet = [task_id for task_id in tasks if best[task_id] < 1]
    sizes = ", ".join(f"{len(suite.task_ids(split))} {split}" for split in suite.splits)
    lines = [
        f"{suite.name}: goals: {sizes}",
        f"met by their own product: {len(tasks) - len(unmet)} of {len(tasks)} test goals",
        *(f"not met: {task_id} (at most {100 * best[task_id]:.1f})" for task_id in unmet[:3]),
    ]
    for name, player in (("expert", suite.make_expert()), ("first result, no options", FirstResult())):
        score, won = _play(suite, player, tasks)
        lines.append(f"{name}: score {score:.1f}, success {100 * won:.1f} % in {TURNS} turns")
    return lines, bool(tasks) and not unmet


def _best_reward(suite: WebShopSuite, task_id: str) -> float:
    """Returns the reward of the goal's own product with the best choice of its options."""
    goal = suite.goal(task_id)
    chosen: dict[str, str] = {}
    for name, values in goal.product.options.items():
        others = tuple(chosen.values())
        chosen[name] = max(values, key=lambda value: count_options(goal.options, (*others, value)), default="")
    return score_purchase(goal, goal.product, chosen)


def _play(suite: WebShopSuite, player: Expert, tasks: list[str]) -> tuple[float, float]:
    """Returns the mean score (0 to 100) and the success rate of a player."""
    env, infos = suite.make_env(), []
    for task_id in tasks:
        observation, info = env.reset(options={"task_id": task_id})
        player.reset(observation, info)
        for _ in range(TURNS):
            observation, _, terminated, _, info = env.step(player.act(observation, info)[1])
            if terminated:
                break
        infos.append(info)
    count = max(len(infos), 1)
    return sum(info["score"] for info in infos) / count, sum(info["won"] for info in infos) / count
