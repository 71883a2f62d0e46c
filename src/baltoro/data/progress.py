"""Lines that say how far a phase is and how long it will still take."""

import time
from collections.abc import Callable

Report = Callable[[str], None]
SECONDS_BETWEEN = 5.0


class Progress:
    """Reports at most every few seconds; the time left assumes that the rest goes as fast."""

    def __init__(
        self,
        report: Report,
        phase: str,
        total: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report = report
        self._phase = phase
        self._total = max(total, 1)
        self._done = 0.0
        self._clock = clock
        self._start = self._last = clock()

    def add(self, amount: float) -> None:
        """Count work that was done."""
        self._done += amount
        now = self._clock()
        if now - self._last < SECONDS_BETWEEN or not self._done:
            return
        self._last = now
        share = min(1.0, self._done / self._total)
        left = (now - self._start) * (1 - share) / share
        self._report(f"{self._phase}: {share:.0%}, {left:.0f} s left")

    def end(self, result: str) -> None:
        """Report what came of the phase."""
        self._report(f"{self._phase}: {result}, {self._clock() - self._start:.1f} s")
