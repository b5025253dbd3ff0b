"""What a trainer tells its keeper, and what it hears back: plain data, one JSON line each.

    trainer ── KeeperSettings, once ──►  keeper        the plan lies in a file beside the arenas
            ◄── Hello (its address), or why it cannot start ──
            ── SaveJob, one at a time ─►
            ◄── JobEnd ───────────────
            ◄── UploadEnd, later, when the save goes to the object store as well

Errors travel as their fields and are raised again with their own words, so no class is ever unpickled.
"""

import base64
import json
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from sirara import errors
from sirara.errors import InvariantError, SiraraError

# What an error becomes whose class the receiver does not know.
_UNKNOWN = InvariantError


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperSettings:
    """What a keeper is told once.

    folder: <run>/checkpoints.  run_folder: the run whose ownership is asked before a commit, None outside of one.
    plan: file with the save plan.  memory: this run's folder in the node's shared memory.
    tiers: the configured tiers as plain JSON.  token: what keepers of one run prove to each other.
    host: where keepers of other nodes reach this one.
    """

    folder: str
    run: str
    run_folder: str | None
    rank: int
    world: int
    node: int
    ranks_per_node: int
    attempt: int
    plan: str
    memory: str
    keep_last: int
    keep_every: int | None
    keep_best: str | None = None
    tiers: list[dict[str, Any]] = field(default_factory=list)
    token: str = ""
    host: str = "127.0.0.1"
    nice: int = 19

    def to_line(self) -> bytes:
        return _line({"kind": "settings", **asdict(self)})

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> "KeeperSettings":
        return KeeperSettings(**{k: v for k, v in fields.items() if k != "kind"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The keeper is ready; address: where keepers of other nodes find it ("" without node tiers)."""

    pid: int
    address: str = ""

    def to_line(self) -> bytes:
        return _line({"kind": "hello", **asdict(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    """One save of one rank.

    arena: file that holds its image.  tiers: those that are due.  deadline_s: how long the committer waits for the
    other ranks.  ended: uuids of this attempt's saves that are over, whose leftovers may go.
    addresses: of all ranks' keepers.  The rest is needed by rank 0 alone: record (without the state digest, which is
    taken from the reports), hf_files, aliases; scores: keep_best's metric by step.  patient: somebody waits for
    this save.
    """

    step: int
    uuid: str
    attempt: int
    arena: str
    tiers: tuple[str, ...]
    deadline_s: float
    ended: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    record: dict[str, Any] = field(default_factory=dict)
    hf_files: dict[str, bytes] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)
    patient: bool = False

    def to_line(self) -> bytes:
        fields = {
            **asdict(self),
            "hf_files": {name: base64.b64encode(data).decode() for name, data in self.hf_files.items()},
        }
        return _line({"kind": "save", **fields})

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> "SaveJob":
        return SaveJob(
            step=fields["step"],
            uuid=fields["uuid"],
            attempt=fields["attempt"],
            arena=fields["arena"],
            tiers=tuple(fields["tiers"]),
            deadline_s=fields["deadline_s"],
            ended=tuple(fields["ended"]),
            addresses=tuple(fields["addresses"]),
            record=fields["record"],
            hf_files={name: base64.b64decode(text) for name, text in fields["hf_files"].items()},
            aliases=fields["aliases"],
            scores={int(step): value for step, value in fields["scores"].items()},
            patient=fields["patient"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TierResult:
    """What became of one save in one tier: fault is "" when it is kept there."""

    ok: bool
    fault: str = ""
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """How a job ended on one rank; rank 0 speaks for the whole save.

    fault: None when the save is kept (rank 0: committed).  digest: of the whole state on rank 0, of this rank's pieces
    elsewhere.  path: the committed step folder, "" without one.  tiers: rank 0: joint over all ranks.
    seconds: by phase (hash, write, commit, verify, ...).
    """

    step: int
    uuid: str
    digest: str = ""
    path: str = ""
    total_bytes: int = 0
    tiers: dict[str, TierResult] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    fault: SiraraError | None = None

    def to_line(self) -> bytes:
        fields = {
            name: getattr(self, name) for name in ("step", "uuid", "digest", "path", "total_bytes", "seconds")
        }
        tiers = {name: asdict(result) for name, result in self.tiers.items()}
        fault = None if self.fault is None else fault_fields(self.fault)
        return _line({"kind": "end", **fields, "tiers": tiers, "fault": fault})

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> "JobEnd":
        return JobEnd(
            step=fields["step"],
            uuid=fields["uuid"],
            digest=fields["digest"],
            path=fields["path"],
            total_bytes=fields["total_bytes"],
            tiers={name: TierResult(**result) for name, result in fields["tiers"].items()},
            seconds=fields["seconds"],
            fault=None if fields["fault"] is None else fault_from(fields["fault"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadEnd:
    """How the upload of a committed save ended on one rank; rank 0 speaks for the whole save."""

    step: int
    uuid: str
    result: TierResult

    def to_line(self) -> bytes:
        return _line({"kind": "upload", **asdict(self)})

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> "UploadEnd":
        return UploadEnd(step=fields["step"], uuid=fields["uuid"], result=TierResult(**fields["result"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOutcome:
    """How a save ended, or why it did not begin.

    kind: "saved" | "failed" | "skipped" | "queued" (why says what kept it) | "uploaded" (an earlier saved one; tiers
    says whether it is in the object store).  fault: why it failed.  in_a_row: failures so far.  tiers: of a kept one,
    which hold it and which do not.  seconds: stall (the training waited), hash, write, commit, verify.
    untold: saves before it that were queued as well, for a reason that had been told already.
    """

    kind: Literal["saved", "failed", "skipped", "queued", "uploaded"]
    step: int
    digest: str = ""
    path: Path | None = None
    total_bytes: int = 0
    tiers: dict[str, TierResult] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    fault: SiraraError | None = None
    in_a_row: int = 0
    why: str = ""
    untold: int = 0


def failed_line(error: BaseException) -> bytes:
    """What a keeper says that cannot start."""
    return _line({"kind": "failed", "fault": fault_fields(error)})


def fault_fields(error: BaseException) -> dict[str, Any]:
    """An error as plain JSON. One that is not ours becomes an InvariantError that names its last frame."""
    if not isinstance(error, SiraraError):
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        error = InvariantError(f"{type(error).__name__}: {error}", where=where)
    return {
        "class": type(error).__name__,
        "what": error.what,
        "code": error.code,
        "where": error.where,
        "why": error.why,
        "try": list(error.try_),
    }


def fault_from(fields: Mapping[str, Any]) -> SiraraError:
    """The error whose fields these are."""
    kind = getattr(errors, str(fields["class"]), _UNKNOWN)
    if not (isinstance(kind, type) and issubclass(kind, SiraraError)):
        kind = _UNKNOWN
    try_: Sequence[str] = tuple(fields["try"])
    return kind(fields["what"], code=fields["code"], where=fields["where"], why=fields["why"], try_=try_)


def _line(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"
