"""Which process this is, and joining and leaving the others."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from sirara.comm.alarm import Alarm
from sirara.comm.direct import open_direct_link
from sirara.comm.group import Comm
from sirara.errors import CommError, ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process among all processes of the attempt, as the launcher's environment tells it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int

    @staticmethod
    def from_environment() -> "World":
        """What torchrun (RANK, WORLD_SIZE, ...) or Slurm (SLURM_*) say; one process alone without them."""
        env = os.environ

        def number(default: int, *names: str) -> int:
            for name in names:
                if name in env:
                    try:
                        return int(env[name])
                    except ValueError as error:
                        raise ConfigError(
                            f"environment variable {name}={env[name]!r} is no number"
                        ) from error
            return default

        size = number(1, "WORLD_SIZE", "SLURM_NTASKS") if "RANK" in env or "SLURM_PROCID" in env else 1
        return World(
            rank=number(0, "RANK", "SLURM_PROCID"),
            size=size,
            local_rank=number(0, "LOCAL_RANK", "SLURM_LOCALID"),
            local_size=number(size, "LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"),
            node=number(0, "GROUP_RANK", "SLURM_NODEID"),
        )


def connect(world: World, *, backend: str, timeout_s: float) -> None:
    """Joins the default group of all ranks; one process alone needs none."""
    if world.size > 1 and not dist.is_initialized():
        try:
            dist.init_process_group(
                backend, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=timeout_s)
            )
        except (RuntimeError, ValueError) as error:
            raise CommError(
                f"rank {world.rank} could not join the group of {world.size} processes",
                why=str(error),
                try_=["check MASTER_ADDR and MASTER_PORT", "look for a rank that did not start"],
            ) from error


def disconnect() -> None:
    """Leaves the default group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def world_comm(world: World, *, timeout_s: float, direct: bool = True) -> Comm:
    """The group of all ranks, with the alarm that tells of failures on other ranks.

    Args:  direct: let ranks of one machine read each other's memory where the system allows it (comm/direct.py).
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    comm = Comm(range(world.size), world.rank, group=group, timeout_s=timeout_s)
    if dist.is_initialized():
        comm.alarm = Alarm(dist.distributed_c10d._get_default_store(), world.rank, world.size)
    return _joined(comm, direct)


def axis_comm(everyone: Comm, groups: Sequence[Sequence[int]], *, direct: bool = True) -> Comm:
    """The one of `groups` that holds this rank.  Collective: every rank calls it with the same groups, all of them.

    groups: disjoint, together all ranks.
    """
    mine, rank = None, everyone.rank
    for ranks in groups:
        group = None
        if len(ranks) == everyone.size and everyone.size > 1:
            group = everyone.group
        elif len(ranks) > 1:
            made = dist.new_group(list(ranks), timeout=timedelta(seconds=everyone.timeout_s))
            group = made if isinstance(made, dist.ProcessGroup) else None
        if rank in ranks:
            mine = Comm(ranks, rank, group=group, timeout_s=everyone.timeout_s)
    if mine is None:
        raise CommError(f"rank {rank} is in none of the groups {[list(r) for r in groups]}")
    mine.alarm = everyone.alarm
    return _joined(mine, direct)


def _joined(comm: Comm, direct: bool) -> Comm:
    """The group with its faster link, or with its connections made.  Collective."""
    gloo = comm.size > 1 and dist.get_backend() == "gloo"
    if direct and gloo:
        comm.link = open_direct_link(comm)
    if comm.size > 1 and comm.link is None:
        # NCCL connects a group at its first call and waits for all of it there, even if only two ranks exchange
        # something: tied weights of the first and the last stage, a matrix and its owner.
        comm.gather_rows("meet", torch.zeros(1, device="cuda" if dist.get_backend() == "nccl" else "cpu"))
    return comm


AXIS_OF = {"dp": "dp", "tp": "tp", "pp": "pp", "copies": "tp", "ties": "pp", "plane": "plane"}
"""Whose ranks each communicator of `Comms` joins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comms:
    """This rank's groups, one per purpose: exchanges of one purpose never meet those of another.

    dp, tp, pp: the ranks that differ on that axis alone; `copies` are the tp ranks again, for gradients of replicated
    weights, `ties` the pp ranks again, for weights that two stages use; `plane` are all ranks of a pipeline stage.
    """

    world: Comm
    dp: Comm
    tp: Comm
    pp: Comm
    copies: Comm
    ties: Comm
    plane: Comm


def connect_axes(
    world: World,
    groups: Mapping[str, Sequence[Sequence[int]]],
    *,
    timeout_s: float,
    direct: bool = True,
) -> Comms:
    """All groups of one attempt, made once.  Collective.

    groups: per axis ("dp", "tp", "pp"), and for "plane", all sets of ranks, the same on every rank.
    """
    everyone = world_comm(world, timeout_s=timeout_s, direct=direct)
    return Comms(
        world=everyone,
        **{name: axis_comm(everyone, groups[axis], direct=direct) for name, axis in AXIS_OF.items()},
    )
