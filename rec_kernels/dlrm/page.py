"""The parts of an HTML page: one file, no scripts, nothing loaded from elsewhere; for a phone, a screen and paper."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape

import matplotlib
from matplotlib.figure import Figure

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 46rem; margin: 0 auto;
  padding: 1rem; }
h1 { font-size: 1.5em; overflow-wrap: anywhere; margin: 0 0 .25rem; }
h2 { font-size: 1.15em; margin: 2rem 0 .5rem; border-bottom: 1px solid #ccc; }
p { margin: .4rem 0; overflow-wrap: anywhere; }
.failed { border-left: 4px solid #b00020; padding-left: .6rem; }
.scores { display: flex; flex-wrap: wrap; gap: .5rem 1.75rem; margin: 1rem 0; }
.scores dt { font-size: .85em; color: #555; }
.scores dd { font-size: 1.8em; line-height: 1.2; margin: 0; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9em; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .5rem; border-bottom: 1px solid #e4e4e4; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
table.text td, table.text th { text-align: left; white-space: normal; overflow-wrap: anywhere; }
tr.strong { font-weight: 600; }
figure { margin: .75rem 0; break-inside: avoid; }
img { width: 100%; max-width: 40rem; height: auto; }
@media print { body { max-width: none; font-size: 11px; padding: 0; } .scroll { overflow: visible; }
  tr, .scores { break-inside: avoid; } h2 { break-after: avoid; } img { max-width: 12cm; } }
"""


def number(value: float | None, digits: int = 4) -> str:
    """The number with ``digits`` decimals; None, a score that is not defined, is "-"."""
    return "-" if value is None else f"{value:.{digits}f}"


def size(count: float) -> str:
    """Bytes, as in "11.4 MiB"."""
    power = min(max(int(count).bit_length() - 1, 0) // 10, 3)
    return f"{count / 1024**power:,.{1 if power else 0}f} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"


def picture(figure: Figure) -> str:
    """The figure as an SVG in a ``data:`` address, which keeps its ids and styles away from the page's."""
    out = io.StringIO()
    # Equal figures give equal text without metadata and with fixed ids.
    with matplotlib.rc_context({"svg.hashsalt": "rec_kernels"}):
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return "data:image/svg+xml;base64," + base64.b64encode(out.getvalue().encode()).decode()


def document(title: str, sections: Sequence[str]) -> str:
    """A page of sections, which are HTML; the title is a text and is escaped."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def section(title: str, content: str) -> str:
    """A part of a page: the title is a text, the content HTML; nothing where there is no content."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def table(header: Sequence[str], rows, *, kind: str = "", strong: int = 0) -> str:
    """HTML table of texts, which are escaped; the first ``strong`` rows stand out."""

    def line(cells, tag: str, css: str = "") -> str:
        return f"<tr{css}>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line(row, "td", ' class="strong"' if i < strong else "") for i, row in enumerate(rows))
    css = f' class="{kind}"' if kind else ""
    return f'<div class="scroll"><table{css}><thead>{line(header, "th")}</thead><tbody>{body}</tbody></table></div>'
