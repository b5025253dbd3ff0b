"""Legal layouts as columns are those that a configuration may have."""

from itertools import product

import numpy as np
import pytest

from sirara.config.check import check_layout
from sirara.config.schema import RunConfig
from sirara.errors import ConfigError
from sirara.plan.exact import configured
from sirara.plan.from_config import SELECTIVE, block_depth, model_columns
from sirara.plan.hardware import find
from sirara.plan.layouts import (
    NOTHING,
    Reason,
    Space,
    divisors,
    inner,
    legal,
    outers,
    overrides_of,
    runnable_space,
    whole_space,
)
from sirara.plan.points import Recompute
from sirara.pure.shape import ModelShape
from sirara.pure.tree import deal

FULL = int(Recompute.FULL)
SHAPE = ModelShape(family="llama", layers=4, hidden=96, heads=12, kv_heads=4, ffn=96, vocab=100, max_seq=18)


def config(**train) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {
                "family": "llama", "layers": 4, "hidden": 96, "heads": 12, "kv_heads": 4, "ffn": 96, "vocab": 100,
                "max_seq": 18,
            },
            "data": {"train": [{"path": "none"}], "seq_len": 18},
            "train": {"steps": 1, "global_batch": 12, "micro_batch": 1, "precision": "bf16", **train},
        }
    )  # fmt: skip


@pytest.mark.parametrize("compiled", [False, True])
def test_a_layout_is_legal_when_its_configuration_is(compiled):
    base = config(compile=compiled)
    space = Space(
        gpus=24,
        pp=(1, 2, 3, 6, 12),
        tp=(1, 2, 3, 4, 6, 8, 12, 24),
        zero=(0, 1, 2, 3),
        schedules=(("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)),
        micro_batch=(1, 2, 5),
        recompute=((0, 1.0), (SELECTIVE, 1.0), (FULL, 1.0)),
        sequence_parallel=(0, 1),
    )
    inside, model, both = inner(space), model_columns(base, SHAPE), {True: 0, False: 0}
    for outer in outers(space):
        columns = {**inside.columns, **{k: getattr(outer, k) for k in ("pp", "tp", "cp", "ep", "dp")}}
        found = legal(columns, model, domain=64, compiled=compiled)
        for i in range(0, len(inside), 7):
            words = overrides_of(space, outer, inside, i, layers=SHAPE.layers, block=None)
            try:
                check_layout(configured(base, tuple(words)), SHAPE)
                allowed = True
            except ConfigError:
                allowed = False
            reason = Reason(int(found[i]))
            # Rules of taste: what is the same twice, or leaves ranks idle, is left out though it may be asked for.
            if reason in (Reason.ZERO_ALONE, Reason.SCHEDULE_ALONE, Reason.IDLE_RANKS):
                continue
            assert (reason is Reason.LEGAL) == allowed, (words, reason)
            both[allowed] += 1
    assert both[True] > 50 and both[False] > 50


def test_auto_blocks_are_those_of_the_executor():
    cases = list(product(range(1, 70), (1, 2, 3, 4, 7, 8, 16), (1, 3)))
    batch, dp, zero = (np.array(c) for c in zip(*cases, strict=True))
    k = block_depth({"global_batch": batch, "micro_batch": 1, "dp": dp, "zero": zero})
    expected = [deal(b, d, max_k=0 if z >= 2 else 3).k for b, d, z in cases]
    assert k.tolist() == expected


def test_degrees_multiply_to_the_devices():
    space = whole_space(config(), SHAPE, find("h100-sxm"), 48)
    for outer in outers(space):
        assert outer.pp * outer.tp * outer.cp * outer.dp == 48
    assert divisors(48) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 48)


def test_what_a_run_may_choose_leaves_alone_what_its_numbers_hang_on():
    space = runnable_space(config(micro_batch=2, recompute="full"), SHAPE, find("h100-sxm"), 8)
    assert space.micro_batch == (2,) and space.precision == ("bf16",) and space.recompute == ((FULL, 1.0),)
    assert space.cp == (1,) and space.ep == (1,) and space.offload == (NOTHING,)


def test_eight_bit_products_are_tried_only_where_the_device_has_them():
    assert whole_space(config(), SHAPE, find("h100-sxm"), 8).precision == ("bf16", "fp8")
    assert whole_space(config(), SHAPE, find("a100-80gb"), 8).precision == ("bf16",)


def test_a_share_of_the_blocks_is_a_whole_number_of_each_virtual_stage():
    base = config()
    space = Space(
        gpus=1, pp=(1,), tp=(1,), zero=(0,), schedules=(("1f1b", 1),), sequence_parallel=(0,),
        recompute=((FULL, 0.25), (FULL, 0.5), (FULL, 1.0)),
    )  # fmt: skip
    inside, outer = inner(space), outers(space)[0]
    words = [overrides_of(space, outer, inside, i, layers=SHAPE.layers, block=None)[2] for i in range(3)]
    assert words == ["train.recompute=1", "train.recompute=2", "train.recompute=full"]
    halved = {**inside.columns, "pp": 2, "tp": 1, "cp": 1, "ep": 1, "dp": 1}
    found = legal(halved, model_columns(base, SHAPE), domain=8)
    assert [Reason(int(r)) for r in found] == [Reason.SHARE, Reason.LEGAL, Reason.LEGAL]
