import pytest

from sirara.checkpoint.deciding import ROW_BYTES, Move, Row, first_fault, joint, ordered, own_move


def move(**changes):
    asked = {"busy": False, "patient": False, "when_busy": "queue", "backing_off": False, "due_again": False}
    return own_move(**{**asked, **changes})


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, Move.START),
        ({"busy": True}, Move.QUEUE),
        ({"busy": True, "when_busy": "skip"}, Move.SKIP),
        ({"busy": True, "when_busy": "wait"}, Move.WAIT),
        ({"busy": True, "when_busy": "skip", "patient": True}, Move.WAIT),
        ({"backing_off": True}, Move.BACK_OFF),
        ({"backing_off": True, "due_again": True}, Move.START),
        ({"backing_off": True, "patient": True}, Move.START),
        ({"backing_off": True, "busy": True}, Move.QUEUE),
    ],
)
def test_what_rank_0_wants(asked, expected):
    assert move(**asked) is expected


def test_all_ranks_wait_for_a_keeper_anywhere_that_still_works_on_a_save_that_is_over():
    rows = [Row(move=Move.START), Row(busy=True)]
    assert joint(rows, patient=True, when_busy="skip") is Move.WAIT
    assert joint(rows, patient=False, when_busy="queue") is Move.QUEUE
    assert joint(rows, patient=False, when_busy="skip") is Move.SKIP
    assert joint([Row(), Row()], patient=False, when_busy="skip") is Move.START
    assert joint([Row(move=Move.BACK_OFF), Row(busy=True)], patient=False, when_busy="wait") is Move.BACK_OFF


def test_a_row_arrives_as_it_was_sent_but_for_what_is_too_long():
    row = Row(
        move=Move.QUEUE,
        tiers=frozenset({"memory", "object"}),
        busy=True,
        kept=True,
        digest="0123456789abcdef" * 2,
        address="10.0.0.1:34567",
        fault="kein Platz für das Bild",
    )
    assert Row.from_bytes(row.to_bytes()) == row and len(row.to_bytes()) == ROW_BYTES
    cut = Row.from_bytes(Row(fault="ü" * 500).to_bytes()).fault
    assert set(cut) == {"ü"} and 190 <= len(cut) <= 200


def test_the_first_rank_with_a_fault_is_named_and_tiers_go_fastest_first():
    assert first_fault([Row(), Row(fault="full"), Row(fault="late")]) == (1, "full")
    assert first_fault([Row(), Row()]) is None
    assert ordered({"object", "disk", "memory", "parity"}) == ("memory", "parity", "disk", "object")
