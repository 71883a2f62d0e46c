"""Two drawings as inline SVG: lines over steps, and a heat map. No script, no fonts, no network."""

import math
from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]

_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
_WIDTH, _HEIGHT = 640, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 10, 28
_MAX_POINTS = 600  # of one line; more are thinned


def line_chart(
    series: Mapping[str, Points], *, label: str, is_log: bool = False, axis: str = "step"
) -> str:
    """Lines by name over a common horizontal axis; `is_log` scales the vertical one.

    Points that are not finite, or not positive on a logarithmic axis, are left out. Says so if
    nothing is left.
    """
    kept = {name: _drawable(points, is_log) for name, points in series.items()}
    kept = {name: points for name, points in kept.items() if points}
    if not kept:
        return f'<p class="none">{escape(label)}: nothing was recorded.</p>'
    xs = [x for points in kept.values() for x, _ in points]
    ys = [y for points in kept.values() for _, y in points]
    left, right = min(xs), max(xs)
    low, high = min(ys), max(ys)
    if low == high:
        low, high = low - 0.5, high + 0.5

    def place(x: float, y: float) -> str:
        across = (x - left) / (right - left or 1.0) * (_WIDTH - _LEFT - _RIGHT)
        down = (high - y) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)
        return f"{_LEFT + across:.1f},{_TOP + down:.1f}"

    parts = [_axes((left, right), (low, high), is_log, axis)]
    for index, (name, points) in enumerate(kept.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        path = " ".join(place(x, y) for x, y in points)
        parts.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{path}">'
            f"<title>{escape(name)}</title></polyline>"
        )
    legend = _legend(list(kept)) if len(kept) > 1 else ""
    return _figure(parts, _WIDTH, _HEIGHT, label) + legend


def heat_map(
    rows: Mapping[str, Sequence[float]], *, label: str, high: float, marks_zero: bool = False
) -> str:
    """Cells from white at 0 to dark at `high` and beyond; with `marks_zero` exact zeros are red.

    Rows may have different lengths. Each cell's value is its tooltip.
    """
    if not rows:
        return f'<p class="none">{escape(label)}: nothing was recorded.</p>'
    left, size = 170, 14
    columns = max(len(values) for values in rows.values())
    width = max(2.0, min(size, (900 - left) / max(1, columns)))
    parts = []
    for index, (name, values) in enumerate(rows.items()):
        top = index * size
        parts.append(f'<text x="{left - 6}" y="{top + 11}" text-anchor="end">{escape(name)}</text>')
        for column, value in enumerate(values):
            parts.append(
                f'<rect x="{left + column * width:.1f}" y="{top}" width="{width:.1f}" '
                f'height="{size - 1}" fill="{_shade(value, high, marks_zero)}">'
                f"<title>{escape(name)} [{column}]: {value:.4g}</title></rect>"
            )
    return _figure(parts, int(left + columns * width + 4), len(rows) * size, label)


def _shade(value: float, high: float, marks_zero: bool) -> str:
    if value == 0.0 and marks_zero:
        return "#dc2626"
    if not math.isfinite(value):
        return "#000000"
    share = max(0.0, min(1.0, value / high)) if high > 0 else 0.0
    light = round(245 - 205 * share)
    return f"rgb({light},{light},{round(250 - 110 * share)})"


def _drawable(points: Points, is_log: bool) -> list[tuple[float, float]]:
    found = [
        (x, math.log10(y) if is_log else y)
        for x, y in points
        if math.isfinite(y) and (y > 0 or not is_log)
    ]
    stride = math.ceil(len(found) / _MAX_POINTS) if found else 1
    return found[::stride] + ([found[-1]] if found and (len(found) - 1) % stride else [])


def _axes(across: tuple[float, float], up: tuple[float, float], is_log: bool, axis: str) -> str:
    (left, right), (low, high) = across, up
    parts = []
    for index in range(5):
        y = low + (high - low) * index / 4
        down = _TOP + (high - y) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)
        shown = 10**y if is_log else y
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{down:.1f}" y2="{down:.1f}" '
            f'stroke="#e5e7eb"/><text x="{_LEFT - 6}" y="{down + 4:.1f}" text-anchor="end">'
            f"{shown:.4g}</text>"
        )
    for x, anchor in ((left, "start"), (right, "end")):
        at = _LEFT if anchor == "start" else _WIDTH - _RIGHT
        parts.append(
            f'<text x="{at}" y="{_HEIGHT - 8}" text-anchor="{anchor}">'
            f"{escape(axis)} {x:,.0f}</text>"
        )
    return "".join(parts)


def _figure(parts: Sequence[str], width: int, height: int, label: str) -> str:
    return (
        f'<p class="label">{escape(label)}</p>'
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def _legend(names: Sequence[str]) -> str:
    items = [
        f'<span style="color:{_COLOURS[index % len(_COLOURS)]}">&#9632;</span> {escape(name)}'
        for index, name in enumerate(names)
    ]
    return f'<p class="legend">{" &nbsp; ".join(items)}</p>'
