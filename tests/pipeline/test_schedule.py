"""Every small pipeline, searched: whether it ends, does all its work once, keeps to its memory, and idles as the formulas say."""

from __future__ import annotations

from collections import Counter
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_train.pipeline import SCHEDULES, Action, Costs, Deadlock, Kind, Schedule, Sends, ideal_bubble, simulate
from dist_train.pipeline.orders import Recipe

CHUNKS = {"gpipe": (1, 2, 3), "1f1b": (1,), "interleaved": (1, 2, 3), "zero_bubble": (1,), "zero_bubble_v": (2,)}
SPLIT = ("zero_bubble", "zero_bubble_v")
RANKS, MICROBATCHES = range(1, 6), range(1, 10)
SMALL = {
    name: [Schedule(name, p, m, v) for p in RANKS for v in CHUNKS[name] for m in MICROBATCHES] for name in CHUNKS
}  # built once: a schedule keeps its orders
F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
SEND = {F: Kind.SEND_ACTIVATION, B: Kind.SEND_GRADIENT, I: Kind.SEND_GRADIENT}
RECV = {F: Kind.RECV_ACTIVATION, B: Kind.RECV_GRADIENT, I: Kind.RECV_GRADIENT}
names = pytest.mark.parametrize("name", CHUNKS)


@st.composite
def schedules(draw) -> Schedule:
    name = draw(st.sampled_from(list(CHUNKS)))
    chunks = draw(st.integers(1, 4)) if len(CHUNKS[name]) > 1 else CHUNKS[name][0]
    return Schedule(name, draw(st.integers(1, 7)), draw(st.integers(1, 15)), chunks, draw(st.booleans()))


def text(schedule: Schedule, rank: int) -> str:
    """What a rank computes, as the papers' figures show it: micro-batches from 1, upper case for the first chunk."""
    return " ".join(
        (each.kind.value if each.chunk == 0 else each.kind.value.lower()) + str(each.microbatch + 1)
        for each in schedule.orders[rank]
    )


def test_all_schedules_are_searched():
    assert SCHEDULES.keys() == CHUNKS.keys()
    assert sum(map(len, SMALL.values())) == 405


# ---- Deadlock


@names
@pytest.mark.parametrize("sends", Sends)
def test_no_small_pipeline_waits_in_a_circle(name, sends):
    for schedule in SMALL[name]:
        timeline = simulate(schedule, sends=sends)
        assert [len(events) for events in timeline.events] == [len(order) for order in schedule.orders]


@given(schedules(), st.data())
def test_no_pipeline_waits_in_a_circle_whatever_its_stages_cost(schedule, data):
    cost = st.floats(0.125, 8)
    costs = [Costs(*data.draw(st.tuples(cost, cost, cost, st.floats(0, 3)))) for _ in range(schedule.stages)]
    ends = [simulate(schedule, costs, sends).end for sends in (Sends.BUFFERED, Sends.RENDEZVOUS, Sends.BLOCKING)]
    assert ends == sorted(ends)


def any_orders(p: int, v: int, m: int, seed: int) -> list[list[Action]]:
    """Orders of computing that contradict nothing, and are otherwise as they come."""
    random, last = Random(seed), p * v - 1
    ready, orders = [(F, 0, i) for i in range(m)], [[] for _ in range(p)]
    while ready:
        kind, stage, i = ready.pop(random.randrange(len(ready)))
        orders[stage % p].append(Action(kind, stage // p, i))
        if kind is F:
            ready.append((F, stage + 1, i) if stage < last else (B, stage, i))
        elif stage > 0:
            ready.append((B, stage - 1, i))
    return orders


def test_the_rules_of_messages_hold_for_any_orders_of_computing():
    for seed in range(150):
        p, v, m = 2 + seed % 3, 1 + seed % 2, 2 + seed % 5
        orders = any_orders(p, v, m, seed)
        with patch.dict(SCHEDULES, {"any": Recipe(lambda p, rank, v, m, orders=orders: iter(orders[rank]))}):
            schedule = Schedule("any", p, m, v)
            for sends in Sends:
                assert sum(map(len, simulate(schedule, sends=sends).events)) == 2 * p * v * m


class Late(Schedule):
    """Each receive stands right before the action that takes its message: neither early nor in the order of the sends."""

    def actions(self, rank):
        for action in self.orders[rank]:
            if (message := self.takes(rank, action)) and self.sender(message) != rank:
                yield Action(RECV[action.kind], action.chunk, action.microbatch)
            yield action
            if (message := self.gives(rank, action)) and self.receiver(message) != rank:
                yield Action(SEND[action.kind], action.chunk, action.microbatch)


class Hasty(Schedule):
    """Rank 0 sends the activation of its last micro-batch when all else is done, with the backward that waits for it."""

    def actions(self, rank):
        last = Action(Kind.SEND_ACTIVATION, 0, self.microbatches - 1)
        yield from (action for action in super().actions(rank) if rank > 0 or action != last)
        if rank == 0:
            yield last


def test_a_receive_that_comes_late_is_found():
    simulate(Late("1f1b", 2, 4), sends=Sends.RENDEZVOUS)
    with pytest.raises(Deadlock, match="rank 0 cannot finish: send activation .* rank 1 cannot finish: send gradient"):
        simulate(Late("1f1b", 2, 4), sends=Sends.BLOCKING)


def test_a_message_that_would_be_taken_for_another_is_found():
    for sends in (Sends.BUFFERED, Sends.RENDEZVOUS):
        with pytest.raises(Deadlock, match="microbatch=2. is sent to a rank that receives .*microbatch=1. first"):
            simulate(Late("interleaved", 2, 5, 2), sends=sends)


def test_a_circle_is_found_whatever_sends_wait_for():
    for sends in Sends:
        with pytest.raises(Deadlock, match="rank 0 waits for the input of B of chunk 0 for micro-batch 3; rank 1 waits .* of F"):
            simulate(Hasty("1f1b", 2, 4), sends=sends)


# ---- Completeness and order


@names
def test_each_stage_takes_each_microbatch_forward_and_back_once(name):
    for schedule in SMALL[name]:
        stages = set()
        for rank, order in enumerate(schedule.orders):
            places = {action: place for place, action in enumerate(order)}
            assert len(places) == len(order)
            split = name in SPLIT and schedule.ranks > 1
            for chunk in range(schedule.chunks):
                stages.add(schedule.stage_of(rank, chunk))
                for i in range(schedule.microbatches):
                    steps = [places.pop(Action(kind, chunk, i)) for kind in ((F, I, W) if split else (F, B))]
                    assert steps == sorted(steps)
            assert not places
        assert stages == set(range(schedule.ranks * schedule.chunks))


@names
def test_gradients_are_added_in_the_order_of_microbatches(name):
    for schedule in SMALL[name]:
        for order in schedule.orders:
            for chunk in range(schedule.chunks):
                for kinds in ({F}, {B, W}, {B, I}):
                    found = [action.microbatch for action in order if action.chunk == chunk and action.kind in kinds]
                    assert found == list(range(schedule.microbatches))


@names
def test_evaluation_is_the_forwards_in_the_same_order(name):
    for schedule in SMALL[name]:
        evaluation = Schedule(name, schedule.ranks, schedule.microbatches, schedule.chunks, training=False)
        for rank, order in enumerate(schedule.orders):
            assert evaluation.orders[rank] == tuple(action for action in order if action.kind is F)
        timeline = simulate(evaluation, sends=Sends.BLOCKING)
        assert all(timeline.peak_in_flight(rank) == 0 for rank in range(schedule.ranks))


@names
def test_one_rank_runs_one_microbatch_after_the_other(name):
    v = CHUNKS[name][-1]
    order = [(action.kind, action.chunk, action.microbatch) for action in Schedule(name, 1, 2, v).actions(0)]
    assert order == [each for i in range(2) for each in [*((F, c, i) for c in range(v)), *((B, v - 1 - c, i) for c in range(v))]]


def test_orders_are_those_of_the_papers():
    one = Schedule("1f1b", 4, 8)
    assert text(one, 0) == "F1 F2 F3 F4 B1 F5 B2 F6 B3 F7 B4 F8 B5 B6 B7 B8"
    assert text(one, 3) == "F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 F8 B8"
    two = Schedule("interleaved", 4, 8, 2)  # arXiv:2104.04473, figure 4
    assert text(two, 0).startswith("F1 F2 F3 F4 f1 f2 f3 f4 F5 F6 F7 b1 F8 b2 f5 b3 f6 b4 f7 B1 f8 B2")
    assert text(two, 3).startswith("F1 F2 F3 F4 f1 b1 f2 b2 f3 b3 f4 b4 F5 B1 F6 B2")
    half = Schedule("zero_bubble", 4, 8)  # arXiv:2401.10241, ZB-H1
    assert text(half, 0).startswith("F1 F2 F3 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7")
    assert text(half, 3).startswith("F1 I1 F2 I2 F3 I3 F4 I4 W1 F5 I5 W2")


def test_interleaving_one_chunk_is_1f1b():
    for p in RANKS:
        for m in MICROBATCHES:
            assert Schedule("interleaved", p, m).orders == Schedule("1f1b", p, m).orders


# ---- Messages


@names
def test_what_is_sent_is_received_in_the_same_order(name):
    for schedule in SMALL[name]:
        sent, received = Counter(), Counter()
        channels: dict[tuple[int, int, bool], list] = {}
        for rank in range(schedule.ranks):
            for action in schedule.actions(rank):
                if action.kind in (*SEND.values(), *RECV.values()):
                    message, sends = schedule.message(rank, action), action.kind in SEND.values()
                    assert abs(message.source - message.target) == 1
                    assert rank == (schedule.sender(message) if sends else schedule.receiver(message))
                    (sent if sends else received)[message] += 1
                    pair = schedule.sender(message), schedule.receiver(message)
                    channels.setdefault((*pair, sends), []).append(message)
        assert sent == received and set(sent.values()) <= {1}
        turns = (schedule.chunks - 1) if schedule.ranks == 1 or name == "zero_bubble_v" else 0  # borders inside one rank
        assert len(sent) == 2 * schedule.microbatches * (schedule.stages - 1 - turns)
        for (source, target, _), messages in channels.items():
            assert source != target
            assert messages == channels[source, target, True]


@names
def test_sends_follow_their_maker_and_receives_are_an_action_ahead(name):
    for schedule in SMALL[name]:
        for rank, order in enumerate(schedule.orders):
            actions = list(schedule.actions(rank))
            place = {action: n for n, action in enumerate(actions)}
            for n, action in enumerate(order):
                made, taken = schedule.gives(rank, action), schedule.takes(rank, action)
                if made and schedule.receiver(made) != rank:
                    assert actions[place[action] + 1] == Action(SEND[action.kind], action.chunk, action.microbatch)
                if taken and schedule.sender(taken) != rank:
                    receive = Action(RECV[action.kind], action.chunk, action.microbatch)
                    assert place[receive] < place[order[max(0, n - 1)]]


@names
def test_buffers_of_receives_are_few(name):
    for schedule in SMALL[name]:
        for rank in range(schedule.ranks):
            waiting, peak = set(), 0
            for action in schedule.actions(rank):
                if action.kind in RECV.values():
                    waiting.add(schedule.message(rank, action))
                elif action.kind in RECV:
                    waiting.discard(schedule.takes(rank, action))
                peak = max(peak, len(waiting))
            # With several chunks in a loop a group of micro-batches waits for the rank to come to its next chunk.
            longest = {"gpipe": schedule.microbatches, "interleaved": 2 * schedule.ranks}.get(name, 3)
            assert peak <= max(3, longest)


@names
def test_stages_and_places_are_inverse(name):
    for schedule in SMALL[name]:
        places = [schedule.place_of(stage) for stage in range(schedule.stages)]
        assert [schedule.stage_of(*place) for place in places] == list(range(schedule.stages))
        assert places[0] == (0, 0)
        assert places[-1] == ((0 if name == "zero_bubble_v" else schedule.ranks - 1), schedule.chunks - 1)
        assert [chunk for _, chunk in places] == sorted(chunk for _, chunk in places)


# ---- Memory


def bound(schedule: Schedule, rank: int) -> int:
    p, v, m = schedule.ranks, schedule.chunks, schedule.microbatches
    if p == 1:
        return v
    group = -(-m // max(1, m // p))
    bounds = {"gpipe": v * m, "1f1b": p - rank, "zero_bubble": p, "zero_bubble_v": 2 * p}
    bounds["interleaved"] = (v - 1) * group + 2 * (p - rank) - 1 if v > 1 else p - rank
    return min(v * m, bounds[schedule.name])


@names
def test_activations_in_flight_stay_within_the_bound(name):
    for schedule in SMALL[name]:
        timeline = simulate(schedule)
        peaks = [timeline.peak_in_flight(rank) for rank in range(schedule.ranks)]
        bounds = [bound(schedule, rank) for rank in range(schedule.ranks)]
        if name in SPLIT:  # a rank may have no use for all that it may hold
            assert all(peak <= most for peak, most in zip(peaks, bounds))
            assert peaks[0] == bounds[0]
        else:
            assert peaks == bounds


# ---- Bubbles


@names
def test_F39_the_bubble_is_the_formula_for_any_number_of_microbatches(name):
    for schedule in SMALL[name]:
        timeline = simulate(schedule)
        assert timeline.bubble == pytest.approx(ideal_bubble(schedule))
        assert len({timeline.idle(rank) for rank in range(schedule.ranks)}) == 1
        p, v, m = schedule.ranks, schedule.chunks, schedule.microbatches
        if m >= p > 1:  # the papers' formulas, written out
            work = {"zero_bubble": 3 * m, "zero_bubble_v": 6 * m}.get(name, v * m)
            assert timeline.bubble == pytest.approx((p - 1) / (work + p - 1))


@pytest.mark.parametrize("name", [name for name in CHUNKS if name not in SPLIT])
@pytest.mark.parametrize("backward", [0.25, 1.5])
def test_without_halves_the_formula_holds_for_any_cost_of_backward(name, backward):
    for schedule in SMALL[name]:
        assert simulate(schedule, Costs(1, backward, backward)).bubble == pytest.approx(ideal_bubble(schedule))


def test_halves_and_a_v_idle_less():
    for p in range(2, 6):
        for m in MICROBATCHES:
            for whole in (Costs(), Costs(1, 1.2, 0.8), Costs(1, 0.9, 1.1)):
                half = Costs(whole.forward / 2, whole.backward_input / 2, whole.backward_weight / 2)
                one = simulate(Schedule("1f1b", p, m), whole).end
                split = simulate(Schedule("zero_bubble", p, m), whole).end
                turned = simulate(Schedule("zero_bubble_v", p, m, 2), half).end
                assert turned < split < one


# ---- The simulator itself


def test_a_timeline_that_was_worked_out_by_hand():
    timeline = simulate(Schedule("1f1b", 2, 2), [Costs(1, 1, 1, transfer=0.5), Costs(2, 2, 1, transfer=0.25)])
    assert [[(each.start, each.end) for each in events] for events in timeline.events] == [
        [(0, 1), (1, 2), (6.75, 8.75), (11.75, 13.75)],  # F1 F2 B1 B2
        [(1.5, 3.5), (3.5, 6.5), (6.5, 8.5), (8.5, 11.5)],  # F1 B1 F2 B2
    ]
    assert {(each.message, each.start, each.end) for each in timeline.transfers} == {
        ((0, 1, 0), 1, 1.5),
        ((0, 1, 1), 2, 2.5),
        ((1, 0, 0), 6.5, 6.75),
        ((1, 0, 1), 11.5, 11.75),
    }
    assert (timeline.end, timeline.busy(0), timeline.idle(1)) == (13.75, 6, 3.75)
    assert timeline.bubble == (7.75 + 3.75) / 27.5
    blocked = simulate(timeline.schedule, [Costs(1, 1, 1, transfer=0.5), Costs(2, 2, 1, transfer=0.25)], Sends.BLOCKING)
    assert blocked.events[0][1] == (Action(F, 0, 1), 1.5, 2.5)


def test_messages_wait_for_their_receive_and_for_each_other():
    late, costs = Late("gpipe", 2, 3), [Costs(1, transfer=2), Costs(3)]
    starts = {sends: sorted(each.start for each in simulate(late, costs, sends).transfers)[:3] for sends in Sends}
    assert starts[Sends.BUFFERED] == [1, 3, 5]  # one after the other on the channel
    assert starts[Sends.RENDEZVOUS] == [1, 6, 11]  # rank 1 posts when it is done with the one before


@given(schedules(), st.floats(0, 2), st.sampled_from(Sends))
def test_a_timeline_keeps_to_causes(schedule, transfer, sends):
    timeline = simulate(schedule, Costs(1, 2, 0.5, transfer), sends)
    arrived = {message: (start, end) for message, start, end in timeline.transfers}
    for rank, events in enumerate(timeline.events):
        assert all(before.end <= after.start for before, after in zip(events, events[1:]))
        for action, start, end in events:
            assert end - start == pytest.approx({F: 1, B: 2.5, I: 2, W: 0.5}[action.kind])
            taken, made = schedule.takes(rank, action), schedule.gives(rank, action)
            if taken and schedule.sender(taken) != rank:
                assert start >= arrived[taken][1]
            if made and schedule.receiver(made) != rank:
                assert arrived[made][0] >= end
                assert arrived[made][1] - arrived[made][0] == pytest.approx(transfer)


# ---- Refusals


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("2f2b", 2, 4), "pipeline=2f2b: no such schedule. Choose one of: gpipe, 1f1b,"),
        (("1f1b", 2, 0), "pipeline=1f1b with microbatches=0: there must be at least 1"),
        (("gpipe", 0, 4), "ranks=0"),
        (("interleaved", 2, 4, 0), "chunks=0"),
        (("1f1b", 2, 4, 2), "pipeline=1f1b with 2 chunks on each rank: this schedule has exactly 1"),
        (("zero_bubble_v", 2, 4), "with 1 chunks on each rank: this schedule has exactly 2"),
    ],
)
def test_what_is_no_schedule_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Schedule(*arguments)


def test_costs_of_too_few_stages_are_refused():
    with pytest.raises(ValueError, match="costs of 2 stages for a pipeline of 4"):
        simulate(Schedule("interleaved", 2, 4, 2), [Costs(), Costs()])
