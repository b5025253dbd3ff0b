"""When a failed save is tried again, and when a run gives up.

    failed at t      next try at t + retry, then 2 retry, 4 retry, ... at most `most_s` apart
    succeeded        everything is forgotten
    fatal            `most` in a row

Time is handed in (any clock that does not go back), so every rank that is told the same times decides alike.
"""

MOST_S = 3600.0
"""The longest pause between two tries."""


class Failures:
    """Failed saves in a row.

    Args:  most: so many in a row end the run (0 as 1).
           retry_s: pause after the first one, doubled each time up to most_s.
    """

    def __init__(self, *, most: int, retry_s: float, most_s: float = MOST_S) -> None:
        self._most, self._retry_s, self._most_s = most, retry_s, max(most_s, retry_s)
        self.in_a_row = 0
        self.next_at: float | None = None

    def failed(self, now: float) -> float:
        """Counts one; returns the seconds until the next try."""
        self.in_a_row += 1
        # The exponent is bounded: 2 ** 2000 is no float.
        pause = min(self._most_s, self._retry_s * 2.0 ** min(self.in_a_row - 1, 60))
        self.next_at = now + pause
        return pause

    def succeeded(self) -> None:
        self.in_a_row, self.next_at = 0, None

    def due(self, now: float) -> bool:
        """Whether a save that failed should be tried again at this step boundary."""
        return self.next_at is not None and now >= self.next_at

    @property
    def fatal(self) -> bool:
        """Whether the run must end: a run that cannot save only burns hours."""
        return self.in_a_row >= max(1, self._most)
