"""Sphinx builds the site of `make site` without a warning, hence without dead links."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rec_kernels as rk

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="the pages are not beside the tests")


def test_gallery_has_every_picture() -> None:
    """docs/gallery.md shows every file of docs/images, each once."""
    shown = re.findall(r"^!\[[^\]]+\]\(images/([^)]+)\)$", (ROOT / "docs" / "gallery.md").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(p.name for p in (ROOT / "docs" / "images").iterdir())


@pytest.mark.full
def test_site_builds(tmp_path: Path) -> None:
    """Every page is built and in the menu; the reference has every name, with inherited methods of this package.

    Pages load nothing from other sites.
    """
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", ".", str(tmp_path)]
    built = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    first = (tmp_path / "index.html").read_text()
    for page in ("README", "CONTRIBUTING", "CHANGELOG", *(f"docs/{p.stem}" for p in (ROOT / "docs").glob("*.md"))):
        assert (tmp_path / f"{page}.html").exists()
        assert page == "README" or f'href="{page}.html"' in first
    reference = (tmp_path / "docs" / "api.html").read_text()
    names = [name for name in rk.__all__ if not name.startswith("__") and name != "ops"]
    names += ["EmbeddingBagCollection.freeze", "KeyedJaggedTensor.values"]
    assert [name for name in names if f'id="rec_kernels.{name}"' not in reference] == []
    assert 'id="rec_kernels.EmbeddingBagCollection.half"' not in reference
    assert re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="https?:[^"]+"', first + reference) == []
