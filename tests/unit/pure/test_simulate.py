"""Every table up to 8 ranks, 4 stages per rank and 32 microbatches is played: it ends, and bubble and memory are
the published ones.

gpipe: arXiv:1811.06965.  1f1b, interleaved: arXiv:2104.04473, section 2.2.  zb-h1, zb-v: arXiv:2401.10241, table 2 and
section 6.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sirara.errors import InvariantError
from sirara.pure.schedule import SCHEDULES, Action, Kind, Schedule, chunks_of, needs, schedule, sending_early
from sirara.pure.simulate import Costs, Result, simulate

RANKS, CHUNKS, MICROBATCHES = range(1, 9), range(2, 5), range(1, 33)
SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
RECEIVES = (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)


@cache
def played(name: str) -> tuple[tuple[Schedule, Result], ...]:
    """All tables of one schedule, with one forward = one input gradient = one weight gradient = 1 s."""
    chunks = CHUNKS if name == "interleaved" else (chunks_of(name),)
    tables = (
        schedule(name, ranks=p, chunks=v, microbatches=m) for p in RANKS for v in chunks for m in MICROBATCHES
    )
    return tuple((table, simulate(table, Costs.uniform(table.stages))) for table in tables)


@pytest.fixture(autouse=True, scope="module")
def forget() -> Iterator[None]:
    yield
    played.cache_clear()


def group_size(table: Schedule) -> int:
    """Of the first, largest group of interleaved: at least `ranks`, as even as possible."""
    return -(-table.microbatches // max(1, table.microbatches // table.ranks))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_table_ends_and_sends_what_is_received_in_order(name: str) -> None:
    # simulate raises for deadlock, unmatched or reordered messages, and for work that is missing, doubled or too early.
    assert len(played(name)) == (3 if name == "interleaved" else 1) * 8 * 32


@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_of_each_stage_are_made_in_ascending_order_of_microbatches(name: str) -> None:
    adds = Kind.WEIGHT if name.startswith("zb") else Kind.BACKWARD
    for table, _ in played(name):
        for rank, row in enumerate(table.rows):
            for stage in table.stages_of(rank):
                order = [a.microbatch for a in row if a.kind is adds and a.stage == stage]
                assert order == list(range(table.microbatches))


def test_bubble_of_gpipe_and_1f1b_is_p_minus_1_over_m_plus_p_minus_1() -> None:
    for name in ("gpipe", "1f1b"):
        for table, result in played(name):
            p, m = table.ranks, table.microbatches
            assert result.bubble_fraction == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)


def test_bubble_of_interleaved_is_p_minus_1_over_m_v_of_the_ideal_time() -> None:
    for table, result in played("interleaved"):
        p, v, m = table.ranks, table.chunks, table.microbatches
        ideal_s = 3 * m * v
        if m >= p:
            assert (result.makespan_s - ideal_s) / ideal_s == pytest.approx((p - 1) / (m * v))
        else:
            # Too few to fill the ring: the first passes all stages, the others follow one by one.
            assert result.makespan_s == 3 * (p * v + m - 1)


def test_bubble_of_zb_h1_is_p_minus_1_times_forward_plus_input_minus_weight() -> None:
    for table, result in played("zb-h1"):
        p, m = table.ranks, table.microbatches
        if m >= p:
            assert result.makespan_s == 3 * m + (p - 1)
    for p, m in ((2, 8), (4, 8), (8, 16)):
        costs = Costs.uniform(p, forward_s=1.0, input_s=1.25, weight_s=0.75)
        result = simulate(schedule("zb-h1", ranks=p, chunks=1, microbatches=m), costs)
        assert result.makespan_s == 3.0 * m + (p - 1) * (1.0 + 1.25 - 0.75)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_sending_early_saves_weight_gradients_on_the_way_back_and_order_and_memory_stay(name: str) -> None:
    for table, whole in played(name):
        p, v, m = table.ranks, table.chunks, table.microbatches
        early = sending_early(table)
        result = simulate(early, Costs.uniform(table.stages))
        assert result.busy_s == whole.busy_s and result.live_peak == whole.live_peak
        assert max(result.owed_peak) == (p * v > 1 and p > 1)
        if v == 1 or m >= p:
            # (p - 1)(F + I) where whole backwards have (p - 1)(F + I + W), all of them 1 s.
            assert result.makespan_s == 3 * m * v + 2 * (p - 1)
        else:
            assert result.makespan_s < whole.makespan_s


def test_zb_v_waits_only_for_the_first_microbatch_to_arrive() -> None:
    for table, result in played("zb-v"):
        p, m = table.ranks, table.microbatches
        if m >= p:
            # No table can be shorter: the last rank starts p - 1 forwards late and has 6 m to do.
            assert result.makespan_s == 6 * m + p - 1
        if m >= 2 * p - 1:
            for spans in result.timeline:
                assert all(a.stop_s == b.start_s for a, b in pairwise(spans))


def test_live_microbatches_are_what_each_schedule_promises() -> None:
    for name in SCHEDULES:
        for table, result in played(name):
            p, v, m = table.ranks, table.chunks, table.microbatches
            for rank, peak in enumerate(result.live_peak):
                match name:
                    case "gpipe":
                        assert peak == m
                    case "1f1b":
                        assert peak == min(p - rank, m)
                    case "interleaved":
                        assert peak == min(2 * (p - 1 - rank) + (v - 1) * group_size(table) + 1, m * v)
                    case "zb-h1":
                        assert peak <= min(p, m)
                    case _:
                        # Stages of half the size: as much memory as 1f1b on its first rank.
                        assert peak <= min(2 * p, 2 * m)


def test_only_split_schedules_put_weight_gradients_off() -> None:
    for name in SCHEDULES:
        most = max(max(result.owed_peak) for _, result in played(name))
        assert (most > 0) == name.startswith("zb")


def test_zero_bubble_schedules_are_never_slower_than_1f1b() -> None:
    for (table, plain), (_, h1), (_, v) in zip(played("1f1b"), played("zb-h1"), played("zb-v"), strict=True):
        # A stage of zb-v is half as long.
        assert v.makespan_s / 2 <= h1.makespan_s <= plain.makespan_s, (table.ranks, table.microbatches)


def critical_path_s(table: Schedule, costs: Costs) -> float:
    """The longest way through the graph of a table: in its row after the last, after its needs and their transfer."""
    before: dict[Action, Action] = {}
    compute = [[a for a in row if a.kind not in SENDS + RECEIVES] for row in table.rows]
    for row in compute:
        before.update((b, a) for a, b in pairwise(row))

    @cache
    def end_s(action: Action) -> float:
        start = end_s(before[action]) if action in before else 0.0
        for need in needs(action, table.stages):
            away = table.rank_of(need.stage) != table.rank_of(action.stage)
            start = max(start, end_s(need) + costs.transfer_s * away)
        return start + costs.of(action)

    return max(end_s(row[-1]) for row in compute)


def seconds(stages: int) -> st.SearchStrategy[tuple[float, ...]]:
    return st.tuples(*[st.integers(1, 20).map(float)] * stages)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SCHEDULES), st.integers(1, 4), st.integers(1, 8), st.data())
def test_the_makespan_is_the_longest_path_for_any_costs(
    name: str, ranks: int, m: int, data: st.DataObject
) -> None:
    table = schedule(name, ranks=ranks, chunks=chunks_of(name), microbatches=m)
    forward_s, backward_s, input_s, weight_s = (data.draw(seconds(table.stages)) for _ in range(4))
    costs = Costs(
        forward_s=forward_s,
        backward_s=backward_s,
        input_s=input_s,
        weight_s=weight_s,
        transfer_s=float(data.draw(st.integers(0, 9))),
    )
    result = simulate(table, costs)
    assert result.makespan_s == critical_path_s(table, costs)
    assert sum(result.busy_s) == sum(costs.of(a) for row in table.rows for a in row)


def with_row(table: Schedule, rank: int, row: Sequence[Action]) -> Schedule:
    return replace(table, rows=(*table.rows[:rank], tuple(row), *table.rows[rank + 1 :]))


def broken(change: str) -> Schedule:
    table = schedule("1f1b", ranks=2, chunks=1, microbatches=3)
    first, last = list(table.rows[0]), list(table.rows[1])
    match change:
        case "send dropped":
            first.remove(Action(Kind.SEND_FORWARD, 0, 2))
        case "receive dropped":
            first.remove(Action(Kind.RECEIVE_BACKWARD, 0, 2))
        case "sends swapped":
            a, b = (first.index(Action(Kind.SEND_FORWARD, 0, i)) for i in (0, 1))
            first[a], first[b] = first[b], first[a]
            first.insert(0, first.pop(first.index(Action(Kind.FORWARD, 0, 1))))
            first.insert(0, first.pop(first.index(Action(Kind.FORWARD, 0, 0))))
        case "send too early":
            first[0], first[1] = first[1], first[0]
        case "backward dropped":
            last.remove(Action(Kind.BACKWARD, 1, 1))
        case "forward doubled":
            last.append(Action(Kind.FORWARD, 1, 0))
        case "backward descending":
            a, b = (last.index(Action(Kind.BACKWARD, 1, i)) for i in (0, 1))
            last[a], last[b] = last[b], last[a]
        case "wrong rank":
            last.append(Action(Kind.FORWARD, 0, 0))
        case _:
            # Both ranks wait for what the other one sends afterwards.
            first.insert(0, first.pop(first.index(Action(Kind.RECEIVE_BACKWARD, 0, 0))))
    return with_row(with_row(table, 0, first), 1, last)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("send dropped", "never ends"),
        ("receive dropped", "too early"),
        ("sends swapped", "out of order"),
        ("send too early", "before it is made"),
        ("backward dropped", "once per microbatch"),
        ("forward doubled", "once per microbatch"),
        ("backward descending", "once per microbatch"),
        ("wrong rank", "which has stages"),
        ("deadlock", "never ends"),
    ],
)
def test_a_broken_table_is_found(change: str, message: str) -> None:
    with pytest.raises(InvariantError, match=message):
        simulate(broken(change), Costs.uniform(2))


def test_a_deadlock_names_what_each_rank_waits_for() -> None:
    with pytest.raises(InvariantError) as caught:
        simulate(broken("deadlock"), Costs.uniform(2))
    assert "rank 0 at RB0@0" in str(caught.value) and "rank 1 at RF0@1" in str(caught.value)


def test_a_message_that_nobody_receives_is_found() -> None:
    table = schedule("1f1b", ranks=2, chunks=1, microbatches=1)
    table = with_row(table, 0, [*table.rows[0], Action(Kind.SEND_FORWARD, 0, 0)])
    with pytest.raises(InvariantError, match="nobody receives"):
        simulate(table, Costs.uniform(2))
