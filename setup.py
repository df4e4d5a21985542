"""What setup.cfg cannot hold: README for a package index, where relative links lead nowhere."""

import configparser
import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s]+)\)")  # not of a URL, nor of a heading of the page itself
PICTURES = (".png", ".svg")


def repository() -> str:
    """Returns the URL in setup.cfg."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return re.search(r"^Source = (\S+)$", parser["metadata"]["project_urls"], re.MULTILINE)[1]


def with_whole_links(text: str, base: str) -> str:
    """Returns Markdown whose links to files are URLs of the repository."""

    def whole(link: re.Match) -> str:
        kind = "raw" if link[1].endswith(PICTURES) else "blob"
        return f"]({base}/{kind}/main/{link[1]})"

    return LINK.sub(whole, text)


if __name__ == "__main__":
    setup(long_description=with_whole_links((ROOT / "README.md").read_text(encoding="utf-8"), repository()))
