import pytest

from sirara.pure.failures import Failures


def test_the_pause_doubles_up_to_its_cap_and_a_success_forgets_it():
    failures = Failures(most=100, retry_s=30.0, most_s=200.0)
    assert [failures.failed(0.0) for _ in range(5)] == [30.0, 60.0, 120.0, 200.0, 200.0]
    failures.succeeded()
    assert failures.in_a_row == 0 and not failures.due(1e9)
    assert failures.failed(5.0) == 30.0


def test_a_retry_is_due_once_its_pause_is_over():
    failures = Failures(most=3, retry_s=10.0)
    assert not failures.due(0.0)
    failures.failed(100.0)
    assert not failures.due(109.9) and failures.due(110.0)
    failures.failed(110.0)
    assert not failures.due(129.9) and failures.due(130.0)


@pytest.mark.parametrize(("most", "survived"), [(0, 0), (1, 0), (3, 2)])
def test_so_many_in_a_row_are_fatal(most, survived):
    failures = Failures(most=most, retry_s=1.0)
    for _ in range(survived):
        failures.failed(0.0)
        assert not failures.fatal
    failures.failed(0.0)
    assert failures.fatal
    failures.succeeded()
    assert not failures.fatal


def test_the_pause_stays_finite_however_many_fail():
    failures = Failures(most=5000, retry_s=0.5)
    assert max(failures.failed(0.0) for _ in range(2000)) == 3600.0
