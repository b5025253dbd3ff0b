"""Tables of actions: known rows, who holds what, and what is refused. test_simulate plays all of them."""

import pytest

from sirara.errors import LayoutError
from sirara.pure.schedule import SCHEDULES, SPLIT_BACKWARD, Kind, Schedule, chunks_of, schedule, sending_early

COMPUTES = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)


def row(table: Schedule, rank: int) -> str:
    """Only what is computed; the stage is left out where a rank has one."""
    actions = [a for a in table.rows[rank] if a.kind in COMPUTES]
    return " ".join(f"{a.kind}{a.microbatch}" + (f"@{a.stage}" if table.chunks > 1 else "") for a in actions)


def full_row(table: Schedule, rank: int) -> str:
    return " ".join(map(str, table.rows[rank]))


def test_gpipe_computes_all_forwards_first_and_both_passes_ascending() -> None:
    assert row(schedule("gpipe", ranks=2, chunks=1, microbatches=3), 0) == "F0 F1 F2 B0 B1 B2"


def test_1f1b_on_three_stages_is_the_drawing_of_the_docstring() -> None:
    table = schedule("1f1b", ranks=3, chunks=1, microbatches=4)
    assert row(table, 0) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert row(table, 1) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert row(table, 2) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_interleaved_passes_groups_of_ranks_chunk_by_chunk() -> None:
    table = schedule("interleaved", ranks=2, chunks=2, microbatches=4)
    assert row(table, 1) == (
        "F0@1 F1@1 F0@3 B0@3 F1@3 B1@3 F2@1 B0@1 F3@1 B1@1 F2@3 B2@3 F3@3 B3@3 B2@1 B3@1"
    )


def test_zb_h1_puts_weight_gradients_off_on_the_last_stage() -> None:
    table = schedule("zb-h1", ranks=2, chunks=1, microbatches=4)
    assert row(table, 0) == "F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3"
    assert row(table, 1) == "F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3"


def test_zb_v_turns_on_the_last_rank_and_comes_back_to_the_first() -> None:
    table = schedule("zb-v", ranks=2, chunks=2, microbatches=3)
    assert [table.rank_of(s) for s in range(4)] == [0, 1, 1, 0]
    assert table.stages_of(0) == (0, 3) and table.stages_of(1) == (1, 2)
    assert row(table, 1).startswith("F0@1 F0@2 F1@1 F1@2 I0@2 W0@2 F2@1 I0@1 W0@1 F2@2")


def test_interleaved_deals_stages_round_and_round() -> None:
    table = schedule("interleaved", ranks=3, chunks=2, microbatches=3)
    assert [table.rank_of(s) for s in range(6)] == [0, 1, 2, 0, 1, 2]
    assert table.stages_of(1) == (1, 4)


def test_transfers_stand_next_to_what_needs_and_makes_them() -> None:
    table = schedule("1f1b", ranks=2, chunks=1, microbatches=2)
    assert full_row(table, 0) == "F0@0 SF0@0 F1@0 SF1@0 RB0@0 B0@0 RB1@0 B1@0"
    assert full_row(table, 1) == "RF0@1 F0@1 B0@1 SB0@1 RF1@1 F1@1 B1@1 SB1@1"


def test_input_gradients_leave_before_weight_gradients_are_computed() -> None:
    for name in SPLIT_BACKWARD:
        table = schedule(name, ranks=4, chunks=chunks_of(name), microbatches=6)
        for actions in table.rows:
            for n, action in enumerate(actions):
                if action.kind is Kind.SEND_BACKWARD:
                    before = actions[n - 1]
                    assert (before.kind, before.stage, before.microbatch) == (
                        Kind.INPUT,
                        action.stage,
                        action.microbatch,
                    )


def test_sending_early_halves_the_backwards_whose_dx_leaves_their_rank() -> None:
    table = sending_early(schedule("1f1b", ranks=2, chunks=1, microbatches=2))
    assert full_row(table, 0) == "F0@0 SF0@0 F1@0 SF1@0 RB0@0 B0@0 RB1@0 B1@0"
    assert full_row(table, 1) == "RF0@1 F0@1 I0@1 SB0@1 W0@1 RF1@1 F1@1 I1@1 SB1@1 W1@1"


def test_sending_early_leaves_alone_what_is_in_halves_or_on_one_rank() -> None:
    for name in SCHEDULES:
        for ranks in (1, 3):
            table = schedule(name, ranks=ranks, chunks=chunks_of(name), microbatches=4)
            assert (sending_early(table) == table) == (ranks == 1 or name in SPLIT_BACKWARD)


def test_nothing_is_sent_between_stages_of_one_rank() -> None:
    table = schedule("zb-v", ranks=3, chunks=2, microbatches=4)
    sends = {
        (a.kind, a.stage) for r in table.rows for a in r if a.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
    }
    # Stages 2 and 3 are both on rank 2.
    assert sends == {(Kind.SEND_FORWARD, s) for s in (0, 1, 3, 4)} | {
        (Kind.SEND_BACKWARD, s) for s in (1, 2, 4, 5)
    }


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_rank_transfers_nothing_and_1f1b_there_is_gradient_accumulation(name: str) -> None:
    table = schedule(name, ranks=1, chunks=chunks_of(name), microbatches=3)
    assert all(a.kind in COMPUTES for a in table.rows[0])
    if name == "1f1b":
        assert row(table, 0) == "F0 B0 F1 B1 F2 B2"


def test_an_unknown_schedule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(LayoutError, match="dualpipe") as caught:
        schedule("dualpipe", ranks=2, chunks=1, microbatches=2)
    assert all(name in str(caught.value) for name in SCHEDULES)


@pytest.mark.parametrize(
    ("name", "chunks", "takes"),
    [
        ("gpipe", 2, "takes 1 stage per rank"),
        ("1f1b", 2, "takes 1 stage per rank"),
        ("zb-h1", 3, "takes 1 stage per rank"),
        ("zb-v", 1, "takes 2 stages per rank"),
        ("zb-v", 3, "takes 2 stages per rank"),
        ("interleaved", 1, "takes at least 2 stages per rank"),
    ],
)
def test_stages_per_rank_that_a_schedule_cannot_use_are_refused_with_what_can(
    name: str, chunks: int, takes: str
) -> None:
    with pytest.raises(LayoutError, match=f"mesh.virtual_stages={chunks}") as caught:
        schedule(name, ranks=2, chunks=chunks, microbatches=4)
    assert takes in caught.value.why
    assert caught.value.try_[0] == f"mesh.virtual_stages={chunks_of(name)}"
    for alternative in caught.value.try_[1:]:
        schedule(alternative.removeprefix("mesh.schedule="), ranks=2, chunks=chunks, microbatches=4)


@pytest.mark.parametrize(("ranks", "microbatches"), [(0, 4), (2, 0)])
def test_a_pipeline_of_nothing_is_refused(ranks: int, microbatches: int) -> None:
    with pytest.raises(LayoutError, match=f"{ranks} ranks and {microbatches} microbatches"):
        schedule("1f1b", ranks=ranks, chunks=1, microbatches=microbatches)


def test_auto_takes_the_fewest_stages_per_rank() -> None:
    assert [chunks_of(name) for name in SCHEDULES] == [1, 1, 2, 1, 2]
    assert chunks_of("interleaved", 4) == 4
