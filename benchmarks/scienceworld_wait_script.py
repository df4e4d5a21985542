"""The score of an unskilled script under each ScienceWorld protocol: nine commands of a tour, then `wait`.

python benchmarks/scienceworld_wait_script.py --split iid

It plays the whole list in the same evaluation as policies. A success rule that it satisfies does not measure solved
tasks.
"""

import argparse

from epo_trl.envs.scienceworld import ScienceWorldSuite
from epo_trl.evaluation import EvalReport, format_table, get_protocol
from epo_trl.evaluation.play import play_chunks, protocol_context, protocol_settings
from epo_trl.models import build_tokenizer
from epo_trl.rollout.demonstrations import ANSWER
from epo_trl.rollout.spec import ResponseArguments

TOUR = (
    "look around", "inventory", "open door to kitchen", "teleport to kitchen", "look around",
    "teleport to workshop", "teleport to outside", "teleport to bathroom", "teleport to greenhouse",
)  # fmt: skip
PROTOCOLS = ("strict30", "strict100", "epo-released")


class WaitScript:
    """A policy that ignores its prompts: all episodes advance together, so the turn is the number of calls."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer, self.turn = tokenizer, 0

    def __call__(self, prompts: list[list[int]]) -> tuple[list[list[int]], None]:
        """Returns the response of this turn for every prompt."""
        action = TOUR[self.turn] if self.turn < len(TOUR) else "wait"
        self.turn += 1
        answer = self.tokenizer(ANSWER.format(thought="wait", action=action))["input_ids"]
        return [[*answer, self.tokenizer.eos_token_id]] * len(prompts), None


def main() -> None:
    """Plays the list and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", default="iid")
    parser.add_argument("--episodes", type=int, help="only the first N tasks, which cycle through the types")
    args = parser.parse_args()
    suite = ScienceWorldSuite()
    tokenizer = build_tokenizer([*TOUR, "wait"])
    tasks = suite.task_ids(args.split)[: args.episodes]
    reports = []
    for name in PROTOCOLS:
        protocol = get_protocol(name)
        options = ResponseArguments(prompt_template="scienceworld_compact", max_prompt_length=10**6)
        context = protocol_context(protocol, options, suite, tokenizer)
        script, settings = WaitScript(tokenizer), protocol_settings(protocol)
        ((episodes, seconds),) = play_chunks(suite, [tasks], lambda _, script=script: script, context, settings)
        reports.append(
            EvalReport.from_episodes(episodes, protocol=protocol, suite=suite.name, split=args.split, seconds=seconds)
        )
    print(format_table(reports))


if __name__ == "__main__":
    main()
