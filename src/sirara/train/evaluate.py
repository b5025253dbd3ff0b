"""Token-weighted evaluation without side effects: sum of token losses / number of target tokens of the whole set.

Never a mean of means: the value does not depend on batch size, padding or the number of ranks.  No parameter, random
stream, counter or data cursor is touched.
"""

from collections.abc import Callable

import torch

from sirara.data.batches import EvalBatches
from sirara.mesh import Mesh
from sirara.parallel.parallelize import Stage
from sirara.train.batch import to_inputs
from sirara.train.step import loss_sum

AT_ONCE = 8
"""Batches that are in a pipeline of several ranks together."""


def evaluate(stage: Stage, batches: EvalBatches, *, mesh: Mesh, alive: Callable[[], object]) -> float:
    """The loss per target token over all of `batches`; batch i is computed by data-parallel rank i mod dp.

    Args:  alive: called after some batches; a large set may take longer than the longest step that a watchdog allows.
    """
    device, dp = stage.zero.device, mesh.coordinate("dp")
    stage.zero.wait_all()
    each, at_once = -(-len(batches) // mesh.dp), AT_ONCE if stage.comms.pp.size > 1 else 1
    rows = torch.zeros(2, each, dtype=torch.float64)
    for low in range(0, each, at_once):
        # Ranks without a batch in the last place take part in ZeRO's moves: None.
        here = [p * mesh.dp + dp for p in range(low, min(each, low + at_once))]
        inputs = [to_inputs(batches.batch(i), device) if i < len(batches) else None for i in here]
        stage.zero.begin(())
        losses = iter(stage.pipeline.evaluate(inputs))
        for place, one in enumerate(inputs, low):
            if one is not None and mesh.coordinate("pp") == stage.loss_rank:
                rows[0, place] = loss_sum(next(losses))
                rows[1, place] = float((one.targets_BL != -100).sum())
        alive()
    gathered = stage.comms.world.gather_rows("evaluate", rows.flatten().to(device)).cpu().view(-1, 2, each)
    # Batch i lies at (rank i mod dp, place i div dp): added in the order of i, whatever dp is.
    speakers = [mesh.rank_at(pp=stage.loss_rank, dp=d) for d in range(mesh.dp)]
    total = 0.0
    for value in gathered[speakers, 0].T.flatten().tolist():
        total += value
    return total / max(1.0, float(gathered[speakers, 1].sum()))
