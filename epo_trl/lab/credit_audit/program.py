"""`epo-trl audit-credit`: audits the policy of a run on its training tasks."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Annotated, Any

from trl import ModelConfig

from epo_trl.bounds import Range, check_bounds, option
from epo_trl.cli.base import say
from epo_trl.cli.options import AlgorithmArguments, CommandLine, parse_options
from epo_trl.cli.train import StartArguments, find_algorithm
from epo_trl.envs.base import TaskSuite
from epo_trl.errors import InputError, changed_settings, spelled
from epo_trl.lab.credit_audit.critics import SavedCritic
from epo_trl.lab.credit_audit.estimators import list_estimators
from epo_trl.lab.credit_audit.rounds import AuditPlan, Player, play_round
from epo_trl.lab.credit_audit.statistics import compare, make_markdown
from epo_trl.methods import build_methods
from epo_trl.models import load_policy
from epo_trl.models.generate import UNCHANGED, SamplingPolicy
from epo_trl.models.load import sequence_limit
from epo_trl.runs.files import read_state, what_model, write_atomically, write_state
from epo_trl.runs.run_lock import folder_lock
from epo_trl.runs.run_settings import MAY_CHANGE
from epo_trl.trainers import EPOConfig, EPOPPOConfig
from epo_trl.trainers.setup import build_rules

SETTINGS = "settings.json"


@dataclass
class AuditArguments:
    """How much an audit plays, and where its files are."""

    audited_run: str = option("", "Folder of the policy: a run's output folder, or a checkpoint in it.")
    audit_folder: str = option("", "Folder for the results; by default credit_audit in RUN.")
    audit_tasks: Annotated[int, Range(least=2)] = option(64, "Number of training tasks.")
    audit_round: Annotated[int, Range(least=2)] = option(
        8, "Tasks in a round, which is what an interrupted audit repeats."
    )
    audit_minutes: float = option(30.0, "Minutes after which no further round starts.")
    audit_group: int = option(8, "Episodes per task, which the credits compare.")
    audit_episodes: int = option(2, "Episodes of each task whose turns are audited.")
    audit_continuations: int = option(16, "Continuations from each state, an even number.")
    audit_parallel: int = option(256, "Episodes in one generation call.")


def main(line: CommandLine) -> None:
    """Parses the options and audits."""
    config, _ = find_algorithm(line.algorithm)
    types = (AlgorithmArguments, StartArguments, config, ModelConfig, AuditArguments)
    suite, _, _, args, model_args, audit = parse_options(line, *types)
    one = Audit(suite, args, model_args, audit)
    with folder_lock(one.folder, "audit_folder"):
        one.report(one.play())


class Audit:
    """An audit of the run that `args` configure; it continues where one with the same settings stopped."""

    estimators: dict[str, Any]  # the credits by name

    def __init__(self, suite: TaskSuite, args: EPOConfig, model_args: ModelConfig, audit: AuditArguments) -> None:
        if not Path(audit.audited_run).is_dir():
            raise InputError(f"RUN: expected the output folder of a run, or a checkpoint, got {audit.audited_run!r}")
        check_bounds(audit)
        self.suite, self.args, self.audit = suite, args, audit
        self.folder = Path(os.path.expanduser(audit.audit_folder or f"{audit.audited_run}/credit_audit"))
        amounts = audit.audit_group, audit.audit_episodes, audit.audit_continuations, audit.audit_parallel
        self.plan = AuditPlan(*amounts, scale=str(args.scale_rewards))
        methods = build_methods(args, critic=args.has_critic)
        if own := methods.overriding("turn_rewards"):
            raise InputError(
                f"config: expected no method with rewards of its own, got {own[0]!r}: the true advantages are those of "
                "the rollout's rewards. Remove it and its method_kwargs from the config to audit the policy by these"
            )
        model, tokenizer = load_policy(
            replace(model_args, model_name_or_path=audit.audited_run),
            suite=suite,
            template=args.template_for(suite),
            device=args.device,
            seed=args.seed,
            trust_remote_code=args.trust_remote_code,
        )
        self.rules = build_rules(args, suite, tokenizer, {"state_key": True})
        self.policy = SamplingPolicy(
            model,
            tokenizer,
            max_new_tokens=args.max_completion_length,
            temperature=args.temperature,
            others=_sampling_settings(args),
        )
        self.rules.set_model_limits(sequence_limit(model.config), self.policy.eos_ids)
        gae, heads, self._values = None, None, None
        if isinstance(args, EPOPPOConfig):
            gae = {"gamma": args.gamma, "gae_lambda": args.gae_lambda}
            self._values = SavedCritic(audit.audited_run, model, args, self.rules.context)
            heads = methods.settings().get("vetta", {}) if self._values.has_two_heads else None
        self.estimators, self.left_out = list_estimators(state_keys=self._has_state_keys(), gae=gae, two_heads=heads)
        self._settings = self._find_settings(model_args)
        path = self.folder / SETTINGS
        if path.is_file() and (differ := changed_settings(read_state(path), self._settings)):
            raise InputError(
                f"audit_folder: expected a folder of this audit, got {self.folder} ({differ[0]}); use another folder, "
                "or delete that one"
            )

    def _has_state_keys(self) -> bool:
        """Returns whether the environment names its states. Raises `EnvError` if it cannot copy them."""
        env = self.suite.make_env()
        env.copy().close()  # before a reset, which may not know the option
        _, info = env.reset(seed=self.args.seed, options={"task_id": self.tasks[0], "state_key": True})
        env.close()
        return bool(info.get("state_key"))

    @property
    def tasks(self) -> list[str]:
        """The training tasks that are played, in an order that the seed decides."""
        ids = sorted(set(self.suite.task_ids("train")))
        Random(f"audit {self.args.seed}").shuffle(ids)
        return ids[: self.audit.audit_tasks]

    def _find_settings(self, model_args: ModelConfig) -> dict[str, Any]:
        """Returns all settings that affect the result, as JSON values."""
        settings = {
            **{name: value for name, value in self.args.to_dict().items() if name not in MAY_CHANGE},
            **{f"plan_{name}": value for name, value in asdict(self.plan).items()},
            "round": self.audit.audit_round,
            "weights": what_model(self.audit.audited_run),
            "model": {name: str(x) for name, x in asdict(model_args).items() if name != "model_name_or_path"},
            "template": self.rules.context.template.checksums(),
            "examples": self.rules.protocol.few_shot,
            "suite": self.suite.name,
            "environment": {name: str(value) for name, value in self.suite.settings.items()},
        }
        found: dict[str, Any] = json.loads(json.dumps(settings, default=str))
        return found

    def play(self) -> list[dict[str, Any]]:
        """Plays the missing rounds within the budget of minutes and returns all that are complete."""
        write_state(self.folder / SETTINGS, self._settings)
        end = time.monotonic() + 60 * self.audit.audit_minutes
        tasks, size, rounds = self.tasks, self.audit.audit_round, list[dict[str, Any]]()
        for number, first in enumerate(range(0, len(tasks), size)):
            path, part = self.folder / f"round-{number:03}.json", tasks[first : first + size]
            # The last round of an audit of fewer tasks lacks some, that of more tasks has others too.
            if not path.is_file() or not set(part) <= set(read_state(path, "tasks")["tasks"]):
                if rounds and time.monotonic() > end:
                    break
                draw = Random(f"audit {self.args.seed} {number}")
                policy = self.policy.seeded(draw.randrange(2**62))
                player = Player(
                    self.suite, policy, self.rules.context, self.rules.settings, self.args.seed, self._values
                )
                write_state(path, {"tasks": part, **play_round(player, part, self.plan, self.estimators, draw)})
            rounds.append(read_state(path, "halves", "credits", "task"))
        return rounds

    def report(self, rounds: list[dict[str, Any]]) -> None:
        """Writes table and JSON of the complete rounds, and prints the table."""
        tasks = [task for one in rounds for task in one["task"]]
        aborted = {task: error for one in rounds for task, error in one.get("aborted", {}).items()}
        if not tasks:
            why = next(iter(aborted.values()), "no first prompt fits max_prompt_length")
            raise InputError(f"environment: expected turns to audit, got none ({why})")
        halves = [tuple(pair) for one in rounds for pair in one["halves"]]
        credits = {name: [x for one in rounds for x in one["credits"][name]] for name in self.estimators}
        success = [won for one in rounds for won in one["success"]]
        comparison = compare(credits, halves, tasks, seed=self.args.seed)
        title = f"Credit audit of {self.audit.audited_run}"
        facts = {"success": fmean(success), "episodes": len(success), "left_out": self.left_out, "aborted": aborted}
        text = make_markdown(comparison, title)
        text += f"\nSuccess {facts['success']:.0%} of {len(success)} episodes.\n"
        text += "".join(f"\nNot audited: {name} ({reason}).\n" for name, reason in self.left_out.items())
        text += "".join(f"\nLeft out: {task} ({error}).\n" for task, error in aborted.items())
        write_state(self.folder / "report.json", {**facts, "settings": self._settings, **asdict(comparison)})
        write_atomically(self.folder / "report.md", text)
        say(spelled(text))


def _sampling_settings(args: EPOConfig) -> dict[str, Any]:
    """Returns the generation settings of training besides the temperature."""
    given = args.generation_kwargs or {}
    if given and args.use_vllm:
        raise InputError(
            f"generation_kwargs: expected none with use_vllm, got {given}: the audit generates without vLLM; "
            "set use_vllm to False and give them under transformers' names"
        )
    found = {name: getattr(args, name) for name in UNCHANGED}
    return {**found, "top_k": max(args.top_k or 0, 0), **given}  # vLLM's -1 is no limit
