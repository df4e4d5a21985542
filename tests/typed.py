"""Options as one types them."""

from epo_trl.cli.command_line import read_command_line
from epo_trl.cli.options import parse_options


def parse_recipe(*types, environment=None, argv):
    """Returns the task suite, and an object of each type, that a recipe makes of its command line."""
    return parse_options(read_command_line(argv, environment), *types)
