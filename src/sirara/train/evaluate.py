"""Token-weighted evaluation without side effects: sum of token losses / number of target tokens of the whole set.

Never a mean of means: the value does not depend on batch size, padding or the number of ranks.  No parameter, random
stream, counter or data cursor is touched.
"""

from collections.abc import Callable

import torch

from sirara.comm.group import Comm
from sirara.data.batches import EvalBatches
from sirara.parallel.stage import Stage
from sirara.train.batch import to_inputs
from sirara.train.step import loss_sum


def evaluate(stage: Stage, batches: EvalBatches, *, comm: Comm, alive: Callable[[], object]) -> float:
    """The loss per target token over all of `batches`; batch i is computed by rank i mod dp.

    Args:  alive: called after each batch; a large set may take longer than the longest step that a watchdog allows.
    """
    device = stage.zero.pool.device
    stage.zero.wait_all()
    each = -(-len(batches) // comm.size)
    rows = torch.zeros(2, each, dtype=torch.float64)
    for place, i in enumerate(range(comm.rank, len(batches), comm.size)):
        inputs = to_inputs(batches.batch(i), device)
        rows[0, place] = loss_sum(stage.evaluate(inputs))
        rows[1, place] = float((inputs.targets_BL != -100).sum())
        alive()
    gathered = comm.gather_rows("evaluate", rows.flatten().to(device)).cpu().view(comm.size, 2, each)
    # Batch i lies at (rank i mod dp, place i div dp): added in the order of i, whatever dp is.
    losses = gathered[:, 0].T.flatten().tolist()
    total = 0.0
    for value in losses:
        total += value
    return total / max(1.0, float(gathered[:, 1].sum()))
