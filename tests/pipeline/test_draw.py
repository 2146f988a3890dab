"""What the picture of a timeline shows is the timeline: every action once, in its lane, in proportion."""

from __future__ import annotations

from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest

from dist_train.pipeline import Costs, Kind, Schedule, simulate
from dist_train.pipeline.draw import BOX, WIDEST, colour, draw

SVG = "{http://www.w3.org/2000/svg}"
CASES = [("gpipe", 3, 4, 2), ("1f1b", 4, 16, 1), ("interleaved", 2, 5, 3), ("zero_bubble", 4, 6, 1), ("zero_bubble_v", 4, 12, 2)]
schedules = pytest.mark.parametrize("schedule", [Schedule(*case) for case in CASES], ids=lambda each: each.name)


def uneven(schedule: Schedule, transfer: float = 0.0):
    return simulate(schedule, [Costs(1 + stage % 3, 1.5, 0.75, transfer) for stage in range(schedule.stages)])


def drawn(svg: str) -> dict[tuple[int, str, int, int], tuple[float, float, float]]:
    """(rank, kind, chunk, micro-batch) → (x, width, y) of its box."""
    found = {}
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        box = group.find(f"{SVG}rect")
        key = int(group.get("data-rank")), group.get("data-kind"), int(group.get("data-chunk")), int(group.get("data-microbatch"))
        assert key not in found
        found[key] = float(box.get("x")), float(box.get("width")), float(box.get("y"))
        numbers = [text.text for text in group.iter(f"{SVG}text")]
        assert numbers in ([], [group.get("data-microbatch")])
    return found


def texts(svg: str) -> list[str]:
    return [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@schedules
def test_there_is_one_box_for_each_action_in_proportion_to_its_time(schedule):
    timeline = uneven(schedule)
    boxes = drawn(draw(timeline))
    events = {
        (rank, each.action.kind.value, each.action.chunk, each.action.microbatch): each
        for rank, events in enumerate(timeline.events)
        for each in events
    }
    assert boxes.keys() == events.keys()
    first = min(events, key=lambda key: events[key].start)
    scale = boxes[first][1] / (events[first].end - events[first].start)
    for key, (x, width, _) in boxes.items():
        assert x - boxes[first][0] == pytest.approx((events[key].start - events[first].start) * scale, rel=1e-3, abs=0.02)
        assert width == pytest.approx((events[key].end - events[key].start) * scale, rel=2e-3)


@schedules
def test_each_rank_has_its_lane_and_boxes_in_it_do_not_overlap(schedule):
    boxes = drawn(draw(uneven(schedule)))
    lanes = {rank: {y for (owner, *_), (_, _, y) in boxes.items() if owner == rank} for rank in range(schedule.ranks)}
    assert all(len(ys) == 1 for ys in lanes.values())
    assert all(min(lower) - min(upper) > BOX for upper, lower in pairwise(lanes.values()))
    for rank in range(schedule.ranks):
        places = sorted((x, width) for (owner, *_), (x, width, _) in boxes.items() if owner == rank)
        assert all(x + width <= other + 0.02 for (x, width), (other, _) in pairwise(places))


def test_sixteen_micro_batches_on_four_ranks_have_their_numbers_in_every_box():
    for name, chunks in (("1f1b", 1), ("interleaved", 2), ("zero_bubble_v", 2)):
        timeline = simulate(Schedule(name, 4, 16, chunks), Costs(1 / chunks, 1 / chunks, 1 / chunks))
        svg = draw(timeline)
        groups = list(ElementTree.fromstring(svg).iter(f"{SVG}g"))
        assert all(float(group.find(f"{SVG}text").get("font-size")) >= 9 for group in groups)
        assert f"bubble {timeline.bubble:.1%}" in texts(svg)[0]


def test_a_bar_tells_the_chunk_by_its_place():
    svg = draw(simulate(Schedule("interleaved", 2, 4, 3)))
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        box, bar = group.findall(f"{SVG}rect")
        middle = float(bar.get("x")) + float(bar.get("width")) / 2 - float(box.get("x"))
        assert int(3 * middle / float(box.get("width"))) == int(group.get("data-chunk"))
    assert len(ElementTree.fromstring(draw(simulate(Schedule("1f1b", 2, 4)))).findall(f"{SVG}g/{SVG}rect")) == 16  # no bars


def test_the_legend_names_what_is_in_the_picture():
    plain, halves = (texts(draw(simulate(Schedule(name, 2, 3)))) for name in ("1f1b", "zero_bubble"))
    assert {"forward", "backward", "idle"} <= set(plain) and not {"chunk", "backward of inputs", "gradient sent"} & set(plain)
    assert {"forward", "backward of inputs", "backward of weights", "idle"} <= set(halves) and "backward" not in halves
    forwards = texts(draw(simulate(Schedule("1f1b", 2, 3, training=False))))
    assert "backward" not in forwards and "most activations" not in forwards


@pytest.mark.parametrize("name, chunks", [("1f1b", 1), ("interleaved", 2), ("zero_bubble_v", 2)])
def test_every_message_is_a_line_where_wanted(name, chunks):
    timeline = uneven(Schedule(name, 3, 4, chunks), transfer=0.5)

    def lines(svg: str) -> int:
        return sum(line.find(f"{SVG}title") is not None for line in ElementTree.fromstring(svg).iter(f"{SVG}path"))

    assert len(timeline.transfers) > 0 and lines(draw(timeline)) == 0
    assert lines(draw(timeline, transfers=True)) == len(timeline.transfers) + 2  # two in the legend
    assert drawn(draw(timeline)).keys() == drawn(draw(timeline, transfers=True)).keys()


def lightness(fill: str) -> float:
    """CIE L*, 0 to 100: what a grey print keeps of a colour."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (int(fill[i : i + 2], 16) / 255 for i in (1, 3, 5))
    ]
    luminance = sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return 116 * luminance ** (1 / 3) - 16


def test_kinds_differ_in_grey_whatever_the_chunk():
    """Halves of backward differ in grey, too, and one of them is hatched; a whole backward is never beside them."""
    F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
    for one, other in [(F, B), *combinations((F, I, W), 2)]:
        for chunk, beside in ((0, 0), (1, 0), (0, 1), (1, 1)):
            assert abs(lightness(colour(one, chunk, 2)) - lightness(colour(other, beside, 2))) > 7, (one, chunk, other, beside)
    assert colour(F, 0, 1) != colour(F, 1, 2) != colour(F, 0, 2) == colour(F, 0, 1)
    assert 'fill="url(#hatch)"' in draw(simulate(Schedule("zero_bubble", 2, 3)))


def test_long_and_strange_timelines_stay_pictures():
    for costs in (Costs(), Costs(forward=1e-6), Costs(0.0, 0.0, 1.0), Costs(1e6, 1e6, 1e6)):
        svg = draw(simulate(Schedule("zero_bubble", 2, 200), costs))
        assert len(drawn(svg)) == 2 * 200 * 3
        assert float(ElementTree.fromstring(svg).get("width")) < WIDEST + 400
