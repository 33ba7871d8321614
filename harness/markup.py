"""Small pieces of HTML, escaped, that every page of the harness is made of."""

from __future__ import annotations

import html
from collections.abc import Iterable

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1f23; background: #fff; max-width: 1180px; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin-top: 2.4rem; }
h3 { font-size: 1.05rem; margin: 1.6rem 0 0; }
.verdict { display: inline-block; padding: .1rem .7rem; border-radius: .3rem; color: #fff; font-weight: 600; }
.good { background: #2e7d32; } .bad { background: #b3261e; } .open { background: #8a6d00; }
table { border-collapse: collapse; margin: .6rem 0; }
td, th { padding: .25rem .8rem .25rem 0; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; }
th { font-weight: 600; } td.n, th.n { text-align: right; padding-left: .8rem; font-variant-numeric: tabular-nums; }
code, pre { background: #f4f5f7; padding: 0 .25rem; border-radius: .2rem; overflow-wrap: anywhere; font-size: .9em; }
pre { padding: .5rem; white-space: pre-wrap; } summary { cursor: pointer; font-weight: 600; margin: 1rem 0; }
"""


def escape(text: object) -> str:
    """Return text as it may stand in HTML."""
    return html.escape(str(text))


def table(head: tuple[str, ...], rows: Iterable[Iterable[str]], numeric: int = 0) -> str:
    """Return a table of finished cells (HTML), the last ``numeric`` columns aligned as numbers."""

    def row(tag: str, cells: list[str]) -> str:
        marks = [' class="n"' if i >= len(cells) - numeric else "" for i in range(len(cells))]
        return "<tr>" + "".join(f"<{tag}{m}>{c}</{tag}>" for m, c in zip(marks, cells, strict=True)) + "</tr>"

    titles = [row("th", list(head))] if head else []
    return "<table>" + "\n".join([*titles, *(row("td", list(cells)) for cells in rows)]) + "</table>"


def link(url: str, text: str) -> str:
    """Return a link, or the plain text if the address is not of the web or of a file."""
    known = url.startswith(("https://", "http://", "file://"))
    return f'<a href="{escape(url)}" rel="noreferrer">{escape(text)}</a>' if known else escape(text)
