"""The links of an allocation as a table of text and as a heat map (SVG). Pure.

Colours say how a link compares with the median, on a logarithmic scale: orange is slower, blue is faster (all kinds of colour
vision tell them apart), pale is as the median. A link that failed is hatched and crossed. Numbers are in every cell that has
room for them, so that nothing hangs on colour alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from xml.sax.saxutils import escape

from dist_train.launcher.checkup.compare import rate_text
from dist_train.launcher.checkup.meeting import Allocation

MOST_COLUMNS = 12  # of the table; of more ranks only the slowest links are listed
_LISTED = 10
_CELL, _SMALL_CELL = 74, 16  # pixels; the small one, without numbers, from _BIG_RANKS ranks on
_BIG_RANKS = 17
_LEFT, _TOP, _RIGHT, _BOTTOM = 150, 104, 36, 86
_LETTER = 6.6  # pixels of a letter of the labels
_SLOW, _MIDDLE, _FAST = (0xC2, 0x55, 0x10), (0xF6, 0xF1, 0xE6), (0x0B, 0x4F, 0x8A)
_INK, _GREY, _EMPTY = "#1a1a1a", "#5a5a5a", "#ececec"
_STEPS = 41  # of the legend's colours


def table(found: Allocation) -> list[str]:
    """Bandwidth from each rank (row) to each (column), and the time of the shortest message below; of many ranks the slowest."""
    cells, ranks = _cells(found), _ranks(found)
    if len(ranks) > MOST_COLUMNS:
        slowest = sorted((rate, pair) for pair, (rate, _) in cells.items())[:_LISTED]
        rows = [["from", "to", "bandwidth"]]
        rows += [[_name(a, found), _name(b, found), rate_text(rate)] for rate, (a, b) in slowest]
        return [f"The slowest {len(slowest)} of {len(cells)} links:", *_aligned(rows)]
    rows = [["from \\ to", *map(str, ranks)]]
    for a in ranks:
        rows.append([_name(a, found), *(_text(a, b, cells, found)[0] for b in ranks)])
        rows.append(["", *(_text(a, b, cells, found)[1] for b in ranks)])
    return _aligned(rows)


def heat_map(found: Allocation) -> str:
    """An SVG document."""
    ranks, cells = _ranks(found), _cells(found)
    cell = _CELL if len(ranks) < _BIG_RANKS else _SMALL_CELL
    left = max(_LEFT, 24 + _LETTER * max(len(_name(rank, found)) for rank in ranks))
    side = cell * len(ranks)
    width, height = left + max(side, 380) + _RIGHT, _TOP + side + _BOTTOM
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="Helvetica, Arial, sans-serif">',
            "<title>Links between ranks</title>",
            '<defs><pattern id="failed" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            f'<rect width="7" height="7" fill="#ffffff"/><path d="M0 0V7" stroke="{_GREY}" stroke-width="2"/></pattern></defs>',
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            _words(left, 30, "Links between ranks", 17, weight="bold"),
            _words(left, 51, f"{len(ranks)} ranks on {len(set(found.hosts.values()))} hosts; from row to column", 12, _GREY),
            *_labels(ranks, found, cell, left),
            *(
                _square(a, b, left + cell * column, _TOP + cell * row, cell, cells, found)
                for row, a in enumerate(ranks)
                for column, b in enumerate(ranks)
            ),
            *_legend(left, _TOP + side + 28, cells),
            "</svg>\n",
        ]
    )


def colour(ratio: float) -> str:
    """Of a link `ratio` times as fast as the median: the ends of the scale are a tenth and ten times."""
    place = max(-1.0, min(1.0, math.log10(ratio)))
    end = _FAST if place > 0 else _SLOW
    return "#" + "".join(f"{round(m + (e - m) * abs(place)):02x}" for m, e in zip(_MIDDLE, end))


def _labels(ranks: list[int], found: Allocation, cell: int, left: float) -> Iterator[str]:
    few = len(ranks) < _BIG_RANKS
    step = 1 if few else math.ceil(len(ranks) / 32)
    for place, rank in enumerate(ranks):
        if place % step == 0:
            middle = cell * (place + 0.5)
            size = 12 if few else 9
            yield _words(left - 10, _TOP + middle + 4, _name(rank, found) if few else str(rank), size, anchor="end")
            yield _words(left + middle, _TOP - 10, str(rank), size, anchor="middle")


def _square(a: int, b: int, x: float, y: float, cell: int, cells: dict, found: Allocation) -> str:
    gap = 2 if cell == _CELL else 0.5
    rate, latency = _text(a, b, cells, found)
    fill, ink = _EMPTY, _INK
    if (a, b) in cells:
        ratio = cells[a, b][0] / _median(cells)
        fill = colour(ratio)
        ink = "#ffffff" if abs(math.log10(ratio)) > 0.55 else _INK
    elif rate == "failed":
        fill = "url(#failed)"
    box = f'<rect x="{x + gap / 2:.1f}" y="{y + gap / 2:.1f}" width="{cell - gap}" height="{cell - gap}" rx="3" fill="{fill}"/>'
    title = "" if a == b else f"<title>{escape(f'{_name(a, found)} to {_name(b, found)}: {rate} {latency}')}</title>"
    words = ""
    if cell == _CELL and (a, b) in cells:
        number, unit = rate.split(" ", 1)
        words = _words(x + cell / 2, y + 32, number, 16, ink, "middle", "bold")
        words += _words(x + cell / 2, y + 46, unit, 10, ink, "middle") + _words(x + cell / 2, y + 61, latency, 10, ink, "middle")
    elif rate == "failed":
        inset = cell * 0.3
        words = (
            f'<path d="M{x + inset:.1f} {y + inset:.1f}L{x + cell - inset:.1f} {y + cell - inset:.1f}M{x + cell - inset:.1f} '
            f'{y + inset:.1f}L{x + inset:.1f} {y + cell - inset:.1f}" stroke="{_INK}" stroke-width="{max(1.5, cell / 18):.1f}"/>'
        )
    return f"<g>{title}{box}{words}</g>"


def _legend(x: float, y: float, cells: dict) -> Iterator[str]:
    if not cells:
        yield _words(x, y + 12, "no link was measured", 12, _GREY)
        return
    middle, width = _median(cells), 280
    for step in range(_STEPS):
        ratio = 10 ** (2 * step / (_STEPS - 1) - 1)
        at = x + width * step / _STEPS
        yield f'<rect x="{at:.1f}" y="{y}" width="{width / _STEPS + 0.5:.1f}" height="12" fill="{colour(ratio)}"/>'
    for place, ratio in ((0.0, 0.1), (0.5, 1.0), (1.0, 10.0)):
        anchor = ("start", "middle", "end")[round(place * 2)]
        yield _words(x + width * place, y + 28, rate_text(middle * ratio), 11, _GREY, anchor)
    yield _words(x + width / 2, y + 43, "median", 11, _GREY, "middle")
    yield f'<rect x="{x + width + 26:.1f}" y="{y}" width="12" height="12" fill="url(#failed)" stroke="{_GREY}"/>'
    yield _words(x + width + 44, y + 11, "failed", 11, _GREY)


def _words(
    x: float, y: float, text: str, size: float, fill: str = _INK, anchor: str = "start", weight: str = "normal"
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" font-weight="{weight}"'
    return f"<text {place}>{escape(text)}</text>"


def _cells(found: Allocation) -> dict[tuple[int, int], tuple[float, float]]:
    """(from, to) -> bytes per second and seconds of the shortest message."""
    there = {(link.a, link.b): (link.a_to_b, link.latency) for link in found.links}
    return there | {(link.b, link.a): (link.b_to_a, link.latency) for link in found.links}


def _ranks(found: Allocation) -> list[int]:
    """All that a link was tried of."""
    tried = [*found.failed, *((link.a, link.b) for link in found.links)]
    return sorted({rank for pair in tried for rank in pair})


def _text(a: int, b: int, cells: dict, found: Allocation) -> tuple[str, str]:
    if (a, b) in cells:
        rate, latency = cells[a, b]
        return rate_text(rate), f"{latency * 1e6:.0f} µs" if latency < 1e-3 else f"{latency * 1e3:.3g} ms"
    return ("failed", "") if {(a, b), (b, a)} & found.failed.keys() else ("-", "")


def _name(rank: int, found: Allocation) -> str:
    return f"{rank} {found.hosts[rank]}"


def _median(cells: dict) -> float:
    return statistics.median_high([rate for rate, _ in cells.values()])


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))]).rstrip() for row in rows]
