"""Charts as SVG, drawn without a script: lines with bands, and reference lines. The script adds smoothing and a read-out.

A chart is drawn on 480 by 280 units, so that its text is readable on a telephone and in two columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from fedhdp.report.html import Content, Html, element, isolated, join, text, variants_class

WIDTH, HEIGHT = 480.0, 280.0
LEFT, RIGHT, TOP, BOTTOM = 50.0, 12.0, 12.0, 42.0
POINTS = 250  # of a line, at most
DASHES = ("", "7 3", "2 3", "9 3 2 3")
DOT = 3.2  # the radius of a marked point
REFERENCE_DASHES = ("5 4", "1.5 3.5", "11 3 3 3")
MARKED = 12  # points of a line, up to which each is marked


class Line(NamedTuple):
    """A line of a chart.

    Attributes:
        label: Its name.
        style: The class of its colour.
        numbers: The variants that it is of; it is hidden when all of them are.
        points: x and y, in the order of x.
        halves: Half of each point's interval; empty without intervals.
        dash: Which dashes it has.
        value: What the legend shows beside the name.
    """

    label: str
    style: str
    numbers: tuple[int, ...]
    points: Sequence[tuple[float, float]]
    halves: Sequence[float] = ()
    dash: int = 0
    value: str = ""


class Reference(NamedTuple):
    """A horizontal line: a budget, a published number."""

    label: str
    y: float
    value: str = ""  # what the legend shows beside the label


class Axes(NamedTuple):
    """The axes of a chart.

    Attributes:
        x_label: What the x axis is, with its unit.
        y_label: The same for y.
        x_log: Whether x is logarithmic.
        places: Names of the places 0, 1, …, where x has no scale.
        y_range: The least and the largest y that are shown at least; None: those of the data.
        fixed: Whether the range is exactly that.
        limits: The least and the largest possible y, at which intervals are cut. None: no limits.
        format: A value of y as text.
        smooth: Whether the script may smooth its lines.
        diagonal: Whether there is a line where y is x.
        joined: Whether points are joined by lines; not where the places of x have no order.
        start: The x from which on values set the range of y, so that earlier ones may lie outside; None: all do.
    """

    x_label: str
    y_label: str
    x_log: bool = False
    places: tuple[str, ...] = ()
    y_range: tuple[float, float] | None = None
    fixed: bool = False
    limits: tuple[float, float] | None = None
    format: Callable[[float], str] = "{:.4g}".format
    smooth: bool = False
    diagonal: bool = False
    joined: bool = True
    start: float | None = None


class Chart(NamedTuple):
    """A chart: the picture with its legend, and the numbers for the script."""

    html: Html
    data: dict[str, Any]


class _Scale(NamedTuple):
    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (
            (math.log10(v) for v in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + share * (self.end - self.start), 1)


def draw(ident: str, lines: Sequence[Line], axes: Axes, references: Sequence[Reference] = ()) -> Chart:
    """Draw lines.

    Args:
        ident: The chart's id, unique in its page.
        lines: The lines, at least one with a point.
        axes: The axes.
        references: Horizontal lines.
    """
    lines = [line._replace(**_thinned(line)) for line in merged(lines) if line.points]
    x_scale, y_scale = _scales(lines, axes, references)
    is_whole = all(x.is_integer() for line in lines for x, _ in line.points)  # rounds
    parts = [*_grid(x_scale, y_scale, axes, is_whole), *(_reference(i, r.y, y_scale) for i, r in enumerate(references))]
    if axes.diagonal:
        parts.append(_path([(x_scale(x), y_scale(x)) for x in _between(x_scale)], **_dashed(0)))
    series = [_line(i, line, x_scale, y_scale, axes) for i, line in enumerate(lines)]
    parts += series if axes.start is None else _clipped(ident, series)
    label = f"{axes.y_label} by {axes.x_label}: " + "; ".join(f"{line.label} {line.value}".strip() for line in lines)
    picture = element(
        "svg", *parts, viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}", role="img", aria_label=label, id=ident, class_="plot"
    )
    legend = element(
        "ul",
        *(_legend_entry(line, axes) for line in lines),
        *map(_reference_entry, range(len(references)), references),
        class_="legend",
    )
    data: dict[str, Any] = {
        "x": [x_scale.low, x_scale.high, x_scale.start, x_scale.end, x_scale.log],
        "y": [y_scale.low, y_scale.high, y_scale.start, y_scale.end],
        "smooth": axes.smooth,
        "lim": axes.limits,
        "places": list(axes.places),
        "xl": axes.x_label,
        "lines": [
            {
                "n": line.label,
                "v": list(line.numbers),
                "p": [[_rounded(x), _rounded(y)] for x, y in line.points],
                "t": [axes.format(y) for _, y in line.points],
            }
            | ({"h": [_rounded(half) for half in line.halves]} if line.halves else {})
            for line in lines
        ],
    }
    return Chart(element("figure", picture, legend), data)


def _clipped(ident: str, parts: Sequence[Html]) -> list[Html]:
    """What is drawn inside the axes alone."""
    width, height = WIDTH - RIGHT - LEFT + DOT, HEIGHT - BOTTOM - TOP + DOT  # so that dots at the edges are not cut
    area = _void("rect", x=LEFT, y=TOP - DOT, width=width, height=height)
    return [element("clipPath", area, id=f"{ident}-area"), element("g", *parts, clip_path=f"url(#{ident}-area)")]


def merged(lines: Iterable[Line]) -> list[Line]:
    """Lines with the same points as one line, which has the style of the last of them."""
    by_points: dict[tuple, list[Line]] = {}
    for line in lines:
        by_points.setdefault(tuple((x, _rounded(y)) for x, y in line.points), []).append(line)
    return [_merged(alike) for alike in by_points.values()]


def _merged(alike: list[Line]) -> Line:
    names = list(dict.fromkeys(line.label for line in alike))
    safe = names if len(names) == 1 else [isolated(name) for name in names]
    label = "; ".join(safe) if len(names) <= 3 else f"{'; '.join(safe[:2])} and {len(names) - 2} more"
    return alike[-1]._replace(label=label, numbers=tuple(sorted({n for line in alike for n in line.numbers})))


def _thinned(line: Line) -> dict[str, Any]:
    """At most so many points, the first and the last among them."""
    count = len(line.points)
    if count <= POINTS:
        return {}
    kept = sorted({round(i * (count - 1) / (POINTS - 1)) for i in range(POINTS)})
    return {"points": [line.points[i] for i in kept], "halves": [line.halves[i] for i in kept] if line.halves else ()}


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _scales(lines: Sequence[Line], axes: Axes, references: Sequence[Reference]) -> tuple[_Scale, _Scale]:
    xs = [x for line in lines for x, _ in line.points] or [0.0]
    within = [
        ((x, y), half) for line in lines for (x, y), half in _with_halves(line) if axes.start is None or x >= axes.start
    ]
    ys = [_limited(y + sign * half, axes) for (_, y), half in within for sign in (-1, 1)]
    ys += [reference.y for reference in references]
    ys += list(axes.y_range or ())
    low_x, high_x = (-0.5, len(axes.places) - 0.5) if axes.places else (min(xs), max(xs))
    if low_x == high_x:
        low_x, high_x = low_x - 0.5, high_x + 0.5
    if axes.fixed and axes.y_range:
        low, high = axes.y_range
    else:
        step = _step(min(ys), max(ys))
        low, high = math.floor(min(ys) / step) * step, math.ceil(max(ys) / step - 1e-9) * step
        if axes.y_range:
            low = max(low, axes.y_range[0]) if min(ys) >= axes.y_range[0] else low
    if low == high:
        low, high = low - 0.5, high + 0.5
    return _Scale(low_x, high_x, LEFT, WIDTH - RIGHT, axes.x_log), _Scale(low, high, HEIGHT - BOTTOM, TOP)


def _with_halves(line: Line) -> list[tuple[tuple[float, float], float]]:
    return list(zip(line.points, line.halves or [0.0] * len(line.points), strict=True))


def _limited(value: float, axes: Axes) -> float:
    return value if axes.limits is None else min(max(value, axes.limits[0]), axes.limits[1])


def _step(low: float, high: float, count: int = 5) -> float:
    """A round distance between about so many ticks."""
    rough = (high - low) / count or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)


def round_numbers(low: float, high: float, count: int = 5) -> list[float]:
    """About so many round numbers at equal distances."""
    step = _step(low, high, count)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _ticks(scale: _Scale) -> list[float]:
    if scale.log:
        powers = range(math.ceil(math.log10(scale.low) - 1e-9), math.floor(math.log10(scale.high) + 1e-9) + 1)
        return [10.0**power for power in powers]
    return round_numbers(scale.low, scale.high)


def _between(scale: _Scale) -> list[float]:
    if not scale.log:
        return [scale.low, scale.high]
    return [scale.low * (scale.high / scale.low) ** (i / 40) for i in range(41)]


def _grid(x_scale: _Scale, y_scale: _Scale, axes: Axes, is_whole: bool) -> list[Html]:
    parts = []
    for tick in _ticks(y_scale):
        y = y_scale(tick)
        parts.append(_void("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"))
        parts.append(element("text", _number(tick), x=LEFT - 6, y=y + 4, text_anchor="end"))
    ticks = [tick for tick in _ticks(x_scale) if not is_whole or axes.x_log or tick == round(tick)]
    places = list(enumerate(axes.places)) if axes.places else [(tick, _number(tick)) for tick in ticks]
    shown = max(1, math.ceil(len(places) * max((len(label) for _, label in places), default=1) / 64))
    for place, label in places[::shown]:
        x = x_scale(place)
        parts.append(_void("line", x1=x, x2=x, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM + 4, class_="tick"))
        anchor = "end" if x > WIDTH - RIGHT - 6 and not axes.places else "middle"
        parts.append(element("text", label, x=x, y=HEIGHT - BOTTOM + 17, text_anchor=anchor))
    parts.append(_void("line", x1=LEFT, x2=WIDTH - RIGHT, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM, class_="axis"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(element("text", axes.x_label, x=middle, y=HEIGHT - 6, text_anchor="middle", class_="label"))
    return parts


def _number(value: float) -> str:
    value = float(f"{value:.6g}")
    return f"{value:,.0f}" if abs(value) >= 1000 and value == round(value) else f"{value:g}"


def _void(tag: str, **attributes: object) -> Html:
    return element(tag, **{key: f"{v:g}" if isinstance(v, float) else v for key, v in attributes.items()})


def _path(points: Iterable[tuple[float, float]], **attributes: object) -> Html:
    return element("path", d="M" + "L".join(f"{x:g} {y:g}" for x, y in points), **attributes)


def _reference(number: int, value: float, y_scale: _Scale) -> Html:
    y = y_scale(value)
    return _path([(LEFT, y), (WIDTH - RIGHT, y)], **_dashed(number))


def _dashed(number: int) -> dict[str, str]:
    return {"class_": "reference", "stroke_dasharray": REFERENCE_DASHES[number % len(REFERENCE_DASHES)]}


def _line(number: int, line: Line, x_scale: _Scale, y_scale: _Scale, axes: Axes) -> Html:
    placed = [(x_scale(x), y_scale(y)) for x, y in line.points]
    parts = []
    if any(line.halves):
        upper = [(x_scale(x), y_scale(_limited(y + half, axes))) for (x, y), half in _with_halves(line)]
        lower = [(x_scale(x), y_scale(_limited(y - half, axes))) for (x, y), half in _with_halves(line)]
        parts.append(_path([*upper, *lower[::-1]], class_="band"))
    dash = DASHES[line.dash % len(DASHES)] or None
    if axes.joined:
        parts.append(_path(placed, class_="line", stroke_dasharray=dash))
    if len(placed) <= MARKED or not axes.joined:
        parts += [_void("circle", cx=x, cy=y, r=DOT) for x, y in placed]
    return element("g", *parts, class_=f"series {line.style} {variants_class(line.numbers)}", data_line=number)


def swatch(style: str, dash: int = 0, joined: bool = True) -> Html:
    """A short piece of a line, or a point."""
    dashes = DASHES[dash % len(DASHES)] or None
    line = element("path", d="M1 6L25 6", class_="line", stroke_dasharray=dashes)
    return element(
        "svg",
        line if joined else _void("circle", cx=13.0, cy=6.0, r=4.0),
        viewBox="0 0 26 12",
        class_=f"swatch {style}",
        aria_hidden="true",
    )


def _legend_entry(line: Line, axes: Axes) -> Html:
    value = element("b", line.value) if line.value else ""
    return element(
        "li",
        swatch(line.style, line.dash, axes.joined),
        element("bdi", line.label, dir="ltr" if "\u2068" in line.label else None),  # several names, each isolated
        value,
        class_=f"entry {variants_class(line.numbers)}",
    )


def _reference_entry(number: int, reference: Reference) -> Html:
    line = element("path", d="M1 6L25 6", **_dashed(number))
    piece = element("svg", line, viewBox="0 0 26 12", class_="swatch", aria_hidden="true")
    value = element("b", reference.value) if reference.value else ""
    return element("li", piece, element("bdi", reference.label), value, class_="entry")


def empty(words: Content) -> Html:
    """What stands where there is nothing to draw."""
    return element("p", words, class_="empty")


def caption(*sentences: Content) -> Html:
    """Sentences below a chart."""
    return element("p", join([text(sentence) for sentence in sentences if sentence], " "), class_="caption")


class Charts:
    """The charts of a page, with the numbers that its script needs.

    Attributes:
        data: The numbers of each chart, by its id.
        toggles: The numbers of the variants of each line.
    """

    def __init__(self) -> None:
        self.data: dict[str, dict[str, Any]] = {}
        self.toggles: set[tuple[int, ...]] = set()

    def add(
        self, ident: str, lines: Sequence[Line], axes: Axes, references: Sequence[Reference] = (), unit: str = ""
    ) -> Html:
        """Draw a chart (see `draw`); ``unit`` stands above it and says what y is."""
        chart = draw(ident, lines, axes, references)
        self.data[ident] = chart.data
        self.toggles |= {tuple(line["v"]) for line in chart.data["lines"] if min(line["v"]) >= 0}
        return join([element("p", unit or axes.y_label, class_="unit"), chart.html])
