"""Host time per block under tensor parallelism: what Python and the dispatcher cost where the device would be fast.

Forward and backward of a llama whose matrices are tiny, on torch's fake process group (communication returns at
once), with L and with 3L blocks; the difference over 2L blocks is the host time of one block.  Processor time of the
one thread is counted, so that other processes on the machine disturb little.
"""

import json
import os
import statistics
import time

from benchmarks.sides import launch

FEW, MANY, STEPS = 4, 12, 20


def work(spec):
    """One process that believes to be rank 0 of `degree` ranks."""
    import torch
    import torch.distributed as dist
    from benchmarks.ours import Ours
    from benchmarks.peers import Size, seeded_llama
    from benchmarks.peers_torch import tensor_parallel
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import loss_parallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    degree, sequence = spec["degree"], spec["sequence"]
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=degree)
    tokens = torch.zeros(1, 16, dtype=torch.long)
    out = {}
    for kind in ("ours", "dtensor"):
        took = {}
        for layers in (FEW, MANY):
            size = Size(layers=layers, hidden=64, heads=8, ffn=128, vocab=64, seq=16)
            if kind == "ours":
                side = Ours("fp32", microbatches=1, micro=1, size=size, zero=0, tp=degree, sequence=sequence)
                inputs = side.inputs_of([(tokens, tokens)])

                def run(side=side, inputs=inputs):
                    side.stepper.accumulate(inputs, valid_targets=16, keys=None)
                    side.stage.zero.release(side.stage.zero.reduce())
            else:
                mesh = init_device_mesh("cpu", (degree,))
                model = tensor_parallel(seeded_llama(size), mesh, sequence)

                def run(model=model):
                    with loss_parallel():
                        model(tokens, tokens).backward()
                    model.zero_grad(set_to_none=True)

            times = []
            for n in range(STEPS + 5):
                began = time.process_time()
                run()
                if n >= 5:
                    times.append(time.process_time() - began)
            took[layers] = statistics.median(times)
        out[kind] = (took[MANY] - took[FEW]) / (MANY - FEW) * 1e6
    print("RESULT " + json.dumps(out), flush=True)
    os._exit(0)


def report(script):
    """Prints and returns microseconds per block, forward and backward."""
    print(f"\n{'host microseconds per block':34} {'ours':>8} {'DTensor':>8} {'ratio':>6}")
    found = {}
    for degree in (2, 8):
        for sequence in (False, True):
            name = f"tp={degree}{' with sequence parallelism' if sequence else ''}"
            spec = {"task": "host", "ranks": 1, "threads": 1, "degree": degree, "sequence": sequence}
            got = found[name] = launch(script, spec)
            print(
                f"{name:34} {got['ours']:8.0f} {got['dtensor']:8.0f} {got['dtensor'] / got['ours']:6.1f}",
                flush=True,
            )
    return found
