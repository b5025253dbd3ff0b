"""Which committed steps stay: the choice alone; the files are the business of `checkpoint.retention`.

    above      steps beyond the one just verified belong to another branch of the run and are left alone
    last       the newest `keep_last` verified ones; an unverified step takes no place from a good one
    every      multiples of `keep_every`
    best       the verified step whose metric was lowest (of equal ones the newest)
    pinned     somebody wants it

Nothing goes before a newer step is committed and verified, and as long as there are fewer verified steps than
`keep_last` nothing goes at all, so the last good one never does.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sirara.errors import InvariantError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What is kept; best: the metric of which the lowest value is kept, "eval/<set>/loss"."""

    last: int
    every: int | None = None
    best: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Of one committed step; why: the rule that keeps it, or that lets it go."""

    step: int
    stays: bool
    why: str


def judge(
    committed: Sequence[int],
    verified: Collection[int],
    *,
    newest: int,
    rules: Rules,
    pinned: Collection[int] = (),
    scores: Mapping[int, float] | None = None,
) -> list[Verdict]:
    """What becomes of every committed step, newest first, now that step `newest` is committed and verified.

    Args:    verified: committed steps of which every piece was read back.  scores: the metric of `rules.best` by step.
    Raises:  InvariantError when `newest` is not committed and verified: nothing may be deleted on behalf of it.
    """
    if newest not in verified or newest not in committed:
        raise InvariantError(f"step {newest} is not committed and verified: nothing may be deleted")
    last = max(1, rules.last)
    good = sorted((s for s in set(committed) & set(verified) if s <= newest), reverse=True)
    oldest = good[min(last, len(good)) - 1]
    best = best_step({s: v for s, v in (scores or {}).items() if s in good}) if rules.best else None

    def verdict(step: int) -> Verdict:
        why = ""
        if step > newest:
            why = f"it is newer than step {newest}"
        elif step >= oldest:
            why = (
                f"one of the last {last}" if step in good else f"not older than the last {last} verified ones"
            )
        elif len(good) < last:
            why = f"only {len(good)} of {last} verified steps are newer or equal"
        elif rules.every and step % rules.every == 0:
            why = f"a multiple of {rules.every}"
        elif step == best:
            why = f"the lowest {rules.best}"
        elif step in pinned:
            why = "pinned"
        return Verdict(step=step, stays=bool(why), why=why or f"{last} verified steps are newer")

    return [verdict(step) for step in sorted(set(committed), reverse=True)]


def expendable(
    committed: Sequence[int],
    verified: Collection[int],
    *,
    newest: int,
    keep_last: int,
    keep_every: int | None,
    keep_best: str | None = None,
    pinned: Collection[int] = (),
    scores: Mapping[int, float] | None = None,
) -> list[int]:
    """Committed steps that may go, oldest first; arguments and errors as in `judge`."""
    rules = Rules(last=keep_last, every=keep_every, best=keep_best)
    verdicts = judge(committed, verified, newest=newest, rules=rules, pinned=pinned, scores=scores)
    return [v.step for v in reversed(verdicts) if not v.stays]


def best_step(scores: Mapping[int, float]) -> int | None:
    """The step of the lowest score, of equal ones the newest; a score that is not finite is none."""
    finite = [(value, -step) for step, value in scores.items() if math.isfinite(value)]
    return -min(finite)[1] if finite else None


def most_steps(*, every: int | None, steps: int, rules: Rules, pinned: int = 0) -> int:
    """The most step folders that a run of `steps` steps holds at one time, the one being written included."""
    due = (steps // every if every else 0) + bool(not every or steps % every)
    last = min(due, max(1, rules.last) + 1)
    # Of the multiples that are saved, those that `last` does not hold at the end.
    kept = 0
    if every and rules.every:
        both = math.lcm(every, rules.every)
        before_last = (last - 1 if steps % every else last) * every
        kept = max(0, steps // every * every - before_last) // both
    return min(due, last + kept + (rules.best is not None)) + pinned
