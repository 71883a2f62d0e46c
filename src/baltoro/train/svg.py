"""Two drawings as inline SVG: lines over steps, and a heat map. No script, no fonts, no network.

Both are figures with their last values in words, so that nothing has to be read off a colour or a
tooltip. Colours of text and grid come from the page (`train.page`), which knows light from dark.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]

_COLOURS = ("#3b82f6", "#ef4444", "#10b981", "#f59e0b", "#8b5cf6", "#06b6d4", "#ec4899", "#65a30d")
_DASHES = ("", "7 3", "2 3")  # of the second and third round of colours
_WIDTH, _HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 24, 10, 40
_MAX_POINTS = 600  # of one line; more are thinned
_LABEL, _CELL, _ROW = 150, 46, 18  # of a heat map: width of names, of a cell with its value, height
_MAX_WORDY = 12  # columns whose cells show their value


def line_chart(
    series: Mapping[str, Points],
    *,
    label: str,
    is_log: bool = False,
    axis: str = "step",
    dashed: Sequence[str] = (),
) -> str:
    """Lines by name over a common horizontal axis; `is_log` scales the vertical one.

    Points that are not finite, or not positive on a logarithmic axis, are left out. Says so if
    nothing is left. Lines named in `dashed` are.
    """
    kept = {name: _drawable(points, is_log) for name, points in series.items()}
    kept = {name: points for name, points in kept.items() if points}
    if not kept:
        return f'<p class="none">{escape(label)}: nothing was recorded.</p>'
    xs = [x for points in kept.values() for x, _ in points]
    across = (min(xs), max(xs))
    up, marks = _vertical([y for points in kept.values() for _, y in points], is_log)

    def place(x: float, y: float) -> tuple[float, float]:
        share = (x - across[0]) / (across[1] - across[0] or 1.0)
        down = (up[1] - y) / (up[1] - up[0])
        return (
            _LEFT + share * (_WIDTH - _LEFT - _RIGHT),
            _TOP + down * (_HEIGHT - _TOP - _BOTTOM),
        )

    parts = []
    for mark in marks:
        _, y = place(across[0], mark)
        shown = _number(10**mark if is_log else mark)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f"{_text(_LEFT - 6, y + 4, shown, anchor='end')}"
        )
    for mark in _ticks(*across, is_whole=True):
        x, _ = place(mark, up[0])
        parts.append(_text(x, _HEIGHT - 22, _number(mark)))
    parts.append(_text(_WIDTH - _RIGHT, _HEIGHT - 5, axis, anchor="end"))
    for index, (name, points) in enumerate(kept.items()):
        spots = [place(x, y) for x, y in points]
        parts.append(_line(name, spots, _COLOURS[index % 8], _dash(index, name in dashed)))
    ends = {name: 10 ** points[-1][1] if is_log else points[-1][1] for name, points in kept.items()}
    return _figure(parts, (_WIDTH, _HEIGHT), label, _legend(ends, dashed))


def heat_map(
    rows: Mapping[str, Sequence[float]],
    *,
    label: str,
    high: float,
    columns: Sequence[str],
    axis: str,
    marks_zero: bool = False,
) -> str:
    """Cells from light at 0 to dark at `high` and beyond; with `marks_zero` exact zeros are red.

    Rows may have different lengths; `columns` names the columns of the longest, `axis` what they
    are. Up to twelve columns show their values; each cell's is its tooltip.
    """
    if not rows:
        return f'<p class="none">{escape(label)}: nothing was recorded.</p>'
    is_wordy = len(columns) <= _MAX_WORDY
    width = _CELL if is_wordy else max(3.0, min(20.0, 760 / len(columns)))
    parts = [_text(_LABEL - 6, 12, axis, anchor="end")]
    stride = 1 if is_wordy else math.ceil(46 / width)
    for index in range(0, len(columns), stride):
        x = _LABEL + (index + 0.5) * width
        parts.append(_text(x, 12, columns[index]))
    for index, (name, values) in enumerate(rows.items()):
        y = _ROW * (index + 1)
        parts.append(_text(_LABEL - 6, y + 13, name, anchor="end"))
        for column, value in enumerate(values):
            x = _LABEL + column * width
            tooltip = f"{name}, {axis} {columns[column]}: {value:.4g}"
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 1}" '
                f'fill="{_shade(value, high, marks_zero)}"><title>{escape(tooltip)}</title></rect>'
            )
            if is_wordy:
                parts.append(_cell_text(x + width / 2, y + 13, value, high, marks_zero))
    bottom = _ROW * (len(rows) + 1)
    parts.append(_scale(bottom + 8, high))
    size = (int(_LABEL + max(len(columns) * width, 260) + 4), bottom + 30)
    return f'<div class="wide">{_figure(parts, size, label)}</div>'


def _line(name: str, spots: Sequence[tuple[float, float]], colour: str, dash: str) -> str:
    title = f"<title>{escape(name)}</title>"
    if len(spots) == 1:
        return f'<circle cx="{spots[0][0]:.1f}" cy="{spots[0][1]:.1f}" r="3" fill="{colour}"/>'
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
    return (
        f'<polyline fill="none" stroke="{colour}" stroke-width="1.8"{dash} points="{path}">'
        f"{title}</polyline>"
    )


def _dash(index: int, is_dashed: bool) -> str:
    pattern = "4 4" if is_dashed else _DASHES[index // 8 % len(_DASHES)]
    return f' stroke-dasharray="{pattern}"' if pattern else ""


def _vertical(ys: Sequence[float], is_log: bool) -> tuple[tuple[float, float], list[float]]:
    """Ends of the vertical axis and where it is marked, in what is drawn (log10 if `is_log`)."""
    low, high = min(ys), max(ys)
    if is_log:
        if high - low < 0.05:
            low, high = low - 0.1, high + 0.1
        return (low, high), _log_marks(low, high)
    if low == high:
        low, high = min(0.0, low), max(0.0, high) or 1.0
    elif 0.0 < low < high / 2:
        low = 0.0
    step = _step((high - low) / 4)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    marks = [index * step for index in range(first, last + 1)]
    return (marks[0], marks[-1]), marks


def _log_marks(low: float, high: float) -> list[float]:
    """Round numbers between powers of ten, as their logarithms."""
    if high - low < 0.7:
        return [math.log10(mark) for mark in _ticks(10**low, 10**high) if mark > 0]
    marks = [
        exponent + math.log10(digit)
        for exponent in range(math.floor(low), math.ceil(high) + 1)
        for digit in ((1, 2, 5) if high - low < 2 else (1,))
    ]
    marks = [mark for mark in marks if low <= mark <= high]
    return marks[:: math.ceil(len(marks) / 6)]


def _ticks(low: float, high: float, *, is_whole: bool = False) -> list[float]:
    """Round numbers from `low` to `high`, about five; whole ones if asked."""
    step = _step((high - low) / 4 or 1.0)
    step = max(1.0, step) if is_whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)] or [low]


def _step(rough: float) -> float:
    """The least of 1, 2, 5, 10 times a power of ten that is at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough * (1 - 1e-9))


def _number(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e7:
        digits, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(exponent)}"
    return f"{value:.4g}" if abs(value) < 1e3 else f"{value:,.0f}"


def _shade(value: float, high: float, marks_zero: bool) -> str:
    if value == 0.0 and marks_zero:
        return "#dc2626"
    if not math.isfinite(value):
        return "#000000"
    light = round(245 - 205 * _share(value, high))
    return f"rgb({light},{light},{round(250 - 110 * _share(value, high))})"


def _share(value: float, high: float) -> float:
    return max(0.0, min(1.0, value / high)) if high > 0 else 0.0


def _cell_text(x: float, y: float, value: float, high: float, marks_zero: bool) -> str:
    is_dark = not math.isfinite(value) or _share(value, high) > 0.5 or (marks_zero and value == 0)
    style = f' style="fill:{"#fff" if is_dark else "#111"}"'
    return _text(x, y, f"{value:.2g}" if abs(value) < 1 else f"{value:.3g}", style=style)


def _text(x: float, y: float, text: str, *, anchor: str = "middle", style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


def _scale(y: int, high: float) -> str:
    """What the shades mean."""
    cells = "".join(
        f'<rect x="{_LABEL + 20 * index}" y="{y}" width="20" height="10" '
        f'fill="{_shade(high * index / 5, high, False)}"/>'
        for index in range(6)
    )
    return (
        f"{_text(_LABEL - 6, y + 10, '0', anchor='end')}{cells}"
        f"{_text(_LABEL + 126, y + 10, f'{_number(high)} or more', anchor='start')}"
    )


def _drawable(points: Points, is_log: bool) -> list[tuple[float, float]]:
    found = [
        (x, math.log10(y) if is_log else y)
        for x, y in points
        if math.isfinite(y) and (y > 0 or not is_log)
    ]
    stride = math.ceil(len(found) / _MAX_POINTS) if found else 1
    return found[::stride] + ([found[-1]] if found and (len(found) - 1) % stride else [])


def _figure(parts: Sequence[str], size: tuple[int, int], label: str, below: str = "") -> str:
    width, height = size
    return (
        f"<figure><figcaption>{escape(label)}</figcaption>"
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg>{below}</figure>'
    )


def _legend(ends: Mapping[str, float], dashed: Sequence[str]) -> str:
    """Names in their colours, with their last values."""
    items = []
    for index, (name, value) in enumerate(ends.items()):
        sign = "&#9476;" if name in dashed else "&#9632;"
        items.append(
            f'<span class="item"><span style="color:{_COLOURS[index % 8]}">{sign}</span> '
            f"{escape(name)} <b>{_number(value)}</b></span>"
        )
    return f'<p class="legend">{" ".join(items)}</p>'
