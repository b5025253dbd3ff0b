"""The first failure of any rank, told to all: nobody waits for a deadline to learn what another rank knows.

    rank 3   fails -> ring(error) -> the store of the process group, once; the first to ring is the one that is heard
    others   wait for tensors -> every LOOK_S a look at the store -> CommError SR702 "rank 3 failed: ValueError: boom"

A rank that only sees a connection break, or a peer's memory vanish, looks as well: the one that left has rung before.
A rank that was killed rings nothing; the first to miss it rings in its stead.  The process of rank 0 holds the store
under most launchers: when it fails it stays until the others have heard, LINGER_S at most.  A wait inside gloo ends
when the failed process does; a host that waits for its GPU hears nothing, and is ended by its launcher.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from sirara.errors import CommError, SiraraError

LOOK_S = 0.25
"""Seconds between two looks at the store by a rank that waits."""

LINGER_S = 3 * LOOK_S
"""Seconds that a failed rank 0 stays for others to look."""

HEARD = "SR702"
"""Code of an error that repeats another rank's failure."""

_KEY, _LEAVING = "sirara/alarm", "sirara/leaving"
_SPINS = 50
_NAP_S, _LONGEST_NAP_S = 50e-6, 200e-6


class Store(Protocol):
    """The part of torch.distributed's Store that is needed."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...


class Alarm:
    """One rank's bell and ear.

    Args:  store: shared by all ranks of this attempt alone.  rank: of this process in the world, of `size` ranks.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.rank, self._size = rank, size
        self._store = store
        self._next_look = 0.0

    def ring(self, error: BaseException) -> None:
        """Tells all ranks that this one failed; does nothing when another one was first."""
        if isinstance(error, CommError) and error.code == HEARD:
            return
        what, why = describe(error, rank=self.rank)
        try:
            self._store.compare_set(_KEY, "", json.dumps({"what": what, "why": why}))
        except RuntimeError as gone:
            # The store left with its host; the error that is being told must not be hidden behind that.
            error.add_note(f"the other ranks could not be told: {gone}")

    def look(self) -> CommError | None:
        """The failure that was rung first, if any."""
        try:
            if not self._store.check([_KEY]):
                return None
            told = json.loads(self._store.get(_KEY))
        except RuntimeError:
            # Without a store nothing can be heard; the caller has an error, or a deadline, of its own.
            return None
        return heard(told["what"], told["why"], rank=self.rank)

    def listen(self) -> None:
        """Raises what was rung; looks at most every LOOK_S, so that it may be called in a loop."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_S
        error = self.look()
        if error is not None:
            raise error

    def leave(self, error: BaseException) -> None:
        """Rings, and says that this rank ends because of `error`, its own or one that it heard of; rank 0 waits for the
        others to say so, LINGER_S at most."""
        self.ring(error)
        end = time.monotonic() + LINGER_S
        try:
            leaving = self._store.add(_LEAVING, 1)
            while self.rank == 0 and leaving < self._size and time.monotonic() < end:
                time.sleep(LOOK_S / 10)
                leaving = self._store.add(_LEAVING, 0)
        except RuntimeError:
            return  # The store is gone: nobody is left to be told.

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Rings for whatever leaves the block as an exception, and lets it pass."""
        try:
            yield
        except BaseException as error:
            self.ring(error)
            raise


def describe(error: BaseException, *, rank: int) -> tuple[str, str]:
    """(what, why) of the error that other ranks raise for `error`, which this rank met first or has heard of."""
    if isinstance(error, SiraraError):
        if error.code == HEARD and isinstance(error, CommError):
            return error.what, error.why
        why = "; ".join(part for part in (error.where, error.why) if part)
        return f"rank {rank} failed: {type(error).__name__}[{error.code}]: {error.what}", why
    first, _, rest = str(error).partition("\n")
    return f"rank {rank} failed: {type(error).__name__}: {first}", rest.strip()


def heard(what: str, why: str, *, rank: int) -> CommError:
    """The error that repeats another rank's failure on this one."""
    return CommError(
        what, code=HEARD, where=f"rank {rank} was told", why=why, try_=["look at the log of that rank"]
    )


class Patience:
    """Waiting for another process: spins a little, then sleeps in growing naps with an ear on the alarm."""

    def __init__(self, timeout_s: float, alarm: Alarm | None) -> None:
        self._timeout_s, self._alarm = timeout_s, alarm
        self._spins = 0
        self._began = 0.0

    @property
    def napping(self) -> bool:
        """Whether it has waited long enough that other work, done at each pause, costs nothing."""
        return self._spins > _SPINS

    def pause(self) -> bool:
        """Waits a moment; False when the deadline has passed.  Raises what the alarm tells."""
        self._spins += 1
        if self._spins <= _SPINS:
            return True
        now = time.monotonic()
        if self._spins == _SPINS + 1:
            self._began = now
        waited = now - self._began
        # A nap of a fiftieth of the wait so far delays the answer by two percent and leaves the core to others.
        time.sleep(min(max(_NAP_S, waited / 50), _LONGEST_NAP_S))
        if self._alarm is not None and waited > LOOK_S:
            self._alarm.listen()
        return waited < self._timeout_s
