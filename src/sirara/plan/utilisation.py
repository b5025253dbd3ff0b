"""Model FLOPs and hardware FLOPs of a step over what the devices could have done."""

import math
from functools import lru_cache

import numpy as np

from sirara.config.schema import RunConfig
from sirara.plan.cost import first_products
from sirara.plan.points import PIECES, Points
from sirara.plan.setting import Setting
from sirara.pure.families import ModelShape, unit_specs


def utilisation(
    config: RunConfig, shape: ModelShape, setting: Setting, point: Points, step_s: float
) -> tuple[float, float, float]:
    """(model FLOPs utilisation with causal attention, the same with the whole square, hardware's), of the peak.

    Model FLOPs: three times forward's (PaLM, arXiv:2204.02311, appendix B, which counts the whole square of scores;
    flash attention computes half).  Hardware FLOPs add the forward that recompute runs again.
    """
    tokens = config.train.global_batch * config.data.seq_len
    seq, width = config.data.seq_len, shape.heads * shape.head_dim
    seen = min(shape.sliding_window or seq, seq)
    matrices = matrices_of(shape)
    head = 2.0 * shape.vocab * shape.hidden
    half = shape.layers * 2.0 * width * (seen if seen < seq else seq + 1)
    whole = shape.layers * 4.0 * width * seen
    blocks = 2.0 * matrices
    peaks, counts = setting.table.peak[:, int(point.dtype[0])], setting.counts or (float(point.gpus[0]),)
    peak = sum(float(p) * n for p, n in zip(peaks, counts, strict=True)) * step_s
    again = (
        1.0
        if config.train.recompute == "full"
        else float(point.recompute_share[0]) * (isinstance(config.train.recompute, int))
    )
    # Of recipes: the share of all blocks that makes each piece again.
    stages = np.array([1.0, max(0.0, float(point.pp[0]) - 2), float(point.pp[0] > 1)])
    pieces = dict(zip(PIECES, stages @ point.again[0] / stages.sum(), strict=True))
    again += pieces["block"]
    parts = pieces["wide"] * float(first_products(point)[0]) * blocks + pieces["attention"] * half
    return (
        tokens * 3 * (blocks + head + half) / peak,
        tokens * 3 * (blocks + head + whole) / peak,
        tokens * (3 * (blocks + head + half) + again * (blocks + half) + parts) / peak,
    )


@lru_cache(maxsize=64)
def matrices_of(shape: ModelShape) -> int:
    """Elements of the matrices of all blocks."""
    return sum(math.prod(t.shape) for u in unit_specs(shape)[1:-1] for t in u.tensors if len(t.shape) > 1)
