"""The bubble of a pipeline as measured, beside the simulator's (pure/simulate.py).

    asleep   chunks that sleep for their cost: the executor, the mail and the table alone, on 2 and 4 ranks, however
             few cores there are; the simulator is told how long a letter takes from one that slept to one that waits
    real     the 28M llama on 2 ranks: each action is timed; the simulator is given the medians per kind and stage

The bubble is the share of all ranks' time, from the common start to the last rank's end, without computation.
"""

import json
import os
import statistics
import time
from collections import defaultdict

from benchmarks.sides import launch

FORWARD_S, INPUT_S, WEIGHT_S = 0.1, 0.1, 0.1
"""Long beside what it takes to wake a sleeping process and to start an action, which is half a millisecond here."""
LETTERS = 15
MICROBATCHES = 8


class Asleep:
    """A chunk as the pipeline sees it, which sleeps where a model would compute."""

    def __init__(self, stage, stages):
        self.stage, self.first, self.last, self.units = stage, stage == 0, stage == stages - 1, {}

    def forward(self, x, inputs, key, scale):
        import torch

        time.sleep(FORWARD_S)
        return None, torch.zeros(1, 1) if self.last else torch.zeros(1, 1, 8)

    def backward(self, trail, dy, microbatch):
        import torch

        time.sleep(INPUT_S + WEIGHT_S)
        return None if self.first else torch.zeros(1, 1, 8)

    def backward_input(self, trail, dy, microbatch):
        import torch

        time.sleep(INPUT_S)
        return None if self.first else torch.zeros(1, 1, 8)

    def backward_weight(self, trail, microbatch):
        time.sleep(WEIGHT_S)


class Timed:
    """A chunk that notes how long each of its actions takes."""

    def __init__(self, chunk, notes):
        self.chunk, self.notes = chunk, notes
        self.stage, self.first, self.last, self.units = chunk.stage, chunk.first, chunk.last, chunk.units

    def _time(self, kind, call, *args):
        began = time.perf_counter()
        result = call(*args)
        self.notes[kind, self.stage].append(time.perf_counter() - began)
        return result

    def forward(self, *args):
        return self._time("F", self.chunk.forward, *args)

    def backward(self, *args):
        return self._time("B", self.chunk.backward, *args)

    def backward_input(self, *args):
        return self._time("I", self.chunk.backward_input, *args)

    def backward_weight(self, *args):
        return self._time("W", self.chunk.backward_weight, *args)


def letter_s(mail, rank):
    """Seconds from sending a letter until the other rank, which waits, has it: ranks 0 and 1, median."""
    import torch

    from sirara.comm.header import Tag

    took = []
    for n in range(LETTERS):
        tag, letter = Tag(False, 0, n), torch.zeros(1, dtype=torch.float64)
        if rank == 0:
            time.sleep(FORWARD_S)
            # One clock for all processes of a machine.
            letter[0] = time.perf_counter()
            mail.send(1, tag, letter)
        elif rank == 1:
            sent = mail.expect(0, tag, shape=letter.shape, dtype=letter.dtype).wait()
            took.append(time.perf_counter() - float(sent[0]))
    mail.finish()
    return statistics.median(took) if took else 0.0


def work(spec):
    """One rank: plays the table some times and reports busy time and makespan."""
    import torch
    import torch.distributed as dist
    from benchmarks.ours import Ours
    from benchmarks.peers import SMALL

    from sirara.comm.mail import Mail
    from sirara.comm.world import World, world_comm
    from sirara.parallel.pipeline import Hidden, Pipeline, Work
    from sirara.parallel.stage import Inputs

    rank, ranks, name = int(os.environ["RANK"]), spec["ranks"], spec["name"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{spec['store']}", rank=rank, world_size=ranks)
    notes = defaultdict(list)
    if spec["asleep"]:
        table = played(name, ranks)
        comm = world_comm(
            World(rank=rank, size=ranks, local_rank=rank, local_size=ranks, node=0), timeout_s=60
        )
        chunks = {s: Timed(Asleep(s, table.stages), notes) for s in table.stages_of(rank)}
        mail = Mail(comm, device=torch.device("cpu"))
        letter = letter_s(mail, rank)
        pipeline = Pipeline(
            chunks,
            table,
            mail,
            rank=rank,
            hidden=Hidden(size=8, dtype=torch.float32),
        )
        nothing = torch.zeros(1, 1, dtype=torch.long)
        inputs = [Inputs(tokens_BL=nothing, targets_BL=nothing, positions_BL=nothing)] * MICROBATCHES

        def run():
            pipeline.run([Work(microbatch=i, inputs=x) for i, x in enumerate(inputs)], scale=1.0)

        def after():
            return
    else:
        from benchmarks.parallel import SPLITS

        letter = 0.0
        side = Ours(
            spec["precision"],
            microbatches=MICROBATCHES,
            micro=1,
            size=SMALL,
            pp=ranks,
            name=name,
            split=SPLITS[name],
        )
        stage = side.stage
        stage.pipeline.chunks = {s: Timed(c, notes) for s, c in stage.pipeline.chunks.items()}
        generator = torch.Generator().manual_seed(0)
        batches = [
            torch.randint(SMALL.vocab, (1, SMALL.seq), generator=generator) for _ in range(MICROBATCHES)
        ]
        inputs = side.inputs_of([(b, b) for b in batches])

        def run():
            side.stepper.accumulate(inputs, valid_targets=MICROBATCHES * SMALL.seq, keys=None)

        def after():
            stage.zero.release(stage.zero.reduce())

    spans, busy, costs = [], [], defaultdict(list)
    for n in range(spec["steps"] + 1):
        notes.clear()
        dist.barrier()
        began = time.perf_counter()
        run()
        spans.append(time.perf_counter() - began)
        after()
        busy.append(sum(sum(v) for v in notes.values()))
        if n:
            for (kind, place), values in notes.items():
                costs[f"{kind}{place}"] += values
    answer = {
        "spans": spans[1:],
        "busy": busy[1:],
        "letter": letter,
        "costs": {key: statistics.median(values) for key, values in costs.items()},
    }
    answers = [None] * ranks
    dist.all_gather_object(answers, answer)
    if rank == 0:
        print("RESULT " + json.dumps(answers), flush=True)
    os._exit(0)


def played(name, ranks):
    """The table as a run plays it: dx is sent before weight gradients are made."""
    from sirara.pure.schedule import chunks_of, schedule, sending_early

    table = schedule(name, ranks=ranks, chunks=chunks_of(name, "auto"), microbatches=MICROBATCHES)
    return sending_early(table)


def simulated(name, ranks, costs, letter):
    """The simulator's result for costs like {"F0": seconds, "B0": ...}; what a table does not use counts nothing."""
    from sirara.pure.simulate import Costs, simulate

    table = played(name, ranks)

    def column(kind):
        return tuple(costs.get(f"{kind}{s}", 0.0) for s in range(table.stages))

    return simulate(
        table,
        Costs(
            forward_s=column("F"),
            backward_s=column("B"),
            input_s=column("I"),
            weight_s=column("W"),
            transfer_s=letter,
        ),
    )


def report(script, steps=3):
    """Prints and returns measured and simulated bubbles."""
    print(
        f"\n{'bubble, 8 microbatches':32} {'measured':>9} {'simulated':>10} {'makespan ms':>12} {'simulated':>10}"
    )
    found = {}
    runs = [
        (f"asleep {name}, {ranks} ranks", {"name": name, "ranks": ranks, "asleep": True})
        for ranks in (2, 4)
        for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
    ]
    runs += [
        (
            f"real {name} {precision}, 2 ranks",
            {"name": name, "ranks": 2, "asleep": False, "precision": precision},
        )
        for precision in ("fp32", "bf16")
        for name in ("1f1b", "interleaved", "zb-v")
    ]
    for label, spec in runs:
        answers = launch(script, {"task": "bubble", "threads": 1, "steps": steps} | spec)
        costs = {key: value for answer in answers for key, value in answer["costs"].items()}
        result = simulated(spec["name"], spec["ranks"], costs, max(a["letter"] for a in answers))
        makespans = [max(step) for step in zip(*(a["spans"] for a in answers), strict=True)]
        shares = [
            1 - sum(busy) / (len(busy) * span)
            for busy, span in zip(zip(*(a["busy"] for a in answers), strict=True), makespans, strict=True)
        ]
        found[label] = {
            "measured": statistics.median(shares),
            "simulated": result.bubble_fraction,
            "makespan_s": statistics.median(makespans),
            "simulated_makespan_s": result.makespan_s,
        }
        row = found[label]
        print(
            f"{label:32} {row['measured']:9.3f} {row['simulated']:10.3f} {1e3 * row['makespan_s']:12.1f}"
            f" {1e3 * row['simulated_makespan_s']:10.1f}",
            flush=True,
        )
    return found
