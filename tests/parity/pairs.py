"""Covering sets: rows such that every legal pair of values of any two knobs is in some row.  Deterministic.

A row starts with the first pair that is in no row yet; the other knobs are filled one after another with the value
that brings most new pairs, going back where a rule forbids what is left.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

Row = dict[str, Any]
Pair = tuple[str, Any, str, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """What holds between the values of some knobs."""

    knobs: tuple[str, ...]
    allows: Callable[..., bool]

    def broken_by(self, row: Mapping[str, Any]) -> bool:
        """False while a knob of the rule has no value yet."""
        return all(k in row for k in self.knobs) and not self.allows(*(row[k] for k in self.knobs))


def covering_set(knobs: Mapping[str, Sequence[Any]], rules: Sequence[Rule]) -> list[Row]:
    """Rows that together hold every pair that any legal row holds."""
    missing = dict.fromkeys(
        (a, x, b, y) for a, b in combinations(knobs, 2) for x in knobs[a] for y in knobs[b]
    )
    rows: list[Row] = []
    while missing:
        pair = next(iter(missing))
        a, x, b, y = pair
        row = _filled({a: x, b: y}, knobs, rules, missing)
        if row is None:
            del missing[pair]  # no legal row has it
            continue
        rows.append({knob: row[knob] for knob in knobs})
        for found in pairs_of(rows[-1]):
            missing.pop(found, None)
    return rows


def pairs_of(row: Mapping[str, Any]) -> Iterator[Pair]:
    """The pairs of a row, knobs in the order of the row."""
    for a, b in combinations(row, 2):
        yield a, row[a], b, row[b]


def legal_rows(knobs: Mapping[str, Sequence[Any]], rules: Sequence[Rule]) -> Iterator[Row]:
    """Every row that the rules allow."""

    def extend(row: Row, left: tuple[str, ...]) -> Iterator[Row]:
        if not left:
            yield dict(row)
            return
        for value in knobs[left[0]]:
            longer = row | {left[0]: value}
            if not any(rule.broken_by(longer) for rule in rules):
                yield from extend(longer, left[1:])

    return extend({}, tuple(knobs))


def _filled(
    row: Row, knobs: Mapping[str, Sequence[Any]], rules: Sequence[Rule], missing: Mapping[Pair, None]
) -> Row | None:
    """The row with a value for every knob, or None when the rules leave none."""
    if any(rule.broken_by(row) for rule in rules):
        return None
    order = list(knobs)
    left = [knob for knob in order if knob not in row]
    if not left:
        return row
    # Knobs with rules first: what is left afterwards always fits.
    knob = min(left, key=lambda k: (-sum(k in rule.knobs for rule in rules), order.index(k)))

    def gain(value: Any) -> int:
        there = order.index(knob)
        return sum(
            (
                (knob, value, other, row[other])
                if there < order.index(other)
                else (other, row[other], knob, value)
            )
            in missing
            for other in row
        )

    for value in sorted(knobs[knob], key=gain, reverse=True):
        whole = _filled(row | {knob: value}, knobs, rules, missing)
        if whole is not None:
            return whole
    return None
