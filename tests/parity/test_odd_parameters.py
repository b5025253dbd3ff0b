"""Parameters that are not like the others: frozen, unused, empty, of another dtype, not divisible by the ranks.

A model of plain torch has one of each in every block; each ZeRO stage and pipeline has the bits of one process, which
itself equals torch's autograd and AdamW on the whole batch.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sirara.checkpoint.manager import CheckpointManager
from sirara.parallel.stage import Inputs
from sirara.pure.families import UnitSpec, init_slice
from sirara.train.optim import make_optimizer
from sirara.train.state import Counters, TrainState
from sirara.train.step import Step
from tests.checkpoints import restore
from tests.harness import run_ranks
from tests.ranks.test_step import B, batch
from tests.toy import HIDDEN, LENGTH, Embed, Head, assemble, tensor
from tests.toy import specs as toy_specs

BLOCKS, STEPS, MICROBATCHES, SEED = 4, 3, 7, 7
GAINS = (1023, 1024, 1025, HIDDEN + 1)
"""Sizes that fill a grain to the last element but one, to the last, and beyond: a gain has a flat group of its own."""


class Block(nn.Module):
    def __init__(self, gains: int):
        super().__init__()
        self.mix = nn.Linear(HIDDEN, HIDDEN, device="meta")
        self.gain = nn.Parameter(torch.empty(gains, device="meta"))
        self.empty = nn.Parameter(torch.empty(0, HIDDEN, device="meta"))
        self.unused = nn.Parameter(torch.empty(3, device="meta"))

    def forward(self, x_BLD, positions_BL, documents_BL, key):
        gain = self.gain.to(x_BLD.dtype)
        mixed = torch.tanh(self.mix(x_BLD)).cumsum(dim=1) / (1 + positions_BL[..., None])
        return x_BLD * gain[-1] + mixed * gain[:HIDDEN] + self.empty.sum().to(x_BLD.dtype)


class Odd:
    def __init__(self):
        self._units = [Embed(), *(Block(gains) for gains in GAINS), Head()]

    def units(self):
        return self._units


def table(*, tied: bool, other: str | None) -> tuple[UnitSpec, ...]:
    """other: dtype of the gains, if not the model's."""

    embed, *_, head = toy_specs(tied=tied)
    blocks = [
        UnitSpec(
            name=f"block.{i}",
            flops_per_token=0,
            tensors=(
                tensor(f"b{i}.mix.weight", "mix.weight", (HIDDEN, HIDDEN)),
                tensor(f"b{i}.mix.bias", "mix.bias", (HIDDEN,)),
                tensor(f"b{i}.gain", "gain", (GAINS[i],), kind="ones", dtype=other),
                tensor(f"b{i}.empty", "empty", (0, HIDDEN)),
                tensor(f"b{i}.unused", "unused", (3,)),
            ),
        )
        for i in range(BLOCKS)
    ]
    return (embed, *blocks, head)


FROZEN = {
    "nothing": (),
    "some of a block": ("b1.mix.weight", "b2.gain", "b2.unused"),
    "the embedding": ("embed",),
    "a block": tuple(f"b1.{name}" for name in ("mix.weight", "mix.bias", "gain", "empty", "unused")),
    "all but the last block": (
        "embed",
        *(f"b{i}.{n}" for i in range(3) for n in ("mix.weight", "mix.bias", "gain", "empty", "unused")),
    ),
}


def train(
    zero: int = 0,
    pp: int = 1,
    schedule: str = "1f1b",
    precision: str = "fp64",
    tied: bool = True,
    frozen: str = "nothing",
    looks: int = 0,
    layout: dict[str, Any] | None = None,
    parts: bool = False,
    other: str | None = "F32",
) -> list[Any]:
    """Losses, norms and the digest, or in one process with `parts` the weights themselves.

    looks: evaluations before every step.
    """
    stage, mesh, dealt = assemble(
        zero=zero, microbatches=MICROBATCHES, precision=precision, pp=pp, schedule=schedule, frozen=FROZEN[frozen],
        model=Odd(), table=table(tied=tied, other=other), seed=SEED, **(layout or {}),
    )  # fmt: skip
    optim = make_optimizer(name="adamw", betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    state = TrainState(stage=stage, mesh=mesh, state_names=optim.states_of, counters=Counters())
    state.reset_optimizer()
    step = Step(stage=stage, mesh=mesh, deal=dealt, optimizer=optim, clip=None)
    out: list[Any] = []
    mine = dealt.mine(mesh.coordinate("dp"))
    for n in range(STEPS):
        for look in range(looks):
            # The first data-parallel rank has a batch more than the others.
            more = [batch(100 + look, 0), batch(100 + look, 1) if mesh.coordinate("dp") == 0 else None]
            stage.zero.begin(())
            stage.pipeline.evaluate(more)
        valid = sum(int((batch(n, i).targets_BL != -100).sum()) for i in range(MICROBATCHES))
        losses = step.accumulate({i: batch(n, i) for i in mine}, valid_targets=valid, keys=None)
        result = step.finish(losses, valid_targets=valid, lr=1e-2, update=n + 1, request=0)
        out.append((result.loss.hex(), result.grad_norm.hex(), result.bad_parameter))
    state.check_replicas()
    out.append(str(state.digest()))
    if parts:
        out.append({r.tensor: r.data.clone().view(r.shape) for r in state.ranges()})
    return out


@lru_cache
def one_process(precision: str, tied: bool, frozen: str) -> list[Any]:
    return train(precision=precision, tied=tied, frozen=frozen)


LAYOUTS = [
    # ranks, ZeRO stage, pp, schedule, other choices
    (2, 0, 1, "1f1b", {}),
    (3, 1, 1, "gpipe", {}),
    (4, 2, 1, "1f1b", {"block": 1}),
    (3, 3, 1, "zb-h1", {}),
    (4, 3, 2, "1f1b", {"keep": True}),
    (4, 1, 2, "zb-v", {}),
    (2, 2, 2, "interleaved", {"recompute": "full"}),
    (4, 0, 4, "1f1b", {}),
    (4, 3, 4, "zb-h1", {"recompute": 1}),
    (4, 0, 2, "gpipe", {}),
]


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_odd_parameters_have_the_bits_of_one_process_in_every_layout(frozen: str, tied: bool) -> None:
    # Each layout sees each kind of freezing once, with weights tied or not.
    turn = list(FROZEN).index(frozen) + tied
    for n, (ranks, zero, pp, schedule, layout) in list(enumerate(LAYOUTS))[turn % 2 :: 2]:
        precision = ("fp64", "bf16", "fp32")[n % 3]
        args = (zero, pp, schedule, precision, tied, frozen, n % 3, layout)
        for values in run_ranks(ranks, train, *args):
            assert values == one_process(precision, tied, frozen), (ranks, *args)


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_one_process_equals_torch(frozen: str, tied: bool) -> None:
    *steps, _, ours = train(precision="fp64", tied=tied, frozen=frozen, parts=True, other=None)
    losses, norms, theirs = in_torch(tied, frozen)
    for (loss, norm, _), a, b in zip(steps, losses, norms, strict=True):
        assert float.fromhex(loss) == pytest.approx(a, rel=1e-12)
        assert float.fromhex(norm) == pytest.approx(b, rel=1e-12)
    for name, weights in theirs.items():
        if weights.numel():
            torch.testing.assert_close(ours[name], weights, rtol=0, atol=1e-11)


def in_torch(tied: bool, frozen: str) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """The same training with nothing but torch: one batch, autograd, AdamW."""
    weights: dict[str, nn.Parameter] = {}
    units = Odd().units()
    specs = table(tied=tied, other=None)
    for unit, spec in zip(units, specs, strict=True):
        for t in spec.tensors:
            n = int(torch.Size(t.shape).numel())
            if t.tied_to is None:
                values = torch.from_numpy(init_slice(t, SEED, 0, n)).double().view(t.shape)
                weights[t.name] = nn.Parameter(values, requires_grad=t.name not in FROZEN[frozen])
            owner, _, local = t.local.rpartition(".")
            setattr(unit.get_submodule(owner), local, weights[t.tied_to or t.name])
    decay = {t.name: t.decay for spec in specs for t in spec.tensors if t.tied_to is None}
    trained = {name: w for name, w in weights.items() if w.requires_grad}
    optimizer = torch.optim.AdamW(
        [{"params": [w], "weight_decay": 0.1 if decay[name] else 0.0} for name, w in trained.items()],
        lr=1e-2, betas=(0.9, 0.95), eps=1e-8,
    )  # fmt: skip
    losses, norms = [], []
    for n in range(STEPS):
        batches = [batch(n, i) for i in range(MICROBATCHES)]
        tokens, targets = (torch.cat([getattr(b, k) for b in batches]) for k in ("tokens_BL", "targets_BL"))
        inputs = Inputs(
            tokens_BL=tokens,
            targets_BL=targets,
            positions_BL=torch.arange(LENGTH).expand(B * MICROBATCHES, LENGTH),
        )
        x = units[0](inputs.tokens_BL, inputs.positions_BL, None)
        for unit in units[1:-1]:
            x = unit(x, inputs.positions_BL, None, None)
        objective, _ = units[-1](x, inputs.targets_BL, 1.0 / int((targets != -100).sum()))
        optimizer.zero_grad()
        objective.backward()
        for w in trained.values():
            if w.grad is None:
                w.grad = torch.zeros_like(w)
        losses.append(objective.item())
        norms.append(float(torch.cat([w.grad.flatten() for w in trained.values()]).norm()))
        optimizer.step()
    return losses, norms, {name: w.detach() for name, w in weights.items()}


# ------------------------------------------------------------ through a checkpoint


def saved(folder: str, zero: int, pp: int, resume: bool) -> tuple[str, str]:
    """Saves or loads odd parameters on the ranks of the current group: (digest, digest after another seed's values)."""
    seed = SEED + 1 if resume else SEED
    stage, mesh, _ = assemble(
        zero=zero, microbatches=MICROBATCHES, precision="bf16", pp=pp, frozen=FROZEN["some of a block"],
        model=Odd(), table=table(tied=True, other="F32"), seed=seed,
    )  # fmt: skip
    optim = make_optimizer(name="adamw", betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    state = TrainState(stage=stage, mesh=mesh, state_names=optim.states_of, counters=Counters())
    state.reset_optimizer()
    manager = CheckpointManager(
        Path(folder), run="odd", rank=mesh.rank, world=mesh.world, node=0, attempt=0, keep_last=2, keep_every=None,
        ranks_per_node=mesh.world, fence=lambda: None, deadline_s=20,
    )  # fmt: skip
    before = str(state.digest())
    if resume:
        restored = restore(manager, state.load)
        assert restored is not None
        state.complete()
    else:
        aliases = {
            t.name: t.tied_to for unit in table(tied=True, other=None) for t in unit.tensors if t.tied_to
        }
        manager.save(
            1, plan=state.plan(), ranges=state.ranges(), record=state.record(), hf_files={}, aliases=aliases
        )
    if dist.is_initialized():
        dist.barrier()
    return str(state.digest()), before


def test_odd_parameters_move_through_a_checkpoint_to_other_layouts(tmp_path: Path) -> None:
    wrote = run_ranks(3, saved, str(tmp_path), 3, 1, False)
    assert len(set(wrote)) == 1
    for ranks, zero, pp in ((4, 0, 2), (2, 3, 2), (4, 2, 4)):
        for now, before in run_ranks(ranks, saved, str(tmp_path), zero, pp, True):
            assert now == wrote[0][0] != before
