"""Learning-rate schedules as pure functions of the update number."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirara.train.lr import lr_at

NAMES = ["constant", "linear", "cosine", "wsd"]


def at(update: int, name: str = "cosine", **changes: float) -> float:
    settings = {"lr": 0.1, "total": 100, "warmup_steps": 10, "min_lr_ratio": 0.1, "decay_steps": 20} | changes
    return lr_at(update, name=name, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_warmup_reaches_the_peak_on_its_last_step(name: str) -> None:
    assert at(0, name) == pytest.approx(0.01)
    assert at(9, name) == pytest.approx(0.1)
    assert at(10, name) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("name", "last"), [("constant", 0.1), ("linear", 0.01), ("cosine", 0.01), ("wsd", 0.01)]
)
def test_the_last_rate_is_the_floor_and_stays(name: str, last: float) -> None:
    assert at(100, name) == pytest.approx(last)
    assert at(1000, name) == pytest.approx(last)


def test_wsd_is_flat_until_its_decay() -> None:
    assert at(79, "wsd") == 0.1
    assert at(90, "wsd") == pytest.approx(0.055)


def test_cosine_is_halfway_in_the_middle() -> None:
    assert at(55) == pytest.approx(0.055)


@pytest.mark.parametrize("name", NAMES)
@given(
    update=st.integers(0, 500),
    total=st.integers(1, 300),
    warmup=st.integers(0, 300),
    decay=st.integers(0, 300),
)
def test_rates_stay_between_zero_and_the_peak_for_any_lengths(
    name: str, update: int, total: int, warmup: int, decay: int
) -> None:
    # A warm-up as long as the run divided by zero elsewhere.
    value = at(update, name, total=total, warmup_steps=warmup, decay_steps=decay)
    assert 0 < value <= 0.1
