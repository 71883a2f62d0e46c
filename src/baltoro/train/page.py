"""The frame of a run's page: one HTML file that loads nothing, for wide and narrow screens."""

import itertools
from collections.abc import Sequence
from html import escape

_STYLE = """\
:root { color-scheme: light dark; --text: #1f2937; --soft: #6b7280; --line: #e5e7eb;
  --back: #ffffff; --panel: #f3f4f6; --alarm: #b91c1c; }
@media (prefers-color-scheme: dark) { :root { --text: #e5e7eb; --soft: #9ca3af; --line: #374151;
  --back: #111827; --panel: #1f2937; --alarm: #f87171; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1180px; margin: 0 auto; padding: 1em;
  color: var(--text); background: var(--back); }
h1 { margin: .4em 0; } h2 { margin: 1.6em 0 .6em; border-bottom: 1px solid var(--line); }
nav { font-size: 14px; } nav a { color: inherit; margin-right: 1em; white-space: nowrap; }
.grid { display: grid; gap: .5em 2em;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); }
figure { margin: .6em 0; min-width: 0; } figcaption { font-weight: 600; margin-bottom: .3em; }
svg { display: block; max-width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--text); }
svg line.grid { stroke: var(--line); }
.wide { overflow-x: auto; } .wide svg { max-width: none; } .wide td { white-space: nowrap; }
.legend, .none, figcaption + p { color: var(--soft); font-size: 13px; margin: .2em 0; }
.legend .item { display: inline-block; margin-right: 1em; } .legend b { color: var(--text); }
table { border-collapse: collapse; } td, th { padding: .15em .8em .15em 0; text-align: left;
  vertical-align: top; overflow-wrap: anywhere; } th { white-space: nowrap; }
pre { background: var(--panel); padding: .8em; white-space: pre-wrap; overflow-wrap: anywhere; }
summary { cursor: pointer; }
.pictured { display: flex; flex-wrap: wrap; gap: 1em; align-items: flex-start; margin: 1em 0; }
.pictured > div { flex: 1 1 18em; min-width: 0; } .pictured pre { margin-top: 0; }
img { width: 12em; max-width: 100%; height: auto; background: #fff; border: 1px solid var(--line); }
.alarm { color: var(--alarm); overflow-wrap: anywhere; }
@media (max-width: 600px) { svg text { font-size: 17px; } .wide svg text { font-size: 12px; } }
"""


def page(title: str, sections: Sequence[tuple[str, str]]) -> str:
    """The page of sections by heading; their contents are HTML."""
    links = "".join(f'<a href="#{_anchor(heading)}">{heading}</a> ' for heading, _ in sections)
    body = "\n".join(
        f'<h2 id="{_anchor(heading)}">{heading}</h2>\n{content}' for heading, content in sections
    )
    name = escape(title)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}</title><style>\n{_STYLE}</style></head>\n"
        f"<body><h1>{name}</h1>\n<nav>{links}</nav>\n{body}\n</body></html>\n"
    )


def grid(*figures: str) -> str:
    """Figures side by side where there is room."""
    return f'<div class="grid">{"".join(figures)}</div>'


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Names and values as text."""
    cells = [f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows]
    return f"<table>{''.join(cells)}</table>"


def card(text: str) -> str:
    """Markdown with its tables as tables; the rest stays as it is written."""
    parts = []
    for is_table, group in itertools.groupby(text.splitlines(), lambda line: line.startswith("|")):
        lines = list(group)
        if not is_table:
            parts.append(f"<pre>{escape(chr(10).join(lines).strip())}</pre>")
            continue
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        cells = [
            "".join(f"<td>{escape(cell)}</td>" for cell in row)
            for row in rows
            if not all(set(cell) <= set("-:") for cell in row)
        ]
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        parts.append(f'<div class="wide"><table>{body}</table></div>')
    return "".join(parts)


def folded(summary: str, text: str) -> str:
    """Text of many lines behind a click."""
    return f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"


def none(what: str) -> str:
    """That there is nothing to show."""
    return f'<p class="none">{escape(what)}.</p>'


def _anchor(heading: str) -> str:
    return heading.lower().replace(" ", "-")
