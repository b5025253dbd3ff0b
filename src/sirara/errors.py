"""Every error that Sirara raises on purpose: one tree, one code each, one exit code per branch.

SiraraError                     exit  code
├── ConfigError                   2   SR1xx   a key, value, size or path that the user can correct
│   └── LayoutError               2   SR15x   a mesh that does not fit the model or the world
├── PlanError                     3   SR2xx   the plan or the preflight says no
├── DataError                     2   SR3xx   text, tokenizers and token stores that cannot be used
│   └── CorruptDataError         65   SR35x   a token store whose bytes are not what its index says
├── NumericError                 17   SR4xx   a numeric check failed
│   └── NumericRetry             16   SR45x   a numeric check failed once: run again to tell
├── CheckpointError              65   SR5xx   missing, torn, foreign or corrupt checkpoints
├── StorageError                 74   SR6xx   I/O errors and full disks
├── CommError                     1   SR7xx   a peer is gone or answers wrongly
│   └── CommTimeout             124   SR75x   no progress within the deadline
├── RunBusyError                  2   SR8xx   somebody else owns the run
└── InvariantError                1   SR9xx   a promise between the parts is broken: our fault

"""

from collections.abc import Sequence
from enum import IntEnum


class Exit(IntEnum):
    """Process exit codes; 128+n means killed by signal n without a save."""

    DONE = 0
    USER_CODE = 1
    USAGE = 2
    PLAN = 3
    NUMERIC_RETRY = 16
    NUMERIC = 17
    CORRUPT = 65
    STORAGE = 74
    STOPPED = 75
    NO_PROGRESS = 124


class SiraraError(Exception):
    """An error that says what, where, why (with numbers) and what to do.

    Args:  what: one sentence, lower case, no full stop.  code: SRnnn, stable across versions.
           where: phase, file:line, rank, mesh.  why: the numbers.  try_: things to do, best first.
    """

    exit_code: Exit = Exit.USER_CODE
    default_code: str = "SR000"

    def __init__(
        self, what: str, *, code: str = "", where: str = "", why: str = "", try_: Sequence[str] = ()
    ) -> None:
        super().__init__(what)
        self.what = what
        self.code = code or self.default_code
        self.where = where
        self.why = why
        self.try_ = (try_,) if isinstance(try_, str) else tuple(try_)

    def __str__(self) -> str:
        lines = [f"error[{self.code}]: {self.what}"]
        if self.where:
            lines.append(f"  where   {self.where}")
        if self.why:
            lines.append(f"  why     {self.why}")
        for n, step in enumerate(self.try_):
            lines.append(f"  {'try' if n == 0 else '   '}     {step}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders (pools, test ranks); keyword-only arguments need help there.
        return _rebuild, (type(self), self.what, self.code, self.where, self.why, self.try_)


def _rebuild(
    kind: type[SiraraError], what: str, code: str, where: str, why: str, try_: tuple[str, ...]
) -> SiraraError:
    return kind(what, code=code, where=where, why=why, try_=try_)


class ConfigError(SiraraError):
    exit_code = Exit.USAGE
    default_code = "SR100"


class LayoutError(ConfigError):
    default_code = "SR150"


class PlanError(SiraraError):
    exit_code = Exit.PLAN
    default_code = "SR200"


class DataError(SiraraError):
    exit_code = Exit.USAGE
    default_code = "SR300"


class CorruptDataError(DataError):
    exit_code = Exit.CORRUPT
    default_code = "SR350"


class NumericError(SiraraError):
    exit_code = Exit.NUMERIC
    default_code = "SR400"


class NumericRetry(NumericError):
    exit_code = Exit.NUMERIC_RETRY
    default_code = "SR450"


class CheckpointError(SiraraError):
    exit_code = Exit.CORRUPT
    default_code = "SR500"


class StorageError(SiraraError):
    exit_code = Exit.STORAGE
    default_code = "SR600"


class CommError(SiraraError):
    default_code = "SR700"


class CommTimeout(CommError):
    exit_code = Exit.NO_PROGRESS
    default_code = "SR750"


class RunBusyError(SiraraError):
    exit_code = Exit.USAGE
    default_code = "SR800"


class InvariantError(SiraraError):
    default_code = "SR900"
