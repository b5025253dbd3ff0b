import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirara.errors import InvariantError
from sirara.pure.retain import Rules, best_step, expendable, judge, most_steps


@given(st.data())
def test_what_goes_is_older_than_the_last_good_ones_and_held_by_no_rule(data):
    committed = sorted(data.draw(st.sets(st.integers(0, 40), min_size=1)))
    newest = data.draw(st.sampled_from(committed))
    verified = {newest, *data.draw(st.sets(st.sampled_from(committed)))}
    last, every = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([None, 5]))
    pinned = data.draw(st.sets(st.integers(0, 40)))
    scores = data.draw(st.dictionaries(st.integers(0, 40), st.floats(0, 3) | st.just(math.nan)))
    best = data.draw(st.sampled_from([None, "eval/held/loss"]))
    gone = expendable(
        committed,
        verified,
        newest=newest,
        keep_last=last,
        keep_every=every,
        keep_best=best,
        pinned=pinned,
        scores=scores,
    )
    good = sorted((s for s in verified if s <= newest), reverse=True)
    lowest = {
        s
        for s in good
        if best
        and scores.get(s, math.nan)
        == min((scores[g] for g in good if scores.get(g, math.nan) >= 0), default=None)
    }
    held = {max(lowest)} if lowest else set()
    enough = len(good) >= last
    assert gone == [
        s
        for s in committed
        if enough and s < good[last - 1] and not (every and s % every == 0) and s not in pinned | held
    ]
    assert newest not in gone and set(good[:last]).isdisjoint(gone)


def test_every_verdict_says_why():
    said = {
        v.step: (v.stays, v.why)
        for v in judge(
            [10, 20, 30, 40, 50, 60, 70, 80],
            {10, 20, 30, 40, 60, 70},
            newest=70,
            rules=Rules(last=2, every=20, best="eval/held/loss"),
            pinned={10},
            scores={30: 1.5, 60: 2.0, 80: 0.1},
        )
    }
    assert said == {
        80: (True, "it is newer than step 70"),
        70: (True, "one of the last 2"),
        60: (True, "one of the last 2"),
        50: (False, "2 verified steps are newer"),
        40: (True, "a multiple of 20"),
        30: (True, "the lowest eval/held/loss"),
        20: (True, "a multiple of 20"),
        10: (True, "pinned"),
    }


def test_an_unverified_step_inside_the_last_ones_stays_and_too_few_good_ones_keep_all():
    rules = Rules(last=2)
    assert [v.why for v in judge([1, 2, 3], {1, 3}, newest=3, rules=rules)] == [
        "one of the last 2",
        "not older than the last 2 verified ones",
        "one of the last 2",
    ]
    assert [v.why for v in judge([1, 2, 3], {3}, newest=3, rules=rules)][1:] == [
        "only 1 of 2 verified steps are newer or equal"
    ] * 2


def test_nothing_goes_on_behalf_of_a_step_that_is_not_verified():
    with pytest.raises(InvariantError, match="step 5 is not committed and verified"):
        judge([1, 2, 5], {1, 2}, newest=5, rules=Rules(last=1))


def test_of_equal_scores_the_newest_is_the_best_and_nan_is_none():
    assert best_step({1: 2.0, 4: 2.0, 3: 5.0, 9: math.nan, 8: -math.inf}) == 4
    assert best_step({1: math.nan}) is None


def played(every, steps, rules):
    """The most folders at one time, by brute force: every save is verified, then tidied."""
    due = [s for s in range(1, steps + 1) if (every and s % every == 0) or s == steps]
    there, most = [], 0
    for step in due:
        there.append(step)
        most = max(most, len(there))
        gone = expendable(there, there, newest=step, keep_last=rules.last, keep_every=rules.every)
        there = [s for s in there if s not in gone]
    return most


@given(st.none() | st.integers(1, 9), st.integers(1, 60), st.integers(1, 5), st.none() | st.integers(1, 12))
def test_the_most_steps_at_one_time_are_those_of_a_run_played_through(every, steps, last, kept):
    rules = Rules(last=last, every=kept)
    assert most_steps(every=every, steps=steps, rules=rules) == played(every, steps, rules)
    more = most_steps(
        every=every, steps=steps, rules=Rules(last=last, every=kept, best="eval/a/loss"), pinned=2
    )
    assert 2 <= more - played(every, steps, rules) <= 3
