"""Whether an attempt that failed is worth another one: a pure decision on what is known about the
failures."""

from collections.abc import Sequence
from dataclasses import dataclass

from sirara.errors import Exit
from sirara.launch.crash import Failure

HOPELESS = {
    Exit.USAGE: "the configuration is wrong",
    Exit.PLAN: "the plan says no",
    Exit.NUMERIC: "a numeric check failed",
    Exit.NUMERIC_RETRY: "a numeric check failed and wants to be looked at",
    Exit.CORRUPT: "data or checkpoint are corrupt",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """One failed attempt: its root cause, and the newest committed step at that time (0: none)."""

    cause: Failure
    committed_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    restart: bool
    why: str


def decide(lost: Sequence[Lost], *, max_restarts: int, stop_requested: bool) -> Decision:
    """Restart after `lost[-1]`?  `why` ends a sentence that begins with "restarting:" or "not
    restarting:"."""
    cause = lost[-1].cause
    if stop_requested:
        return Decision(restart=False, why="a stop was requested")
    # Without a report (`kind`) the code is not ours: user code may exit with any number.
    if cause.kind and cause.code in list(Exit) and Exit(cause.code) in HOPELESS:
        return Decision(
            restart=False, why=f"{HOPELESS[Exit(cause.code)]}, another attempt would fail as well"
        )
    if len(lost) > max_restarts:
        used = f"all {max_restarts} restarts are used" if max_restarts else "launch.max_restarts=0"
        return Decision(restart=False, why=used)
    if len(lost) > 1 and cause.kind and _same(lost[-2], lost[-1]):
        return Decision(restart=False, why="the same failure twice without a new checkpoint in between")
    return Decision(restart=True, why=f"restart {len(lost)} of {max_restarts}")


def _same(a: Lost, b: Lost) -> bool:
    return (a.cause.kind, a.cause.message, a.committed_step) == (
        b.cause.kind,
        b.cause.message,
        b.committed_step,
    )
