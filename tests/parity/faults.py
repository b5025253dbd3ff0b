"""Faults of communication, planted into a trainer: what should have come from another rank did not come.

Every exchange still takes place, so that no rank waits for ever; what arrives is thrown away.  A sum then lacks a
term, a gather leaves what was there before.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sirara.comm.group import Comm, Transfer
from sirara.train.own_loop import Trainer

COMMS = ("world", "dp", "tp", "pp", "copies", "ties", "plane")
_KEEPS = re.compile(r"publish |gather \S*/")
"""Where what was there before stays: weights.  Elsewhere a sum lacks a term."""


def kind_of(comm: str, what: str) -> str:
    """An exchange without the name of its group, tensor or microbatch: "dp: reduce"."""
    word = what.split(" ")[0] if "/" in what else re.sub(r"\d+", "n", what)
    return f"{comm}: {word}"


def plant(trainer: Trainer, fault: Mapping[str, Any] | None, kinds: set[str]) -> None:
    """Notes the kinds of exchange in `kinds`, and breaks those that the fault tells.

    fault: {"kind": of `kind_of`, "what": a word in the name, "calls": which of those calls, counted from 0, or None
            for all, "columns": of a gather of rows}.
    """
    for name in COMMS:
        _Broken(name, getattr(trainer.comms, name), fault or {}, kinds)
    mail = trainer.stepper.stage.pipeline.mail
    if mail is not None:
        _break_mail(mail, fault or {}, kinds)


class _Broken:
    """Stands before one communicator."""

    def __init__(self, name: str, comm: Comm, fault: Mapping[str, Any], kinds: set[str]) -> None:
        self.name, self.comm, self.fault, self.kinds, self.calls = name, comm, fault, kinds, 0
        self.exchange, self.gather_rows = comm.exchange, comm.gather_rows
        comm.exchange = self.exchanged  # type: ignore[method-assign]
        comm.gather_rows = self.rows  # type: ignore[method-assign]

    def hit(self, what: str) -> bool:
        self.kinds.add(kind_of(self.name, what))
        return chosen(self, self.fault, kind_of(self.name, what), what)

    def exchanged(
        self,
        what: str,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
        *,
        tag: int,
    ) -> Transfer:
        if not sends and not receives:
            return self.exchange(what, sends, receives, tag=tag)
        if self.hit(what):
            if not _KEEPS.match(what):
                for _, tensor in receives:
                    tensor.zero_()
            receives = [(peer, torch.empty_like(tensor)) for peer, tensor in receives]
        return self.exchange(what, sends, receives, tag=tag)

    def rows(self, what: str, row_N: torch.Tensor) -> torch.Tensor:
        rows = self.gather_rows(what, row_N)
        if self.comm.size > 1 and self.hit(what):
            lost = [rank for rank in range(self.comm.size) if rank != self.fault.get("but", 0)]
            low, high = self.fault.get("columns", (0, rows.shape[1]))
            rows[lost, low:high] = 0
        return rows


class _Counter:
    calls = 0


def _break_mail(mail: Any, fault: Mapping[str, Any], kinds: set[str]) -> None:
    send, counter = mail.send, _Counter()

    def sent(peer: int, tag: Any, tensor: torch.Tensor) -> None:
        kind = f"mail: {'gradient' if tag.gradient else 'output'}"
        kinds.add(kind)
        send(peer, tag, torch.zeros_like(tensor) if chosen(counter, fault, kind, str(tag)) else tensor)

    mail.send = sent


def chosen(counter: Any, fault: Mapping[str, Any], kind: str, what: str) -> bool:
    """Whether this call is one that the fault tells."""
    if fault.get("kind") != kind or not re.search(fault.get("what", ""), what):
        return False
    counter.calls += 1
    calls: Callable[[int], bool] = lambda n: fault.get("calls") is None or n in fault["calls"]  # noqa: E731
    return calls(counter.calls - 1)
