"""What to do about a p2pd that ended, and about time that was lost: pure decisions."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

MOST_ENDS = 3
"""p2pd is not started again when it has ended so often ..."""
WITHIN_S = 60.0
"""... within so long."""
LATE_S = 8.0
"""A beat that is later than this tells of time in which we did not run. A busy machine makes it a second late."""
CLOCK_STEP_S = 2.0
"""A clock that moved so much more or less than time itself was set."""


class Jump(Enum):
    """What became of time between two beats."""

    NONE = "none"
    PAUSED = "paused"
    """We did not run: the machine slept, or somebody froze us."""
    CLOCK_SET = "clock set"
    """We ran, and the wall clock was set."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A moment by two clocks, seconds."""

    steady_s: float
    """By a clock that nobody sets, and that goes on while the machine sleeps."""
    wall_s: float
    """Unix time."""


def restart(ends_s: Sequence[float]) -> tuple[bool, str]:
    """Whether p2pd is started again after it ended at these times (any steady clock, the last one now), and why."""
    recent = [end for end in ends_s if end > ends_s[-1] - WITHIN_S]
    if len(recent) < MOST_ENDS:
        return True, f"p2pd ended: {len(recent)} of at most {MOST_ENDS - 1} times within {WITHIN_S:.0f} s"
    took_s = recent[-1] - recent[0]
    return False, f"p2pd, the network daemon, ended {len(recent)} times within {took_s:.0f} s"


def judge(before: Beat, after: Beat, *, every_s: float) -> tuple[Jump, str]:
    """What happened between two beats that should be `every_s` apart, and the line that tells it.

    A pause counts before a clock that was set: after one, all that we know is old, whatever the clock says.
    """
    passed_s = after.steady_s - before.steady_s
    set_by_s = (after.wall_s - before.wall_s) - passed_s
    if passed_s > every_s + LATE_S:
        return Jump.PAUSED, f"this peer did not run for {passed_s:.0f} s: was the machine asleep?"
    if abs(set_by_s) > CLOCK_STEP_S:
        way = "ahead" if set_by_s > 0 else "back"
        return Jump.CLOCK_SET, (
            f"this machine's clock was set {way} by {abs(set_by_s):.0f} s: if it is wrong now, set it by NTP, "
            "or others may not see this peer"
        )
    return Jump.NONE, "time passed as it should"
