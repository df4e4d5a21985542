"""Options as one types them."""

from epo_trl.cli.options import parse_options, read_command_line


def parse_recipe(*types, environment=None, argv):
    """Returns the task suite, and an object of each type, that a recipe makes of its command line."""
    words = [*([f"--environment={environment}"] if environment else []), *argv]
    return parse_options(read_command_line(words), *types)
