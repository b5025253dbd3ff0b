"""What ranks tell each other beside the training: rows of bytes and lines of text, by rank.  Collective."""

from dataclasses import dataclass

import torch

from sirara.comm.group import Comm

_TEXT_BYTES = 400


@dataclass(frozen=True, slots=True)
class Voices:
    comm: Comm
    device: torch.device

    def rows(self, row: bytes) -> list[bytes]:
        """What every rank says; all rows have the same length."""
        return self._gathered("agree on the save", row)

    def texts(self, text: str) -> list[str]:
        """What every rank says, cut after 400 bytes."""
        rows = self._gathered(
            "agree on the checkpoint", text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        )
        return [row.rstrip(b"\0").decode(errors="replace") for row in rows]

    def first_fault(self, fault: str) -> str:
        """The fault of the first rank that has one: all ranks take the same step."""
        return next((f"rank {rank}: {text}" for rank, text in enumerate(self.texts(fault)) if text), "")

    def _gathered(self, what: str, row: bytes) -> list[bytes]:
        tensor = torch.frombuffer(bytearray(row), dtype=torch.uint8).to(self.device)
        return [bytes(r.tolist()) for r in self.comm.gather_rows(what, tensor).cpu()]
