"""The pipeline on real ranks against one process: equal bits of losses and gradients on every schedule."""

import gc
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sirara.comm.carriers import LibraryCarrier
from sirara.comm.group import Comm
from sirara.comm.header import Tag
from sirara.comm.mail import Mail
from sirara.comm.world import World, axis_comm, world_comm
from sirara.errors import CommError, InvariantError
from sirara.parallel.pipeline import Hidden, Pipeline, Work
from sirara.parallel.stage import Inputs
from sirara.pure.schedule import Kind, schedule, sending_early
from tests.harness import run_ranks

VOCAB, D, BLOCKS, B, L = 19, 8, 6, 2, 5
SCALE = 0.125
CASES = [
    *((name, 1, ranks) for name in ("gpipe", "1f1b", "zb-h1") for ranks in (1, 2, 4)),
    *(("interleaved", chunks, ranks) for chunks, ranks in ((2, 1), (2, 2), (4, 2), (2, 4))),
    *(("zb-v", 2, ranks) for ranks in (1, 2, 4)),
]
EARLY = [("gpipe", 1, 2), ("1f1b", 1, 2), ("1f1b", 1, 4), ("interleaved", 2, 2), ("interleaved", 2, 4)]


class Boom(Exception):
    pass


def units() -> list[nn.Module]:
    torch.manual_seed(5)
    blocks = [nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(BLOCKS)]
    return [nn.Embedding(VOCAB, D), *blocks, nn.Linear(D, VOCAB)]


class ToyChunk:
    """Meets the interface of a chunk with plain autograd over all of its units at once."""

    def __init__(self, stage: int, stages: int, fail: tuple[str, int, int] | None = None) -> None:
        every = units()
        per = len(every) / stages
        self.numbers = range(round(stage * per), round((stage + 1) * per))
        self.modules = [every[n] for n in self.numbers]
        self.parameters = [p for m in self.modules for p in m.parameters()]
        self.stage, self.first, self.last = stage, stage == 0, stage == stages - 1
        self.sums: list[torch.Tensor | None] = [None] * len(self.parameters)
        self.order: list[int] = []
        self.ghosts: list[str] = []
        self.fail = fail

    def forward(self, x: Any, inputs: Inputs, key: Any, scale: float) -> Any:
        self._maybe_fail("F", int(inputs.positions_BL[0, 0]))
        with torch.enable_grad():
            x = None if x is None else x.requires_grad_()
            y, losses = self._run(x, inputs, scale)
        return (x, y), losses if self.last else y.detach()

    def _run(self, x: Any, inputs: Inputs, scale: float) -> Any:
        hidden = inputs.tokens_BL if x is None else x
        for module in self.modules:
            hidden = module(hidden)
        if not self.last:
            return hidden, None
        losses = nn.functional.cross_entropy(
            hidden.flatten(0, 1), inputs.targets_BL.flatten(), reduction="none"
        ).view(inputs.targets_BL.shape)
        return losses.sum() * scale, losses.detach()

    def backward(self, trail: Any, dy: Any, microbatch: int) -> Any:
        dx = self.backward_input(trail, dy, microbatch, kind="B")
        self.backward_weight((*trail, dy), microbatch)
        return dx

    def backward_input(self, trail: Any, dy: Any, microbatch: int, kind: str = "I") -> Any:
        self._maybe_fail(kind, microbatch)
        x, y = trail
        self.dy = getattr(self, "dy", {})
        self.dy[microbatch] = dy
        return None if x is None else torch.autograd.grad(y, x, dy, retain_graph=True)[0]

    def backward_weight(self, trail: Any, microbatch: int) -> None:
        grads = torch.autograd.grad(trail[1], self.parameters, self.dy.pop(microbatch))
        self.order.append(microbatch)
        self.sums = [g if s is None else s + g for s, g in zip(self.sums, grads, strict=True)]

    def evaluate(self, x: Any, inputs: Inputs) -> Any:
        y, losses = self._run(x, inputs, 1.0)
        return losses if self.last else y

    def ghost(self, kind: Kind) -> None:
        self.ghosts.append(str(kind))

    def _maybe_fail(self, kind: str, microbatch: int) -> None:
        if self.fail == (kind, self.stage, microbatch):
            raise Boom(f"{kind} of stage {self.stage} broke on microbatch {microbatch}")


def batch(i: int, length: int = L) -> Inputs:
    g = torch.Generator().manual_seed(i)
    tokens = torch.randint(0, VOCAB, (B, length + 1), generator=g)
    return Inputs(tokens_BL=tokens[:, :-1], targets_BL=tokens[:, 1:], positions_BL=torch.full((B, length), i))


def comm_here(direct: bool) -> Comm:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    world = World(rank=rank, size=size, local_rank=rank, local_size=size, node=0)
    return world_comm(world, timeout_s=15.0, direct=direct)


def pipeline_of(
    name: str,
    chunks: int,
    microbatches: int,
    comm: Comm,
    fail: Any = None,
    *,
    early: bool = False,
    **more: Any,
) -> Any:
    table = schedule(name, ranks=comm.size, chunks=chunks, microbatches=microbatches)
    table = sending_early(table) if early else table
    mine = {s: ToyChunk(s, table.stages, fail) for s in table.stages_of(comm.rank)}
    mail = Mail(comm, **more) if comm.size > 1 else None
    hidden = Hidden(size=D, dtype=torch.float32)
    return Pipeline(mine, table, mail, rank=comm.rank, hidden=hidden, alarm=comm.alarm)  # type: ignore[arg-type]


def leave_together(*, connected: bool = True) -> None:
    """Letters and answers lie in the memory of this rank: the others may still read there."""
    if dist.is_initialized():
        store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
        if not connected:
            # As when the process ends: the connections break.
            dist.destroy_process_group()
            gc.collect()
        store.set(f"left {rank}", "")
        store.wait([f"left {other}" for other in range(size)])


def train(
    name: str,
    chunks: int,
    microbatches: int,
    works: int,
    direct: bool,
    slots: int = 512,
    ways: Any = None,
    early: bool = False,
) -> Any:
    """Losses, gradients by parameter number, order of weight gradients and ghosts of two steps on this rank."""
    pipeline = pipeline_of(name, chunks, microbatches, comm_here(direct), early=early, slots=slots)
    if ways is not None:
        pipeline.mail._carrier = LibraryCarrier(pipeline.mail.comm, torch.device("cpu"), ways=ways)
    losses = []
    for step in range(2):
        # Numbers with gaps, as a deal gives them; lengths may differ from one microbatch to the next.
        work = [Work(microbatch=3 * i + step, inputs=batch(3 * i + step, L + i % 2)) for i in range(works)]
        losses += pipeline.run(work, scale=SCALE)
    grads = {(n, k): grad.tolist() for chunk in pipeline.chunks.values() for n, k, grad in _named(chunk)}
    leave_together()
    orders = {stage: chunk.order for stage, chunk in pipeline.chunks.items()}
    ghosts = {stage: len(chunk.ghosts) for stage, chunk in pipeline.chunks.items()}
    return [x.tolist() for x in losses], grads, orders, ghosts


def _named(chunk: ToyChunk) -> Any:
    at = 0
    for n, module in zip(chunk.numbers, chunk.modules, strict=True):
        for k, _ in enumerate(module.parameters()):
            yield n, k, chunk.sums[at]
            at += 1


def oracle(works: int) -> Any:
    return train("1f1b", 1, works, works, False)


@pytest.mark.parametrize(("name", "chunks", "ranks"), CASES)
@pytest.mark.parametrize(("microbatches", "works"), [(8, 8), (8, 5), (3, 3), (1, 1)])
def test_losses_and_gradients_have_the_bits_of_one_process(
    name: str, chunks: int, ranks: int, microbatches: int, works: int
) -> None:
    losses, grads, _, _ = oracle(works)
    answers = run_ranks(ranks, train, name, chunks, microbatches, works, True)
    assert [x for answer in answers for x in answer[0]] == losses
    found = {key: grad for answer in answers for key, grad in answer[1].items()}
    assert found == grads
    halves = 3 if name.startswith("zb") else 2
    for _, _, orders, ghosts in answers:
        # A ghost takes part in every computation of the table that has no microbatch here.
        assert all(count == 2 * halves * (microbatches - works) for count in ghosts.values())
        for order in orders.values():
            assert order == [3 * i + step for step in range(2) for i in range(works)]


@pytest.mark.parametrize(("name", "chunks", "ranks"), EARLY)
@pytest.mark.parametrize(("microbatches", "works"), [(8, 5), (3, 3), (1, 1)])
def test_sending_dx_before_weight_gradients_keeps_the_bits_of_one_process(
    name: str, chunks: int, ranks: int, microbatches: int, works: int
) -> None:
    losses, grads, _, _ = oracle(works)
    answers = run_ranks(ranks, train, name, chunks, microbatches, works, True, 512, None, True)
    assert [x for answer in answers for x in answer[0]] == losses
    assert {key: grad for answer in answers for key, grad in answer[1].items()} == grads
    for _, _, orders, ghosts in answers:
        for stage, order in orders.items():
            assert order == [3 * i + step for step in range(2) for i in range(works)]
            # The first stage sends no dx: its backward stays whole.
            assert ghosts[stage] == 2 * (2 if stage == 0 else 3) * (microbatches - works)


def waits_for_the_stage_before(early: bool) -> str:
    """The last stage makes no weight gradient of a microbatch before the first has had its dx."""
    comm = comm_here(True)
    pipeline = pipeline_of("1f1b", 1, 4, comm, early=early)
    store = dist.distributed_c10d._get_default_store()
    (chunk,) = pipeline.chunks.values()
    half = chunk.backward_input if chunk.first else chunk.backward_weight

    def tell(trail: Any, dy: Any, microbatch: int, kind: str = "I") -> Any:
        store.set(f"dx {microbatch} is there", "")
        return half(trail, dy, microbatch, kind=kind)

    def wait(trail: Any, microbatch: int) -> None:
        if early:
            store.wait([f"dx {microbatch} is there"], timedelta(seconds=10))
        elif not store.check([f"dx {microbatch} is there"]):
            raise Boom("a whole backward has not sent its dx yet")
        half(trail, microbatch)

    if chunk.first:
        chunk.backward_input = tell
    else:
        chunk.backward_weight = wait
    kind = "nothing"
    try:
        pipeline.run([Work(microbatch=i, inputs=batch(i)) for i in range(4)], scale=SCALE)
    except (Boom, CommError) as error:
        kind = type(error).__name__
    leave_together()
    return kind


def test_dx_leaves_before_weight_gradients_are_made() -> None:
    assert run_ranks(2, waits_for_the_stage_before, True) == ["nothing", "nothing"]
    assert run_ranks(2, waits_for_the_stage_before, False) == ["CommError", "Boom"]


@pytest.mark.parametrize(("name", "chunks", "ranks"), [("1f1b", 1, 2), ("zb-v", 2, 2), ("interleaved", 2, 4)])
def test_the_library_carries_the_same_bits_where_memory_cannot_be_read(
    name: str, chunks: int, ranks: int
) -> None:
    losses, grads, _, _ = oracle(5)
    answers = run_ranks(ranks, train, name, chunks, 8, 5, False)
    assert [x for answer in answers for x in answer[0]] == losses
    assert {key: grad for answer in answers for key, grad in answer[1].items()} == grads


@pytest.mark.parametrize(("name", "chunks", "ranks"), [("zb-v", 2, 2), ("interleaved", 2, 4)])
def test_letters_up_and_letters_down_may_have_a_communicator_each(name: str, chunks: int, ranks: int) -> None:
    losses, grads, _, _ = oracle(5)
    answers = run_ranks(ranks, train, name, chunks, 8, 5, False, 512, "gloo")
    assert [x for answer in answers for x in answer[0]] == losses
    assert {key: grad for answer in answers for key, grad in answer[1].items()} == grads


@pytest.mark.parametrize("slots", [1, 2])
def test_a_full_ring_of_headers_queues_and_loses_nothing(slots: int) -> None:
    losses, grads, _, _ = oracle(8)
    answers = run_ranks(2, train, "gpipe", 1, 8, 8, True, slots)
    assert answers[1][0] == losses
    assert {key: grad for answer in answers for key, grad in answer[1].items()} == grads


def evaluate(name: str, chunks: int, batches: int, direct: bool) -> Any:
    pipeline = pipeline_of(name, chunks, 3, comm_here(direct))
    given = [None if i % 4 == 3 else batch(i, L + i % 3) for i in range(batches)]
    before = pipeline.run([Work(microbatch=0, inputs=batch(0))], scale=1.0)
    losses = pipeline.evaluate(given)
    ghosts = {stage: chunk.ghosts.count("F") for stage, chunk in pipeline.chunks.items()}
    after = pipeline.run([Work(microbatch=0, inputs=batch(0))], scale=1.0)
    assert [x.tolist() for x in before] == [x.tolist() for x in after]
    leave_together()
    return [x.tolist() for x in losses], ghosts


@pytest.mark.parametrize(("name", "chunks", "ranks"), CASES)
@pytest.mark.parametrize("batches", [0, 1, 11])
def test_evaluation_works_on_every_schedule_for_any_number_of_batches(
    name: str, chunks: int, ranks: int, batches: int
) -> None:
    losses, _ = evaluate("1f1b", 1, batches, False)
    answers = run_ranks(ranks, evaluate, name, chunks, batches, True)
    assert [x for answer in answers for x in answer[0]] == losses
    # Two ghosts of the second and third microbatch of a step, and one for each missing batch.
    for _, ghosts in answers:
        assert set(ghosts.values()) == {2 + batches // 4}


def failing(name: str, chunks: int, fail: tuple[str, int, int], direct: bool) -> tuple[str, str, float, int]:
    if direct:
        pipeline = pipeline_of(name, chunks, 4, comm_here(direct), fail)
        kind, text, notes = attempt(pipeline)
    else:
        kind, text, notes = attempt(pipeline_of(name, chunks, 4, comm_here(direct), fail))
    moment = time.monotonic()
    leave_together(connected=direct)
    return kind, text, moment, notes


def attempt(pipeline: Any) -> tuple[str, str, int]:
    try:
        pipeline.run([Work(microbatch=i, inputs=batch(i)) for i in range(4)], scale=SCALE)
    except (Boom, CommError) as error:
        return type(error).__name__, str(error), len(getattr(error, "__notes__", ()))
    return "nothing", "", 0


FAILURES = [
    ("1f1b", 1, 2, ("F", 0, 0)),
    ("1f1b", 1, 2, ("B", 1, 3)),
    ("gpipe", 1, 4, ("B", 2, 1)),
    ("1f1b", 1, 4, ("F", 3, 2)),
    ("interleaved", 2, 2, ("B", 0, 1)),
    ("zb-v", 2, 4, ("I", 7, 0)),
]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("name", "chunks", "ranks", "fail"), FAILURES)
def test_a_failing_stage_ends_every_rank_with_its_exception(
    name: str, chunks: int, ranks: int, fail: Any, direct: bool
) -> None:
    answers = run_ranks(ranks, failing, name, chunks, fail, direct)
    kinds = [answer[0] for answer in answers]
    assert kinds.count("Boom") == 1 and kinds.count("CommError") == ranks - 1
    rank = kinds.index("Boom")
    for kind, text, moment, notes in answers:
        assert f"{fail[0]} of stage {fail[1]} broke on microbatch {fail[2]}" in text
        assert abs(moment - answers[rank][2]) < 2
        if kind == "CommError":
            assert "error[SR702]" in text and f"rank {rank} failed: Boom: " in text
        else:
            assert notes == 1


def failing_across_axes() -> tuple[str, str, float]:
    """pp 2 x dp 2: rank 3 fails; its dp neighbour waits in an exchange over dp, and so on."""
    everyone = comm_here(True)
    rank = everyone.rank
    dp = axis_comm(everyone, [[0, 1], [2, 3]])
    pp = axis_comm(everyone, [[0, 2], [1, 3]])
    assert dp.link is not None
    pipeline = pipeline_of("1f1b", 1, 2, pp, ("B", 1, 0) if rank == 3 else None)
    for chunk in pipeline.chunks.values():
        chunk.backward_weight = reduce_too(dp, chunk.backward_weight)
    kind, text = "nothing", ""
    try:
        pipeline.run([Work(microbatch=i, inputs=batch(i)) for i in range(2)], scale=1.0)
    except (Boom, CommError) as error:
        kind, text = type(error).__name__, str(error)
    moment = time.monotonic()
    leave_together()
    return kind, text, moment


def reduce_too(dp: Comm, weight: Any) -> Any:
    def both(trail: Any, microbatch: int) -> None:
        weight(trail, microbatch)
        other = 1 - dp.rank
        dp.exchange("reduce", [(other, torch.ones(3))], [(other, torch.empty(3))], tag=1).wait()

    return both


def test_a_failure_reaches_ranks_that_wait_on_another_axis() -> None:
    answers = run_ranks(4, failing_across_axes)
    assert [answer[0] for answer in answers] == ["CommError", "CommError", "CommError", "Boom"]
    for _, text, moment in answers:
        assert "B of stage 1 broke on microbatch 0" in text
        assert abs(moment - answers[3][2]) < 2


def disagree(how: str, direct: bool) -> tuple[str, str]:
    comm = comm_here(direct)
    pipeline = pipeline_of("1f1b", 1, 4, comm)
    odd = comm.rank == 1
    work = [Work(microbatch=i, inputs=batch(i)) for i in range(4)]
    if how == "length" and odd:
        work[2] = Work(microbatch=2, inputs=batch(2, L - 1))
    if how == "microbatch" and odd:
        work[2] = Work(microbatch=9, inputs=batch(2))
    if how == "dtype" and odd:
        pipeline.hidden = Hidden(size=D, dtype=torch.bfloat16)
    kind, text = "nothing", ""
    try:
        pipeline.run(work, scale=SCALE)
    except (InvariantError, CommError) as error:
        kind, text = type(error).__name__, str(error)
    leave_together()
    return kind, text


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    ("how", "sent", "expected"),
    [
        ("length", "microbatch 2: torch.float32 [2, 5, 8]", "microbatch 2: torch.float32 [2, 4, 8]"),
        ("microbatch", "microbatch 2: torch.float32", "microbatch 9: torch.float32"),
        ("dtype", "microbatch 0: torch.float32", "microbatch 0: torch.bfloat16"),
    ],
)
def test_ranks_that_disagree_about_a_microbatch_are_told_which(
    how: str, sent: str, expected: str, direct: bool
) -> None:
    (first, heard), (second, text) = run_ranks(2, disagree, how, direct)
    assert (first, second) == ("CommError", "InvariantError")
    assert f"rank 0 sent the output of stage 0, {sent}" in text
    assert f"rank 1 expected the output of stage 0, {expected}" in text
    assert "rank 1 failed: InvariantError[SR900]: rank 0 sent the output of stage 0" in heard


def letters(direct: bool) -> Any:
    comm = comm_here(direct)
    mail = Mail(comm)
    other = 1 - comm.rank
    if comm.rank == 0:
        kept = []
        for i in range(3):
            x = torch.full((1000, 1000), float(i))
            kept.append(weakref.ref(x))
            mail.send(1, Tag(False, 0, i), x)
            mail.send(1, Tag(True, 0, i), torch.full((2,), 10.0 + i))
            del x
        # Nothing has been asked for yet, and still no send has waited.
        comm.gather_rows("sent", torch.zeros(1))
        comm.gather_rows("the first two are taken", torch.zeros(1))
        mail.send(1, Tag(True, 7, 0), torch.zeros(1))
        gc.collect()
        alive = [ref() is not None for ref in kept]
        comm.gather_rows("the sender has looked", torch.zeros(1))
        mail.finish()
        leave_together()
        return alive, [ref() is not None for ref in kept]
    comm.gather_rows("sent", torch.zeros(1))
    out = [mail.expect(other, Tag(False, 0, i), shape=(1000, 1000), dtype=torch.float32) for i in range(3)]
    back = [mail.expect(other, Tag(True, 0, i), shape=(2,), dtype=torch.float32) for i in range(3)]
    last = mail.expect(other, Tag(True, 7, 0), shape=(1,), dtype=torch.float32)
    # Not in the order of the sends: what is not asked for yet is put aside.
    seen = [float(back[1 - 1].wait()[0]), float(out[0].wait()[0, 0]), float(out[1].wait()[0, 0])]
    comm.gather_rows("the first two are taken", torch.zeros(1))
    comm.gather_rows("the sender has looked", torch.zeros(1))
    seen += [float(b.wait()[0]) for b in back[1:]] + [float(out[2].wait()[0, 0]), float(last.wait())]
    mail.finish()
    leave_together()
    return seen


@pytest.mark.parametrize("direct", [True, False])
def test_a_sent_tensor_is_let_go_when_its_receiver_has_it(direct: bool) -> None:
    (alive, at_last), seen = run_ranks(2, letters, direct)
    assert seen == [10.0, 0.0, 1.0, 11.0, 12.0, 2.0, 0.0]
    # gloo tells only at the end.
    assert alive == ([False, False, True] if direct else [True, True, True])
    assert at_last == [False, False, False]


def test_a_table_that_is_not_this_ranks_is_refused() -> None:
    table = schedule("1f1b", ranks=2, chunks=1, microbatches=2)
    hidden = Hidden(size=D, dtype=torch.float32)
    with pytest.raises(InvariantError, match=r"rank 0 of pipeline 1f1b holds stages \[1\]"):
        Pipeline({1: ToyChunk(1, 2)}, table, None, rank=0, hidden=hidden)  # type: ignore[dict-item]
    with pytest.raises(InvariantError, match="mail: False"):
        Pipeline({0: ToyChunk(0, 2)}, table, None, rank=0, hidden=hidden)  # type: ignore[dict-item]


def test_more_microbatches_than_the_table_has_are_refused() -> None:
    pipeline = pipeline_of("1f1b", 1, 2, comm_here(False))
    with pytest.raises(InvariantError, match="3 microbatches for a table of 2"):
        pipeline.run([Work(microbatch=i, inputs=batch(i)) for i in range(3)], scale=SCALE)


def test_the_hidden_state_is_a_share_of_the_tokens_under_sequence_parallelism() -> None:
    inputs = batch(0)
    assert Hidden(size=D, dtype=torch.float32).shape(inputs) == (B, L, D)
    assert Hidden(size=D, dtype=torch.float32, shards=5).shape(inputs) == (B * L // 5, D)
