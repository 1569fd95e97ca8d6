"""What it costs to know the members of a run: CPU for a list of 1,000 and of 100,000, and an idle peer's traffic.

    python -m benchmarks.membership [--quick] [--json FILE] [--strict]

CPU: a thousand synthetic members with keys and signatures of their own, read the way a DHT node and the view read them:
length, signature, schema; then the peer's neighbours of a round, as `gasloc.topology.row` finds them. "first look" is a
newcomer's, when every signature is new; "steady look" is the next one, 2.5 s later in a run of that size, when the half
of all members whose record was renewed since (every 5 s) is new. Of 100,000 only the neighbours are measured, among ids
of their own: what reading their records would cost is told from the cost of one, since signatures alone would take
longer than any bar. Everything in CPU time of this process.

Traffic: real peers with real p2pd daemons and no training, in a network namespace of their own, so that the counters of
its loopback interface show nothing else. Needs `unshare` to be allowed to make one; where it is not, that is said.
"""

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks import bars
from benchmarks.bars import Bar
from gasloc import topology
from peers.dht import key_bytes
from peers.identity import Identity
from peers.membership import REFRESH_S, RENEW_S, Member, MemberState, Status, look_pause_s
from peers.node import Peer, PeerOptions, RunCard
from peers.record import RecordValidator, seal

LIMIT_1000_S = 0.1
LIMIT_100000_S = 2.0
LIMIT_IDLE_BYTES_PER_S = 32_000.0
"""Each way, for a peer of eight: a quarter of a megabit a second."""
_KEY = key_bytes("gasloc/benchmark/members")
_COUNTERS = Path("/proc/self/net/dev")
_SEEN_S = 60.0
_RENEWED = round(RENEW_S / look_pause_s(1000, REFRESH_S))
"""One of so many records is renewed between two looks."""
_NAMESPACE = ["unshare", "--user", "--map-root-user", "--net"]

Records = dict[str, tuple[bytes, float]]


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
    cpu_s = _reading()
    write("CPU of one look at the members, and of a round's neighbours\n")
    for what, value in cpu_s.items():
        write(f"{what:44}{1e3 * value:10.1f} ms\n")
    fresh_s, known_s = cpu_s["1,000: first look"] / 1000, cpu_s["1,000: look, nothing new"] / 1000
    write(f"a new record {1e6 * fresh_s:.0f} us, mostly its signature; a known one {1e6 * known_s:.1f} us: reading ")
    write(f"100,000 would take {1e5 * fresh_s:.0f} s at first, and {1e5 * (fresh_s + known_s) / 2:.1f} s a look\n")
    steady_s = cpu_s["1,000: steady look"] + cpu_s["1,000: neighbours, 1-peer"]
    marks = [
        Bar("members_1000_steady_cpu_s", steady_s, LIMIT_1000_S, at_least=False),
        Bar("neighbours_of_100000_cpu_s", cpu_s["100,000: neighbours, 1-peer"], LIMIT_100000_S, at_least=False),
    ]
    seconds = 5.0 if options.quick else options.seconds
    traffic = {count: _traffic(count, seconds) for count in ((4,) if options.quick else (4, 8))}
    for count, bytes_per_s in traffic.items():
        if bytes_per_s is None:
            write(f"idle traffic of {count} peers: not measured, as no network namespace may be made here\n")
            continue
        write(f"idle traffic of {count} peers: {bytes_per_s / 1e3:.2f} kB/s a peer, in and out each, headers and all\n")
    measured = [value for value in traffic.values() if value is not None]
    if measured:
        marks.append(Bar("idle_bytes_per_s", measured[-1], LIMIT_IDLE_BYTES_PER_S, at_least=False))
    return bars.finish(
        marks,
        {"cpu_s": cpu_s, "idle_bytes_per_s": {str(count): value for count, value in traffic.items()}},
        json_path=options.json,
        strict=options.strict,
    )


def _reading() -> dict[str, float]:
    """CPU seconds by what was done."""
    with tempfile.TemporaryDirectory() as folder:
        identities = [Identity.load_or_create(Path(folder) / f"{number}.key") for number in range(1000)]
    expires = time.time() + 10
    records = _records(identities, expires)
    renewed = records | _records(identities[::_RENEWED], expires + 1)
    judge = RecordValidator(max_life_s=60.0, clock=time.time)
    many = [f"{peer[:-6]}{number:06d}" for number, peer in enumerate(list(records) * 100)]
    return {
        "1,000: first look": _cpu_s(lambda: _look(judge, records)),
        "1,000: look, nothing new": _cpu_s(lambda: _look(judge, records)),
        "1,000: steady look": _cpu_s(lambda: _look(judge, renewed)),
        **_neighbours("1,000", list(records)),
        **_neighbours("100,000", many),
    }


def _records(identities: Sequence[Identity], expires: float) -> Records:
    """What the members publish, by peer id."""
    records = {}
    for number, identity in enumerate(identities):
        me = identity.peer_id
        partners = (identities[number - 1].peer_id, identities[number - 2].peer_id)
        status = Status(100, MemberState.TRAINING, 0.51, 3.2, 123_456_789, 100, 2.345, partners)
        maddrs = ("/ip4/203.0.113.5/tcp/4001", "/ip4/203.0.113.5/udp/4001/quic-v1")
        addresses = tuple(f"{maddr}/p2p/{me}" for maddr in maddrs)
        records[me] = seal(Member(me, status, "d" * 64, True, addresses, expires), _KEY, identity), expires
    return records


def _look(judge: RecordValidator, records: Records) -> dict[str, Member]:
    """The records as the DHT node checks them when they come in, and then the view."""
    view = {}
    for peer, (record, expires) in records.items():
        judge.read(record, _KEY, peer, expires)
        view[peer] = judge.read(record, _KEY, peer, expires)
    return view


def _neighbours(count: str, members: list[str]) -> dict[str, float]:
    """A round's neighbours, by topology."""
    return {
        f"{count}: neighbours, {name}": _cpu_s(
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
