"""A benchmark's report as one HTML file: a plot and a table for each model, without scripts or anything to load."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from everygpu.bench.report import COLUMNS, EXPLANATION, Row, describe_size, describe_where, fill_columns, last_line

_ROW_PX = 40
_BAR_PX = 12
_AXIS_PCT = 96.0
"""How wide the longest thing in a plot is; the rest is left for the end of a spread's line."""
_PLOTS = (
    "Bars are samples a second, with the lines of their spread; the mark across is the best single GPU times the "
    "number of GPUs."
)

_STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --quiet: #59636e; --back: #fff; --line: #d1d9e0;
  --ours: #0969da; --peer: #8c959f; --ideal: #bc4c00; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --quiet: #9198a1; --back: #0d1117; --line: #3d444d;
  --ours: #4493f8; --peer: #6e7681; --ideal: #f0883e; } }
body { background: var(--back); color: var(--text); font: 16px/1.5 system-ui, sans-serif; max-width: 60rem;
  margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
p, li { color: var(--quiet); font-size: .875rem; }
.table { overflow-x: auto; overflow-wrap: normal; margin-top: 1rem; }
table { border-collapse: collapse; font-size: .8125rem; white-space: nowrap; }
th, td { padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
svg { display: block; width: 100%; overflow: visible; } svg text { fill: var(--text); font-size: 13px; }
svg .figure { text-anchor: end; } svg .ours { fill: var(--ours); } svg .peer { fill: var(--peer); }
svg .spread { stroke: var(--text); stroke-width: 1.5; } svg .ideal { stroke: var(--ideal); stroke-width: 2; }
"""


def write_page(machine: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Write a report: where it ran, and for each model a plot of samples a second, and all figures.

    Args:
        machine: As ``describe_machine`` returns it.
        rows: Measured ones and others, of one model or several, with ``efficiency``.
    """
    title = f"Ways to train, {escape(str(machine['date']))}"
    parts = [
        _describe_model([row for row in rows if row["model"] == model])
        for model in dict.fromkeys(row["model"] for row in rows)
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        f"<p>{escape(describe_where(machine))}</p>\n<p>{escape(EXPLANATION)} {_PLOTS}</p>\n"
        f"{''.join(parts)}</body>\n</html>\n"
    )


def _describe_model(rows: Sequence[Row]) -> str:
    measured = [row for row in rows if "ms" in row]
    size = describe_size(measured[0]) if measured else ""
    heading = f"<h2>{escape(rows[0]['model'] + size)}, {escape(rows[0]['precision'])}</h2>\n"
    failed = [f"<li>{escape(row['peer'])}: {escape(last_line(row['error']))}</li>" for row in rows if "error" in row]
    listed = f"<ul>{''.join(failed)}</ul>\n" if failed else ""
    return heading + (draw_bars(measured) + _write_table(measured) if measured else "") + listed


def _write_table(rows: Iterable[Row]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
    body = (f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in fill_columns(row))}</tr>\n" for row in rows)
    return f'<div class="table"><table>\n<tr>{head}</tr>\n{"".join(body)}</table></div>\n'


def draw_bars(rows: Sequence[Row]) -> str:
    """Draw samples a second as SVG: widths in percent and heights in pixels, so that letters keep their size.

    Args:
        rows: Measured ones of one model, at least one.
    """
    ideal = max((row["samples_per_s"] / row["efficiency"] for row in rows if row.get("efficiency")), default=0.0)
    pct_per_sample = _AXIS_PCT / max(ideal, *(_most(row) for row in rows))
    bars = "".join(_draw_row(row, n * _ROW_PX, pct_per_sample, ideal) for n, row in enumerate(rows))
    return f'<svg role="img" aria-label="samples per second" height="{_ROW_PX * len(rows)}">\n{bars}</svg>\n'


def _most(row: Row) -> float:
    return float(row["samples_per_s"] * row["ms"] / row["ms_min"])


def _draw_row(row: Row, top: int, pct_per_sample: float, ideal: float) -> str:
    rate, middle, bottom = row["samples_per_s"], top + 20 + _BAR_PX / 2, top + 20 + _BAR_PX
    least, most = rate * row["ms"] / row["ms_max"] * pct_per_sample, _most(row) * pct_per_sample
    kind = "ours" if row["peer"].startswith(("ours", "step")) else "peer"
    mark = _draw_line("ideal", ideal * pct_per_sample, ideal * pct_per_sample, top + 18, bottom + 2) if ideal else ""
    return (
        f'<text x="0" y="{top + 14}">{escape(row["peer"])}</text>'
        f'<text class="figure" x="100%" y="{top + 14}">{rate:,.0f} samples/s</text>'
        f'<rect class="{kind}" x="0" y="{top + 20}" width="{rate * pct_per_sample:.2f}%" height="{_BAR_PX}" rx="2"/>'
        f"{_draw_line('spread', least, most, middle, middle)}{mark}\n"
    )


def _draw_line(kind: str, left_pct: float, right_pct: float, top: float, bottom: float) -> str:
    return f'<line class="{kind}" x1="{left_pct:.2f}%" x2="{right_pct:.2f}%" y1="{top:g}" y2="{bottom:g}"/>'
