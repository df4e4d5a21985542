"""What mkdocs.yml cannot say: which files are in the site, and how equations and files that are no Markdown are shown.

The site has the layout of the repository. Its pages are the Markdown files of the root and of docs/. Every file that a
page links to comes with it: text (a recipe, a YAML, a notebook) as a page that shows it, pictures as they are. So a
relative link works in the site if it works on GitHub. Links to folders work on GitHub alone; the build refuses them.
"""

import json
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

LANGUAGES = {".py": "python", ".yaml": "yaml", ".cfg": "ini", ".txt": "text", ".ipynb": "", "": "make"}
LINK = re.compile(r"\]\(([^)#:\s]+)[^)]*\)")  # to a file: no anchor alone, no other site


class SourcePage(File):
    """A page that shows a file of text."""

    def is_documentation_page(self) -> bool:
        """Returns True; mkdocs would copy the file."""
        return True

    @property
    def content_string(self) -> str:
        """The file in a block of code, below its path; a notebook as it was run."""
        text = self.content_bytes.decode()
        if self.src_uri.endswith(".ipynb"):
            return "\n\n".join(part for cell in json.loads(text)["cells"] for part in _cell(cell))
        return f"# {self.src_uri}\n\n{_code(text, LANGUAGES[Path(self.src_uri).suffix])}"


def on_config(config: MkDocsConfig) -> None:
    """Shows blocks of `math`, which GitHub knows too, as MathML: browsers draw it without a script."""
    math = {"name": "math", "class": "math", "format": as_mathml}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [math]}


def as_mathml(source: str, *_: Any, **__: Any) -> str:
    """Returns an equation in LaTeX as HTML."""
    return f'<div class="math">{convert(source.strip(), display="block")}</div>'


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Returns the files of the site, at their places in the repository."""
    root = Path(config.config_file_path).resolve().parent
    pages = {path.relative_to(root).as_posix() for path in (*root.glob("*.md"), *root.glob("docs/*.md"))}
    of_theme = (file for file in files if file.src_dir != config.docs_dir or file.src_uri in config.extra_css)
    found = Files([*of_theme])
    waiting = sorted(pages)
    for name in waiting:  # which grows
        if name in found.src_uris:
            continue
        path = root / name
        is_source = path.suffix in LANGUAGES
        found.append(
            (SourcePage if is_source else File)(
                name,
                str(root),
                config.site_dir,
                use_directory_urls=False,
                dest_uri=f"{name}.html" if is_source else None,
                inclusion=InclusionLevel.UNDEFINED if name in pages else InclusionLevel.NOT_IN_NAV,
            )
        )
        if path.suffix == ".md":
            targets = [path.parent / target for target in LINK.findall(path.read_text(encoding="utf-8"))]
            waiting += [target.resolve().relative_to(root).as_posix() for target in targets if target.is_file()]
    return found


def _code(text: str, language: str) -> str:
    fence = "`" * 6
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _cell(cell: dict[str, Any]) -> list[str]:
    """Returns a notebook's cell as parts of a Markdown page: its text, or its code and what that has shown."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    parts = [_code(source, "python")]
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            parts.append(f'<img alt="plot" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">')
        elif "text/markdown" in data:
            parts.append("".join(data["text/markdown"]))
        elif "text/html" in data:
            parts.append(f"<div>{''.join(data['text/html'])}</div>")
        elif output.get("name") == "stdout" or data:
            parts.append(_code("".join(output.get("text") or data["text/plain"]), "text"))
    return parts
