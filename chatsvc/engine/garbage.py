"""When Python looks for garbage that references itself: in small steps, not in the middle of everybody's text.

A full collection looks at every object that there is while nothing else runs. Python begins one whenever a quarter more
objects have survived than the last time: with a thousand streams every few seconds, for some hundred milliseconds,
most of it spent on the modules of torch and the vocabulary, which never go away.

So, once the program is loaded: what is there is set apart for good (:func:`settle`), the small collections go on as
ever, and full ones happen here (:meth:`Collector.run`), when nothing runs, or as seldom as keeps them a small part of
the time.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

YOUNG, MIDDLE = 5_000, 20  # objects made, and collections of those, before the ones that survived are looked at
NEVER = 1 << 30


def settle() -> None:
    """Everything that exists now stays: no collection looks at it again (nor now, which would be a fifth of the start),
    and none of all objects starts by itself. Collections may have been off until now."""
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, NEVER)
    gc.enable()


class Collector:
    """Full collections, and when.

    Args:
        busy: whether somebody waits for text.
    """

    SHARE = 500  # busy: the time between two is so many times what one took
    LEAST, MOST = 1.0, 300.0  # seconds between two; the lesser is also how often it is looked whether nothing runs

    def __init__(
        self,
        busy: Callable[[], bool],
        collect: Callable[[], object] = gc.collect,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._busy = busy
        self._collect = collect
        self._clock = clock
        self._due = clock()
        self._worth = False  # somebody was busy since the last one

    def look(self) -> None:
        """Collect, if it is time."""
        busy = self._busy()
        self._worth = self._worth or busy
        began = self._clock()
        if not self._worth or (busy and began < self._due):
            return
        self._collect()
        self._worth = busy
        ended = self._clock()
        self._due = ended + min(self.MOST, max(self.LEAST, self.SHARE * (ended - began)))

    async def run(self) -> None:
        """For as long as the program runs."""
        while True:
            await asyncio.sleep(self.LEAST)
            self.look()
