"""The documentation builds as a site: strictly, so every link and anchor in it and in the README leads somewhere."""

import re
import shutil
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

ROOT = Path(__file__).parents[1]
README = """# Small

[page](docs/page.md#a-heading--here) and [file](recipes/tiny.yaml)

```math
L = \\frac{\\lambda}{2}
```
"""


def built(root, site):
    """Returns the site of a repository, as `make docs` builds it."""
    build(load_config(str(root / "mkdocs.yml"), site_dir=str(site), strict=True))
    return site


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return built(ROOT, tmp_path_factory.mktemp("site"))


@pytest.fixture
def small(tmp_path):
    """A repository of two pages and a YAML, with the settings of ours."""
    text = (ROOT / "mkdocs.yml").read_text()
    assert "nav:\n" in text
    (tmp_path / "mkdocs.yml").write_text(re.sub(r"^nav:\n(?: .*\n)+", "", text, flags=re.MULTILINE))
    for folder in ("docs", "recipes"):
        (tmp_path / folder).mkdir()
    for name in ("site_hooks.py", "site.css"):
        shutil.copy(ROOT / "docs" / name, tmp_path / "docs")
    (tmp_path / "README.md").write_text(README)
    (tmp_path / "docs" / "page.md").write_text("# Page\n\n## A heading / here\n\n[up](../README.md)\n")
    (tmp_path / "recipes" / "tiny.yaml").write_text("seed: 3  # <b>\n")
    return tmp_path


@pytest.mark.slow
def test_every_page_is_in_the_site(site):
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    names = [path.relative_to(ROOT).with_suffix(".html").as_posix().replace("README", "index") for path in pages]
    assert len(names) > 20
    assert [name for name in names if not (site / name).is_file()] == []
    assert list(site.rglob("*.py")) == []


def test_the_site_loads_nothing_from_the_network(site):
    loaded = re.compile(r"""<(?:script|img|iframe|source|link)\b[^>]*?(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""")
    found = {path: loaded.findall(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    assert len(found) > 20
    assert {path: links for path, links in found.items() if links} == {}


def test_links_to_pages_headings_and_files_work_and_equations_are_drawn_by_the_browser(small):
    site = built(small, small / "site")
    index, page = (site / "index.html").read_text(), (site / "docs" / "page.html").read_text()
    assert 'href="docs/page.html#a-heading--here"' in index and 'id="a-heading--here"' in page  # as on GitHub
    assert 'href="../index.html">up' in page
    assert 'href="recipes/tiny.yaml.html"' in index
    shown = re.sub(r"</?(?:span|a)\b[^>]*>", "", (site / "recipes" / "tiny.yaml.html").read_text())
    assert "seed: 3  # &lt;b&gt;" in shown
    assert "<mfrac>" in index and "&#x003BB;" in index and "frac{" not in index


def test_links_that_lead_nowhere_and_pages_that_nothing_lists_end_the_build(small):
    links = ["[x](missing.md)", "[x](page.md#missing)", "[x](#other)", "![x](missing.png)", "[x](../recipes)"]
    page = small / "docs" / "page.md"
    page.write_text(page.read_text() + "\n" + "\n".join(links) + "\n")
    with pytest.raises(Abort, match=f"{len(links) + 1} warnings"):
        (small / "mkdocs.yml").write_text((small / "mkdocs.yml").read_text() + "\nnav: [README.md]\n")
        built(small, small / "site")


def test_a_notebook_is_a_page_with_what_its_cells_have_shown(small):
    nbformat = pytest.importorskip("nbformat")
    new = nbformat.v4
    shown = [
        new.new_output("stream", text="as <it> is"),
        new.new_output(
            "display_data", data={"text/markdown": "| a |\n|---|\n| b |", "text/plain": "<Markdown object>"}
        ),
        new.new_output("display_data", data={"text/html": "<i>soft</i>", "text/plain": "soft object"}),
        new.new_output("display_data", data={"image/png": "QUJD", "text/plain": "picture object"}),
    ]
    cells = [new.new_markdown_cell("# Title"), new.new_code_cell("f(1)", outputs=shown)]
    nbformat.write(new.new_notebook(cells=cells), small / "book.ipynb")
    (small / "README.md").write_text("[book](book.ipynb)\n")
    page = (built(small, small / "site") / "book.ipynb.html").read_text()
    assert "as &lt;it&gt; is" in page and "<td>b</td>" in page and "<i>soft</i>" in page and "base64,QUJD" in page
    assert "object" not in re.sub(r"(?s)<(script|style).*?</\1>", "", page)
