"""Reports: how the committer knows that all ranks are done, and the manifest that it makes of them.

A report is what one rank says when its bytes are durable; the manifest is the plan, all ranks' hashes and
the training record.
"""

import importlib.metadata
import json
import logging
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from sirara.checkpoint.job import TierResult
from sirara.checkpoint.storage import Disk, names_in, read_file
from sirara.errors import CommTimeout, InvariantError, SiraraError, StorageError
from sirara.pure.manifest import HASH_BYTES, FileEntry, Manifest, Pieces, TensorEntry
from sirara.pure.saveplan import SavePlan

_log = logging.getLogger("sirara")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a rank says when its bytes are durable. `hashes`: 16 bytes per piece, in the order of the plan.
    `digest`: its part of the state digest, where the trainer has not taken it.  `tiers`: what became of it in the
    tiers of its node."""

    uuid: str
    attempt: int
    step: int
    rank: int
    plan: str
    lengths: tuple[int, ...]
    hashes: bytes
    digest: tuple[int, int] = (0, 0)
    tiers: dict[str, TierResult] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        fields = {
            "uuid": self.uuid,
            "attempt": self.attempt,
            "step": self.step,
            "rank": self.rank,
            "plan": self.plan,
            "length": list(self.lengths),
            "hash": self.hashes.hex(),
            "digest": list(self.digest),
            "tiers": {name: asdict(result) for name, result in self.tiers.items()},
        }
        return json.dumps(fields, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_bytes(cls, raw: bytes) -> "Report":
        f = json.loads(raw)
        return cls(
            uuid=f["uuid"],
            attempt=f["attempt"],
            step=f["step"],
            rank=f["rank"],
            plan=f["plan"],
            lengths=tuple(f["length"]),
            hashes=bytes.fromhex(f["hash"]),
            digest=(f["digest"][0], f["digest"][1]),
            tiers={name: TierResult(**result) for name, result in f["tiers"].items()},
        )


def report_name(rank: int) -> str:
    return f"report-{rank}.json"


def failure_name(rank: int | str) -> str:
    return f"failed-{rank}.txt"


def told_failure(temp: Path) -> str:
    """What a rank, or its trainer, has said in the folder of a save about its failure, "" when nobody has."""
    for path in sorted(temp.glob(failure_name("*"))):
        with suppress(OSError):
            rank = path.stem.rpartition("-")[2]
            return f"rank {rank}: {path.read_text(errors='replace')}"
    return ""


def begin_part(disk: Disk, temp: Path, *, rank: int, size: int, alone: bool) -> None:
    """The folder of a save, with room for this rank's `size` bytes and without what an older try has left of them."""
    disk.require(temp.parent, size)
    if alone:
        disk.remove_tree(temp)
    disk.make_folder(temp)
    disk.remove(temp / report_name(rank))


def wait_for_reports(
    plan: SavePlan,
    temp: Path,
    *,
    uuid: str,
    step: int,
    deadline_s: float,
    orphaned: Callable[[], bool] = lambda: False,
    orphan_s: float = 0.0,
) -> dict[int, Report]:
    """The reports of all ranks that have something to write.

    Args:    orphaned: whether the training has ended; from then on it waits for orphan_s at most.
    Raises:  CommTimeout naming the ranks that did not report in time; StorageError when a rank says that it
             failed; InvariantError when one wrote by another plan.
    """
    began = time.monotonic()
    until, patience_s, alone = began + deadline_s, deadline_s, False
    missing = set(plan.writers)
    reports: dict[int, Report] = {}
    while True:
        names = names_in(temp)
        for rank in sorted(missing):
            if failure_name(rank) in names:
                said = read_file(temp / failure_name(rank)).decode(errors="replace")
                raise StorageError(
                    f"rank {rank} could not write its part of step {step}", code="SR603", why=said
                )
            if report_name(rank) in names:
                path = temp / report_name(rank)
                reports[rank] = checked_report(plan, read_file(path), rank, uuid, where=str(path))
        missing -= reports.keys()
        if not missing:
            return reports
        if not alone and orphaned():
            alone, patience_s = True, min(deadline_s, orphan_s)
            until = min(until, time.monotonic() + patience_s)
        if time.monotonic() >= until:
            ranks = ", ".join(map(str, sorted(missing)))
            raise CommTimeout(
                f"the save of step {step} lacks {len(missing)} of {len(plan.writers)} ranks: {ranks}",
                where=str(temp),
                why=f"no report within {patience_s:g} s" + (" of the end of the training" if alone else ""),
                try_="look at the logs of these ranks; committed checkpoints are untouched",
            )
        # Ranks that write equally much end soon after each other.
        time.sleep(min(0.05, 0.001 + (time.monotonic() - began) / 50))


def tell_committer(disk: Disk, temp: Path, rank: int, fault: SiraraError) -> None:
    """Says in the folder of a save that this rank's part failed: the committer need not wait for its deadline."""
    try:
        disk.write_file(temp / failure_name(rank), str(fault).encode(), durable=False)
    except StorageError:
        _log.warning("rank %d could not tell rank 0 that its part of the save failed", rank)


def checked_report(plan: SavePlan, raw: bytes, rank: int, uuid: str, *, where: str) -> Report:
    """The report of a rank. Raises InvariantError when it is of another save, or by another plan."""
    report = Report.from_bytes(raw)
    lengths = tuple(plan.columns.length[plan.indices_of(rank)].tolist())
    if (report.uuid, report.rank, report.plan, report.lengths) != (uuid, rank, plan.digest, lengths):
        raise InvariantError(
            f"rank {rank} saved by another plan than rank 0",
            where=where,
            why=f"its plan is {report.plan}, ours {plan.digest}; its uuid {report.uuid}, ours {uuid}",
        )
    return report


def assemble(
    plan: SavePlan,
    reports: Mapping[int, Report],
    extras: Sequence[FileEntry],
    *,
    uuid: str,
    run: str,
    attempt: int,
    step: int,
    record: dict[str, Any],
    aliases: dict[str, str],
) -> Manifest:
    """The manifest of a save whose ranks have all reported. extras: the small files beside the tensors."""
    files = [
        FileEntry(name=f.name, size=f.size, head=f.header_bytes, hash=_hash(f.header(uuid=uuid, step=step)))
        for f in plan.files
    ]
    c = plan.columns
    hashes = np.zeros((len(c), HASH_BYTES), np.uint8)
    for rank, report in reports.items():
        hashes[plan.indices_of(rank)] = np.frombuffer(report.hashes, np.uint8).reshape(-1, HASH_BYTES)
    return Manifest(
        uuid=uuid,
        run=run,
        step=step,
        tokens=int(record.get("tokens", 0)),
        attempt=attempt,
        layout=record.get("layout", {}),
        versions=software_versions(),
        aliases=aliases,
        record=record,
        files=(*files, *extras),
        tensors=tuple(TensorEntry(name=t.name, dtype=t.dtype, shape=t.shape) for t in plan.tensors),
        pieces=Pieces(
            tensor=c.at.tensor,
            offset=c.at.offset,
            size=c.at.size,
            file=c.file,
            position=c.position,
            length=c.length,
            hashes=hashes.tobytes(),
        ),
    )


def software_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("sirara", "torch", "numpy", "safetensors"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


def _hash(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)
