"""What `gasloc doctor` found, as lines: what is right, what is not, and what to do. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from peers.address import Reach, reach
from peers.checks import Look
from peers.reachability import dialable

CLOCK_TOLERANCE_S = 2.0
_MIB = 1024**2


@dataclass(frozen=True, slots=True)
class Line:
    """One check's outcome."""

    check: str
    ok: bool
    text: str
    todo: str = ""
    """What to do, where it failed."""

    def __str__(self) -> str:
        end = f": {self.todo}" if self.todo else ""
        return f"{'ok  ' if self.ok else 'FAIL'}  {self.check:<10}  {self.text}{end}"

    def as_record(self) -> dict[str, object]:
        """For `--json`."""
        return {"check": self.check, "ok": self.ok, "text": self.text, "todo": self.todo}


def passed(lines: Sequence[Line]) -> bool:
    """Whether nothing failed."""
    return all(line.ok for line in lines)


def failure(check: str, message: str) -> Line:
    """A failed check, of an error's text, which says what to do itself."""
    return Line(check, False, message)


def port_line(port: int) -> Line:
    """A port that is free."""
    return Line("port", True, f"{port} is free" if port else "any free one")


def contact_lines(look: Look) -> list[Line]:
    """One line an address of `--peers`."""
    todo = "ask for the line that 'gasloc start' prints there now, and whether a firewall is in between"
    return [
        Line("peer", not one.reason, one.address if not one.reason else f"{one.address}: {one.reason}", todo)
        if one.reason
        else Line("peer", True, f"{one.address} answers")
        for one in look.contacts
    ]


def identity_line(look: Look, identity: str) -> Line:
    """Whether our id is free in the swarm. `identity`: the key file in words."""
    if look.taken:
        return Line(
            "identity",
            False,
            f"another running peer has the key of {identity}",
            "give each machine a key file of its own; remove this one, and a new one is made",
        )
    return Line("identity", True, f"{identity}: nobody else in the swarm has it")


def clock_line(look: Look) -> Line | None:
    """Our clock against the median of the peers'; None where none of them told the time."""
    offsets_s = sorted(one.clock_ahead_s for one in look.answering if one.clock_ahead_s is not None)
    if not offsets_s:
        return None
    offset_s = offsets_s[len(offsets_s) // 2]
    way = "behind" if offset_s > 0 else "ahead of"
    text = f"{abs(offset_s):.1f} s {way} the swarm's"
    if abs(offset_s) <= CLOCK_TOLERANCE_S:
        return Line("clock", True, text)
    return Line("clock", False, text, "set it by NTP, or others may not see this peer")


def address_lines(addresses: Sequence[str]) -> list[Line]:
    """What this peer would announce, best first."""
    if not addresses:
        return [Line("address", False, "there is none to announce", "connect a network, or name one by --host")]
    words = {Reach.LOOPBACK: " (this machine only)", Reach.BRIDGE: " (a bridge between containers?)"}
    lines = [Line("address", True, address + words.get(reach(address), "")) for address in addresses]
    if all(reach(address) is Reach.LOOPBACK for address in addresses):
        lines.append(
            Line("address", True, "only peers on this machine can dial this one; for others use --host 0.0.0.0")
        )
    return lines


def dialback_line(look: Look) -> Line:
    """Whether others can dial us."""
    can, reason = dialable(look.addresses, look.dialback)
    if can:
        return Line("dial-back", True, reason)
    if can is None and look.dialback is None:
        return Line("dial-back", True, f"not known: {look.dialback_refusal or reason}")
    todo = (
        "open the port in the firewall, or forward it (a fixed --port) and name the address by --public-ip; without "
        "that, this peer dials others, and is not paired with those that cannot be dialled either"
    )
    return Line("dial-back", False, reason, todo)


def memory_line(free_bytes: int | None, needed_bytes: int | None) -> Line:
    """Free memory against what the recipe's tensors need; None: not known."""
    if free_bytes is None:
        return Line("memory", True, "how much is free cannot be found out on this system")
    if needed_bytes is None:
        return Line("memory", True, f"{_size(free_bytes)} free; name a recipe to compare it with")
    text = f"{_size(free_bytes)} free, {_size(needed_bytes)} needed, activations aside"
    if free_bytes >= needed_bytes:
        return Line("memory", True, text)
    return Line("memory", False, text, "close other programs, or train a smaller recipe")


def disk_line(folder: str, free_bytes: int, needed_bytes: int | None) -> Line:
    """Free disk against what the checkpoints need."""
    if needed_bytes is None:
        return Line("disk", True, f"{_size(free_bytes)} free at {folder}")
    text = f"{_size(free_bytes)} free at {folder}, {_size(needed_bytes)} needed for checkpoints"
    if free_bytes >= needed_bytes:
        return Line("disk", True, text)
    return Line("disk", False, text, "make room, or choose another --dir")


def _size(size_bytes: int) -> str:
    mib = size_bytes / _MIB
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.1f} MiB"
