"""Writes the tables of docs/config.md from the help texts of the fields.

python docs/make_config_tables.py
"""

import dataclasses
import sys
from pathlib import Path

from trl import GRPOConfig

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "config.md"
BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"

sys.path.insert(0, str(ROOT / "recipes"))

from agent_evol import EvolutionArguments  # noqa: E402

from epo_trl.bounds import Range, read_bounds  # noqa: E402
from epo_trl.cli.evaluation import EvaluationArguments  # noqa: E402
from epo_trl.cli.imitation import DemonstrationArguments, ImitationConfig  # noqa: E402
from epo_trl.cli.train import StartArguments  # noqa: E402
from epo_trl.envs.alfworld.alfworld_suite import AlfworldArguments  # noqa: E402
from epo_trl.envs.gymnasium import GymnasiumArguments  # noqa: E402
from epo_trl.envs.numbered import NumberedArguments  # noqa: E402
from epo_trl.envs.openenv import OpenEnvArguments  # noqa: E402
from epo_trl.envs.scienceworld.env import EngineRules  # noqa: E402
from epo_trl.envs.scienceworld.gold import GoldSettings  # noqa: E402
from epo_trl.envs.scienceworld.host import JvmSettings  # noqa: E402
from epo_trl.envs.scienceworld.tasks import TaskLists  # noqa: E402
from epo_trl.envs.tools import ToolsArguments  # noqa: E402
from epo_trl.envs.trap import TrapSuite  # noqa: E402
from epo_trl.envs.webshop import WebShopSuite  # noqa: E402
from epo_trl.rollout.spec import (  # noqa: E402
    EpisodeArguments,
    FewShotArguments,
    PromptArguments,
    ProtocolArguments,
    ResponseArguments,
    RewardArguments,
)
from epo_trl.runs.run_settings import LongRunArguments  # noqa: E402
from epo_trl.trainers import EPOConfig, EPOPPOConfig  # noqa: E402
from epo_trl.trainers.config import RolloutArguments  # noqa: E402

TABLES = {
    "`EPOConfig`: training": EPOConfig,
    "`PromptArguments`: prompts, in training, warm start, evaluation and play": PromptArguments,
    "`FewShotArguments`: few-shot examples, in training, warm start, evaluation and play": FewShotArguments,
    "`ResponseArguments`: responses, in training, evaluation, play and AgentEvol": ResponseArguments,
    "`EpisodeArguments`: turns and context, in training, warm start and AgentEvol": EpisodeArguments,
    "`RewardArguments`: rewards, in training": RewardArguments,
    "`RolloutArguments`: environments and episodes, in training": RolloutArguments,
    "`EPOPPOConfig`: training with a critic; all of `EPOConfig` too": EPOPPOConfig,
    "`StartArguments`: where RL begins, for `epo-trl train` and the recipes": StartArguments,
    "`LongRunArguments`: interrupted runs, in training and `recipes/sft.py`": LongRunArguments,
    "`AlfworldArguments`: games": AlfworldArguments,
    "`TaskLists`: tasks of ScienceWorld": TaskLists,
    "`EngineRules`: rules of ScienceWorld": EngineRules,
    "`JvmSettings`: Java processes of ScienceWorld": JvmSettings,
    "`GoldSettings`: gold paths and expert of ScienceWorld": GoldSettings,
    "`WebShopSuite`: products and goals": WebShopSuite,
    "`TrapSuite`: the game with a trap": TrapSuite,
    "`ToolsArguments`: environments of TRL's `environment_factory`": ToolsArguments,
    "`GymnasiumArguments`: environments of Gymnasium": GymnasiumArguments,
    "`OpenEnvArguments`: environments behind an OpenEnv server": OpenEnvArguments,
    "`NumberedArguments`: tasks and success of Gymnasium and OpenEnv": NumberedArguments,
    "`DemonstrationArguments`: demonstrations for the warm start (`recipes/sft.py`)": DemonstrationArguments,
    "`ImitationConfig`: optimizer of the warm start, besides TRL's fields": ImitationConfig,
    "`EvolutionArguments`: `recipes/agent_evol.py`": EvolutionArguments,
    "`ProtocolArguments`: the protocol of an evaluation, and overrides": ProtocolArguments,
    "`EvaluationArguments`: `recipes/evaluate.py`": EvaluationArguments,
}


def read_default(field: dataclasses.Field) -> str:
    """Returns the default as it would stand in a YAML file."""
    value = field.default_factory() if field.default is dataclasses.MISSING else field.default
    if isinstance(value, list):
        return "[" + ", ".join(value) + "]"
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return str(value) or '""'


def table(config: type) -> str:
    """Returns the fields that the class adds to TRL's, or whose defaults it changes, in order."""
    inherited = {} if not issubclass(config, GRPOConfig) else {f.name: f for f in dataclasses.fields(GRPOConfig)}
    bounds = {name: each.bounds for name, each in read_bounds(config).items()}
    lines = ["| field | default | |", "|---|---|---|"]
    for field in dataclasses.fields(config):
        own = field.init and field.name in vars(config)["__annotations__"]
        if inherited.get(field.name) is field or not own:
            continue
        text = str(field.metadata["help"])
        if isinstance(bounds.get(field.name), Range):
            text += f" ({bounds[field.name]})"
        text = text.replace("|", "\\|").replace("<", "\\<")
        lines.append(f"| `{field.name}` | `{read_default(field)}` | {text} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """Returns the page with fresh tables."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    tables = "\n\n".join(f"## {heading}\n\n{table(config)}" for heading, config in TABLES.items())
    return f"{before}{BEGIN}\n{tables}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
