"""Who keeps an object alive: tells tracebacks from code that will use it again.

[Note: kept exceptions] An exception that somebody keeps (a notebook keeps the last one) refers to the
frames it went through, and they to the parameters they were called with. That code is over: such
references must not keep a parameter's memory from other groups.
"""

from __future__ import annotations

import gc
import inspect
import sys
from types import FrameType

from tiermem.zero import compat

_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def num_dead_references(value: object) -> int:
    """How many references to ``value`` are in frames whose code is over, or in argument tuples of
    such frames. Looks at every object: for last resorts only."""
    running = compat.running_frames()
    count = 0
    for holder in gc.get_referrers(value):
        if type(holder) is tuple:
            over = _only_in_dead_frames(holder, running)
        else:
            over = isinstance(holder, FrameType) and _is_over(holder, running)
        if over:
            count += list(map(id, gc.get_referents(holder))).count(id(value))
    return count


def _only_in_dead_frames(arguments: tuple[object, ...], running: set[int]) -> bool:
    frames = [k for k in gc.get_referrers(arguments) if isinstance(k, FrameType)]
    dead = [frame for frame in frames if _is_over(frame, running)]
    # The parameter here and of getrefcount, the caller's variable and the list it comes from.
    return bool(dead) and sys.getrefcount(arguments) - 4 == len(dead)


def _is_over(frame: FrameType, running: set[int]) -> bool:
    return id(frame) not in running and not frame.f_code.co_flags & _SUSPENDABLE
