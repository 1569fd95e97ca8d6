"""What it costs to know the members of a run: CPU for a list of 1,000 and of 100,000, and an idle peer's traffic.

    python -m benchmarks.membership [--quick] [--json FILE] [--strict]

CPU: synthetic members with keys and signatures of their own, held by one store that answers for all holders, and
read from it as a member does: questions and answers as bytes, then length, signature, schema. "first look" is a
newcomer's, when every signature is new; "later look" is one after a pause as long as in a run of that size, in which
some members renewed their records. A look checks about `MOST_CHECKS` signatures; how many looks it takes to read all is
told, and the longest time for which the event loop did not turn. Then the peer's neighbours of a round, as
`gasloc.topology.row` finds them. All in CPU time of this process, without what the holders took to answer, which is
told apart.

Traffic: real peers with real p2pd daemons and no training, in a network namespace of their own, so that the counters of
its loopback interface show nothing else. Needs `unshare` to be allowed to make one; where it is not, that is said.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks import bars
from benchmarks.bars import Bar
from gasloc import topology
from peers.dht import key_bytes
from peers.exchange import PeerId
from peers.identity import Identity
from peers.membership import REFRESH_S, RENEW_S, Member, MemberState, Status, look_pause_s
from peers.node import Peer, PeerOptions, RunCard
from peers.record import RecordValidator, seal
from peers.record_line import RecordLine
from peers.record_log import Page
from peers.record_store import RecordStore
from peers.record_wire import Ask, decode_ask, decode_page, encode_ask, encode_page
from peers.roll import HOLDERS, MOST_CHECKS, Roll

LIMIT_1000_S = 0.1
LIMIT_100000_S = 2.0
LIMIT_LOOK_S = 0.5
"""For any look at 100,000 members."""
LIMIT_IDLE_BYTES_PER_S = 10_000.0
"""Each way, for a peer of eight."""
_NAME = "gasloc/benchmark/members"
_KEY = key_bytes(_NAME)
_LIFE_S = 3600.0
_COUNTERS = Path("/proc/self/net/dev")
_SEEN_S = 60.0
_NAMESPACE = ["unshare", "--user", "--map-root-user", "--net"]

_HOLDERS = tuple(f"holder-{number}" for number in range(HOLDERS))


def main() -> int:
    """Prints the table and the bars; 1 where a bar is short and that was to be strict."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="smaller swarms, a shorter time")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long traffic is counted")
    parser.add_argument("--idle-peers", type=int, help=argparse.SUPPRESS)
    bars.add_options(parser)
    options = parser.parse_args()
    if options.idle_peers:
        sys.stdout.write(json.dumps(asyncio.run(_idle(options.idle_peers, options.seconds))) + "\n")
        return 0

    write = sys.stdout.write
    many = 10_000 if options.quick else 100_000
    small, large = asyncio.run(_reading(1000)), asyncio.run(_reading(many))
    write(f"CPU of reading the members; at most about {MOST_CHECKS} signatures a look\n")
    for costs in (small, large):
        for line in costs.lines():
            write(line + "\n")
    cpu_s = {**_neighbours("1,000", 1000), **_neighbours("100,000", 100_000)}
    for what, value in cpu_s.items():
        write(f"{what:44}{1e3 * value:10.1f} ms\n")
    marks = [
        Bar(
            "members_1000_steady_cpu_s",
            small.later_s + cpu_s["1,000: neighbours, 1-peer"],
            LIMIT_1000_S,
            at_least=False,
        ),
        Bar(f"look_at_{many}_cpu_s", large.longest_s, LIMIT_LOOK_S, at_least=False),
        Bar("neighbours_of_100000_cpu_s", cpu_s["100,000: neighbours, 1-peer"], LIMIT_100000_S, at_least=False),
    ]
    seconds = 5.0 if options.quick else options.seconds
    traffic = {count: _traffic(count, seconds) for count in ((8,) if options.quick else (4, 8, 16))}
    for count, bytes_per_s in traffic.items():
        if bytes_per_s is None:
            write(f"idle traffic of {count} peers: not measured, as no network namespace may be made here\n")
            continue
        write(f"idle traffic of {count} peers: {bytes_per_s / 1e3:.2f} kB/s a peer, in and out each, headers and all\n")
    if traffic[8] is not None:
        marks.append(Bar("idle_bytes_per_s", traffic[8], LIMIT_IDLE_BYTES_PER_S, at_least=False))
    return bars.finish(
        marks,
        {
            "neighbours_cpu_s": cpu_s,
            "reading": [asdict(small), asdict(large)],
            "idle_bytes_per_s": {str(count): value for count, value in traffic.items()},
        },
        json_path=options.json,
        strict=options.strict,
    )


@dataclass(frozen=True, slots=True)
class Reading:
    """What it took to read a list."""

    members: int
    first_s: float
    """CPU seconds of the first look."""
    longest_s: float
    """CPU seconds of the longest look until all were read."""
    looks: int
    """Looks until all were read."""
    renewed: int
    """Records that were renewed before the later look."""
    later_s: float
    """CPU seconds of the later look."""
    stall_s: float
    """The longest time for which the event loop did not turn, by the wall clock."""
    answer_s: float
    """CPU seconds that all holders took to answer for the later look."""

    def lines(self) -> Iterator[str]:
        """For people."""
        for what, value in (
            ("first look", self.first_s),
            (f"longest of the {self.looks} looks to read all", self.longest_s),
            (f"later look, {self.renewed:,} renewed", self.later_s),
            ("answering that look, all holders", self.answer_s),
            ("longest stall of the event loop", self.stall_s),
        ):
            yield f"{f'{self.members:,}: {what}':60}{1e3 * value:10.1f} ms"


class _Holders:
    """All holders in one store; counts the CPU seconds of their answers."""

    def __init__(self, store: RecordStore) -> None:
        self.validator = RecordValidator(max_life_s=2 * _LIFE_S, clock=time.time)
        self.answer_s = 0.0
        self._store = store

    def holders(self, key: str) -> list[PeerId]:
        return list(_HOLDERS)

    def line(self, key: str, holder: PeerId) -> RecordLine:
        return RecordLine(key_bytes(key), self._ask)

    def release(self, kept: Collection[PeerId]) -> None:
        """There are no streams."""

    async def forget(self, peer: PeerId) -> None:
        raise RuntimeError(f"{peer} did not answer")

    async def _ask(self, ask: Ask) -> Page:
        question = encode_ask(ask)
        began = time.process_time()
        answer = encode_page(self._store.answer(decode_ask(question)))
        self.answer_s += time.process_time() - began
        await asyncio.sleep(0)  # as for any stream
        return decode_page(answer)


async def _reading(count: int) -> Reading:
    """Reads so many members' records, then those that were renewed since."""
    identities = [Identity(Path(), secrets.token_bytes(32)) for _ in range(count)]
    store = RecordStore(RecordValidator(max_life_s=2 * _LIFE_S, clock=time.time), clock=time.time)
    _hold(store, identities, _LIFE_S)
    holders = _Holders(store)
    view: dict[PeerId, Member] = {}
    roll = Roll(holders, _NAME, _KEY)

    def known(peer: PeerId) -> float:
        return view[peer].expires if peer in view else 0.0

    async def seen(members: Sequence[Member]) -> None:
        view.update((member.peer_id, member) for member in members)

    async def look() -> float:
        answered_s, began = holders.answer_s, time.process_time()
        await roll.consult(None, known, seen)
        return time.process_time() - began - (holders.answer_s - answered_s)

    gc.collect()
    gc.freeze()  # keys and records of all members: a peer has no such heap for the collector to walk through
    ticking = asyncio.create_task(_longest_stall_s())
    looks = [await look()]
    while len(view) < count:
        looks.append(await look())
    renewed = max(1, int(count * look_pause_s(count, REFRESH_S) / RENEW_S))
    ticking.cancel()
    _hold(store, identities[:renewed], _LIFE_S + 1)
    before_s = holders.answer_s
    later_s = await look()
    return Reading(
        count, looks[0], max(looks), len(looks), renewed, later_s, await ticking, holders.answer_s - before_s
    )


async def _longest_stall_s() -> float:
    """Until it is cancelled."""
    longest_s = 0.0
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.001)
            longest_s = max(longest_s, time.monotonic() - began - 0.001)
    return longest_s


def _hold(store: RecordStore, identities: Sequence[Identity], life_s: float) -> None:
    """Has the store hold a record of each member, without checking what was just signed."""
    expires = time.time() + life_s
    for number, identity in enumerate(identities):
        me = identity.peer_id
        partners = (identities[number - 1].peer_id, identities[number - 2].peer_id)
        status = Status(100, MemberState.TRAINING, 0.51, 3.2, 123_456_789, 100, 2.345, partners)
        maddrs = ("/ip4/203.0.113.5/tcp/4001", "/ip4/203.0.113.5/udp/4001/quic-v1")
        addresses = tuple(f"{maddr}/p2p/{me}" for maddr in maddrs)
        record = seal(Member(me, status, "d" * 64, True, addresses, expires), _KEY, identity)
        store.hold(_KEY, me, record, expires)


def _neighbours(words: str, count: int) -> dict[str, float]:
    """A round's neighbours, by topology."""
    members = [f"12D3KooW{number:044d}" for number in range(count)]
    return {
        f"{words}: neighbours, {name}": _cpu_s(
            partial(topology.row, name, round=7, members=members, me=members[5], seed=0)
        )
        for name in ("1-peer", "2-peer")
    }


def _cpu_s(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def _traffic(peers: int, seconds: float) -> float | None:
    """Bytes a second into each of so many idle peers, and as many out; None where it cannot be measured."""
    if subprocess.run([*_NAMESPACE, "true"], capture_output=True, check=False).returncode:
        return None
    inside = (
        f"ip link set lo up && exec {sys.executable} -m benchmarks.membership --idle-peers {peers} --seconds {seconds}"
    )
    output = subprocess.run([*_NAMESPACE, "sh", "-c", inside], stdout=subprocess.PIPE, text=True, check=True).stdout
    value: float = json.loads(output)
    return value


async def _idle(count: int, seconds: float) -> float:
    """Peers of one run that publish and look, and nothing else; bytes a second for each."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        card = RunCard(run="idle", digest="d" * 64, document=b"{}")
        peers: list[Peer] = []
        for number in range(count):
            addresses = tuple(peers[0].addresses[:1]) if peers else ()
            peer = await Peer.start(PeerOptions(folder / f"{number}.key", host="127.0.0.1", initial_peers=addresses))
            stack.push_async_callback(peer.close)
            peers.append(peer)
            await peer.enter(card, lambda: None)
            await peer.membership.publish(Status(round=1, state=MemberState.TRAINING))
        for peer in peers:
            await peer.membership.wait_for(count, _SEEN_S)
        before, began = _received_bytes(), time.monotonic()
        await asyncio.sleep(seconds)
        return (_received_bytes() - before) / (time.monotonic() - began) / count


def _received_bytes() -> int:
    """What the loopback interface of this namespace took in."""
    line = next(line for line in _COUNTERS.read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


if __name__ == "__main__":
    sys.exit(main())
