"""Tables on shared cores: as the simulator where there are enough, and as much work as there is where there are few."""

import pytest

from sirara.plan.cores import play, together_s
from sirara.pure.schedule import Kind, schedule, sending_early
from sirara.pure.simulate import Costs, simulate


def costs(stages: int) -> Costs:
    return Costs.uniform(stages, forward_s=1.0, input_s=0.75, weight_s=0.5)


@pytest.mark.parametrize(
    ("name", "ranks", "chunks"),
    [("gpipe", 3, 1), ("1f1b", 4, 1), ("interleaved", 2, 2), ("zb-h1", 3, 1), ("zb-v", 2, 2)],
)
def test_with_cores_for_all_a_table_takes_as_long_as_the_simulator_says(name, ranks, chunks):
    table = sending_early(schedule(name, ranks=ranks, chunks=chunks, microbatches=6))
    played, paper = play(table, costs(table.stages), slow=lambda n: 1.0), simulate(table, costs(table.stages))
    assert played.makespan_s == pytest.approx(paper.makespan_s)
    assert played.busy_s == pytest.approx(paper.busy_s)


def test_on_one_core_a_pipeline_takes_all_of_its_work_one_after_the_other():
    table = schedule("1f1b", ranks=4, chunks=1, microbatches=8)
    work = sum(costs(4).of(a) for row in table.rows for a in row if a.kind in (Kind.FORWARD, Kind.BACKWARD))
    assert play(table, costs(4), slow=lambda n: n).makespan_s == pytest.approx(work)


def test_two_cores_are_between_one_and_four():
    table = schedule("1f1b", ranks=4, chunks=1, microbatches=8)
    one, two, four = (
        play(table, costs(4), slow=lambda n, c=c: max(1.0, n / c)).makespan_s for c in (1, 2, 4)
    )
    assert one / 2 <= two < one and two >= four


def test_ranks_that_end_leave_their_cores_to_the_others():
    assert together_s([1.0, 3.0], slow=lambda n: n) == pytest.approx(4.0)
    assert together_s([1.0, 3.0], slow=lambda n: 1.0) == pytest.approx(3.0)
    assert together_s([2.0], slow=lambda n: n, alike=2) == pytest.approx(4.0)
