"""A `Timeline` as a picture: SVG text, one lane for each rank, time from left to right. Pure.

Kinds of work differ in hue (blue, orange, yellow, green: all kinds of colour vision tell these apart), in lightness (so they
differ in grey print too) and the weights' half of backward in its hatching. A bar at the foot of a box shows which of a rank's
chunks it works on by its place, and later chunks are lighter. What is left grey is the bubble.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from dist_train.pipeline.orders import Kind
from dist_train.pipeline.timeline import Event, Timeline, Transfer

# Pixels. A plot is as wide as the numbers in its boxes need, between these limits.
NARROWEST, WIDEST = 760, 6000
LEFT, RIGHT, TOP, BOTTOM = 112, 96, 68, 78
BOX, GAP = 28, 10
_DIGIT = 0.6  # width of a digit, in font sizes
_FONTS = (9.0, 12.0)  # smallest and largest in a box

_INK, _GREY, _IDLE = "#1a1a1a", "#5a5a5a", "#e6e6e6"
_COLOURS = {  # of the first chunk
    Kind.FORWARD: "#0b4f8a",
    Kind.BACKWARD: "#df7a36",
    Kind.BACKWARD_INPUT: "#f2b134",
    Kind.BACKWARD_WEIGHT: "#cfe8d6",
}
_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward of inputs",
    Kind.BACKWARD_WEIGHT: "backward of weights",
}
_HATCH = (
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path d="M0 0V6" stroke="#2e7d4f" stroke-width="1.6" stroke-opacity="0.55"/></pattern>'
)
_LIGHTEST = 0.25  # of white in the last chunk's colour: no more, or a late forward prints as grey as a backward


def draw(timeline: Timeline, transfers: bool = False, unit: str = "forwards of one stage") -> str:
    """An SVG document. `transfers`: with a line for each message; `unit`: what the costs were in, for the axis."""
    return _Picture(timeline, unit, transfers).svg()


def colour(kind: Kind, chunk: int, chunks: int) -> str:
    """The fill of a box, as #rrggbb."""
    white = _LIGHTEST * chunk / (chunks - 1) if chunks > 1 else 0.0
    return "#" + "".join(f"{round(c + (255 - c) * white):02x}" for c in _channels(_COLOURS[kind]))


@dataclass(frozen=True)
class _Picture:
    timeline: Timeline
    unit: str
    transfers: bool

    @property
    def scale(self) -> float:
        """Pixels of a unit of time."""
        events = [event for events in self.timeline.events for event in events]
        shortest = min(event.end - event.start for event in events)
        wanted = (self.digits * _DIGIT * _FONTS[0] + 4) / shortest if shortest > 0 else 0.0
        return min(max(wanted, NARROWEST / self.timeline.end), WIDEST / self.timeline.end)

    @property
    def digits(self) -> int:
        """Of the longest number in a box: all are written as if they were as long, in one size."""
        return len(str(self.timeline.schedule.microbatches - 1))

    @property
    def width(self) -> float:
        return LEFT + self.timeline.end * self.scale + RIGHT

    @property
    def foot(self) -> float:
        """Where the lanes end."""
        return self.y(len(self.timeline.events))

    def x(self, time: float) -> float:
        return LEFT + time * self.scale

    def y(self, rank: int) -> float:
        gap = 2 * GAP if self.transfers else GAP
        return TOP + rank * (BOX + gap)

    def svg(self) -> str:
        width, height = _number(self.width), _number(self.foot + BOTTOM)
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            'font-family="Helvetica, Arial, sans-serif">',
            f"<title>{escape(self._title())}</title>",
            f"<defs>{_HATCH}</defs>",
            _rect(0, 0, self.width, self.foot + BOTTOM, "#ffffff"),
            _text(self._title(), LEFT, 26, 16, weight="bold"),
            *self._axis(),
            *self._lanes(),
            *(line for transfer in self.timeline.transfers if self.transfers for line in self._transfer(transfer)),
            *(line for rank, events in enumerate(self.timeline.events) for event in events for line in self._box(rank, event)),
            *self._legend(),
            "</svg>",
        ]
        return "\n".join(lines) + "\n"

    def _title(self) -> str:
        schedule = self.timeline.schedule
        numbers = [_count(schedule.ranks, "rank"), _count(schedule.microbatches, "micro-batch")]
        if schedule.chunks > 1:
            numbers.insert(1, f"{schedule.chunks} chunks each")
        return f"{schedule.name}: {', '.join(numbers)}; bubble {self.timeline.bubble:.1%}"

    def _axis(self) -> Iterator[str]:
        end, foot = self.timeline.end, self.foot
        step = next(s * 10.0**power for power in range(-3, 9) for s in (1, 2, 5) if s * 10.0**power * self.scale >= 48)
        for tick in range(int(end / step) + 1):
            x = self.x(tick * step)
            yield f'<path d="M{_number(x)} {TOP - 6}V{_number(foot)}" stroke="#bdbdbd" stroke-width="0.6"/>'
            yield _text(f"{tick * step:g}", x, foot + 12, 10, _GREY, "middle")
        yield _text(f"time, in {self.unit}", LEFT, foot + 28, 10, _GREY)

    def _lanes(self) -> Iterator[str]:
        schedule, right = self.timeline.schedule, self.x(self.timeline.end)
        if schedule.training:
            yield _text("most activations", right + 10, TOP - 20, 10, _GREY)
            yield _text("held at a time", right + 10, TOP - 8, 10, _GREY)
        for rank in range(schedule.ranks):
            y, stages = self.y(rank), [str(schedule.stage_of(rank, chunk)) for chunk in range(schedule.chunks)]
            named = ("stages " if len(stages) > 1 else "stage ") + ", ".join(stages)
            yield _rect(LEFT, y, right - LEFT, BOX, _IDLE)
            yield _text(f"rank {rank}", LEFT - 10, y + 12, 12, anchor="end")
            yield _text(named, LEFT - 10, y + 25, 10, _GREY, "end")
            if schedule.training:
                yield _text(str(self.timeline.peak_in_flight(rank)), right + 10, y + 19, 12)

    def _box(self, rank: int, event: Event) -> Iterator[str]:
        (kind, chunk, microbatch), (_, start, end) = (event.action.kind, event.action.chunk, event.action.microbatch), event
        chunks = self.timeline.schedule.chunks
        told = f"rank {rank}, {_NAMES[kind]}"
        told += f" of chunk {chunk}" if chunks > 1 else ""
        told += f" for micro-batch {microbatch}: {start:g} to {end:g}"
        data = f'data-rank="{rank}" data-kind="{kind.value}" data-chunk="{chunk}" data-microbatch="{microbatch}"'
        x, width = self.x(start), (end - start) * self.scale
        yield f"<g {data}><title>{escape(told)}</title>"
        yield from _work(kind, chunk, chunks, x, self.y(rank), width)
        font = min(_FONTS[1], (width - 2) / (_DIGIT * self.digits))
        if font >= _FONTS[0] * 0.75:
            yield _text(str(microbatch), x + width / 2, self.y(rank) + 18, font, _ink_on(colour(kind, chunk, chunks)), "middle")
        yield "</g>"

    def _transfer(self, transfer: Transfer) -> Iterator[str]:
        schedule, message = self.timeline.schedule, transfer.message
        source, target = schedule.sender(message), schedule.receiver(message)
        down = target > source
        y0, y1 = self.y(source) + BOX * down, self.y(target) + BOX * (not down)
        told = f"stage {message.source} to {message.target}, micro-batch {message.microbatch}: "
        told += f"{transfer.start:g} to {transfer.end:g}"
        path = f"M{_number(self.x(transfer.start))} {_number(y0)}L{_number(self.x(transfer.end))} {_number(y1)}"
        yield _line(path, message.target < message.source, told)

    def _legend(self) -> Iterator[str]:
        schedule = self.timeline.schedule
        kinds = [kind for kind in _COLOURS if any(e.action.kind is kind for events in self.timeline.events for e in events)]
        x, y = float(LEFT), self.foot + 40
        for kind in kinds:
            yield from _work(kind, 0, 1, x, y, 22, 18)
            yield _text(_NAMES[kind], x + 28, y + 13, 11)
            x += 28 + 6.2 * len(_NAMES[kind]) + 20
        yield _rect(x, y, 22, 18, _IDLE)
        yield _text("idle", x + 28, y + 13, 11)
        x += 70
        if schedule.chunks > 1:
            yield _text("chunk", x, y + 13, 11)
            x += 38
            for chunk in range(schedule.chunks):
                yield from _work(Kind.FORWARD, chunk, schedule.chunks, x, y, 22, 18)
                yield _text(str(chunk), x + 11, y + 12, 10, _ink_on(colour(Kind.FORWARD, chunk, schedule.chunks)), "middle")
                x += 26
            x += 20
        for name in ("activation", "gradient") if self.transfers else ():
            yield _line(f"M{_number(x)} {_number(y + 9)}h26", name == "gradient", f"{name} on its way")
            yield _text(f"{name} sent", x + 32, y + 13, 11)
            x += 32 + 6.2 * (len(name) + 5) + 20


def _work(kind: Kind, chunk: int, chunks: int, x: float, y: float, width: float, height: float = BOX) -> Iterator[str]:
    """A box, without its number."""
    fill = colour(kind, chunk, chunks)
    yield _rect(x, y, width, height, fill, 'stroke="#ffffff" stroke-width="0.8"')
    if kind is Kind.BACKWARD_WEIGHT:
        yield _rect(x, y, width, height, "url(#hatch)", 'stroke="#2e7d4f" stroke-width="0.5"')
    if chunks > 1:
        whole = max(0.0, width - 3)
        yield _rect(x + 1.5 + whole * chunk / chunks, y + height - 5, whole / chunks, 2.5, _ink_on(fill))


def _ink_on(fill: str) -> str:
    """White or nearly black, whichever reads better; weights after ITU-R BT.601."""
    red, green, blue = _channels(fill)
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 130 else _INK


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _rect(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    place = f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'
    return f"<rect {place} fill={quoteattr(fill)} {more}/>".replace(" />", "/>")


def _text(text: str, x: float, y: float, size: float, fill: str = _INK, anchor: str = "start", weight: str = "normal") -> str:
    style = f'font-size="{_number(size)}" fill="{fill}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{_number(x)}" y="{_number(y)}" {style}>{escape(text)}</text>'


def _line(path: str, dashed: bool, told: str) -> str:
    dash = ' stroke-dasharray="3 2"' if dashed else ""
    return f'<path d="{path}" stroke="{_INK}" stroke-width="0.9" fill="none"{dash}><title>{escape(told)}</title></path>'


def _count(number: int, what: str) -> str:
    plural = "es" if what.endswith("ch") else "s"
    return f"{number} {what}{plural * (number != 1)}"


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
