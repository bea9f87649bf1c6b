"""The fast engine: schedules equal to the plain engine's, tens of thousands of requests a second.

Decoding requests are a cohort, described by sums (`cohort`); runs of decode-only steps are one
event (`foresight`, `timeline`); the scheduler (`scheduler`, `walk`) touches single requests only
when they are admitted (`prefill`), preempted or done; the prefix cache (`prefix`, `lines`,
`extents`) handles runs of blocks. `engine` puts them on a clock, `support` says what they cover.
"""

from sim.engine.fast.engine import FastEngine
from sim.engine.fast.support import supports, why_plain

__all__ = ["FastEngine", "supports", "why_plain"]
