"""Sphinx's settings for the site, which `make site` builds of the repository's own pages and docstrings.

The sources are the files of the repository at their own places, so that one link serves there and on the site. Scripts
and files of ``bench/results`` that pages link to are copied along.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from sphinx.application import Sphinx

import rec_kernels as rk

ROOT = Path(__file__).resolve().parent.parent
#: Heading of the menu -> the pages below it, in order.
MENU = {
    "Use it": ("tutorial", "install", "modules", "convert", "distributed", "tuning", "cpp", "robustness", "status"),
    "Reference": ("glossary", "fbgemm", "api", "ops", "layouts", "numerics", "row_file"),
    "Trainer": ("trainer", "data", "studies"),
    "Measured": ("results", "quality", "gpu-results", "gallery", "benchmarks", "gpu-model", "first_light"),
}
#: How the module that defines a name begins -> heading in docs/api.md; the first that fits.
KINDS = {
    "rec_kernels.nn.tables": "Tables",
    "rec_kernels.nn.training": "Optimizers and training",
    "rec_kernels.nn.jagged": "Batches",
    "rec_kernels.nn": "Collections and layers",
    "rec_kernels.models": "Networks, and modules of one table",
    "rec_kernels.convert": "From and to other packages",
    "rec_kernels.distributed": "Several processes",
    "rec_kernels.ops": "Functions",
    "rec_kernels": "The package",
}

project = "rec_kernels"
author = project_copyright = "The rec_kernels developers"
version = release = rk.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md"]
html_theme = "furo"
html_title = project
html_copy_source = False
html_css_files = html_static_path = ["site.css"]
highlight_language = "none"
myst_heading_anchors = 4
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_ivar = True
napoleon_use_rtype = False
add_module_names = False
# Classes of others, whose members are theirs to describe: the site has what classes of this package inherit from these.
FOREIGN = "Module,Sequential,Optimizer,ModuleSharder,ShardedModule,FusedOptimizerModule,tuple"


def menu() -> str:
    """The menu of all pages, which README does not show."""
    parts = [*((f":caption: {title}", [f"docs/{page}" for page in pages]) for title, pages in MENU.items())]
    parts.append((":caption: Work on it", ["CONTRIBUTING", "CHANGELOG"]))
    return "".join("\n```{{toctree}}\n:hidden:\n{}\n{}\n```\n".format(head, "\n".join(pages)) for head, pages in parts)


def reference() -> str:
    """The docstrings of all public names, by kind."""
    things = {name: getattr(rk, name) for name in rk.__all__ if not name.startswith("__") and name != "ops"}
    if importlib.util.find_spec("torchrec"):  # else what needs it cannot be imported
        things |= {f"distributed.{name}": getattr(rk.distributed, name) for name in rk.distributed.__all__}
    of_kind: dict[str, list[str]] = {title: [] for title in KINDS.values()}
    for name in sorted(things, key=str.lower):
        module = getattr(things[name], "__module__", "rec_kernels")
        of_kind[next(title for start, title in KINDS.items() if module.startswith(start))].append(name)
    parts = []
    for title, found in of_kind.items():
        parts.append(f"\n## {title}\n")
        for name in found:
            thing = things[name]
            kind = "autoclass" if isinstance(thing, type) else "autofunction" if callable(thing) else "autodata"
            members = f"\n   :members:\n   :inherited-members: {FOREIGN}" if kind == "autoclass" else ""
            parts.append(f"### {name}\n\n```{{eval-rst}}\n.. {kind}:: rec_kernels.{name}{members}\n```\n")
    return "\n".join(parts)


def _add_parts(app: Sphinx, name: str, source: list[str]) -> None:
    """Adds to README the menu, and to docs/api.md the docstrings: what only the site can show."""
    source[0] += {"README": menu, "docs/api": reference}.get(name, str)()


def _finish(app: Sphinx, error: Exception | None) -> None:
    """The first page is README's, at the address where one looks for it."""
    if error is None:
        shutil.copy(Path(app.outdir) / "README.html", Path(app.outdir) / "index.html")


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("source-read", _add_parts)
    app.connect("build-finished", _finish)
