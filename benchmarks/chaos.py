"""A swarm under random kills, freezes, restarts, joins, partitions and one liar, with a verdict.

    make chaos MINUTES=10        or        python -m benchmarks.chaos --minutes 10 --peers 6 --seed 0

Real `gasloc` processes with real p2pd, each on a host of its own (a network namespace), and one member that lies
(`benchmarks.liar`). Every few seconds something happens to a random peer: SIGKILL (then a restart in the same folder,
or a newcomer in a new one), SIGSTOP for a while, SIGINT and a new start, its p2pd alone is killed, or the swarm is cut
in two. At the end everybody is told to stop. Exit code 0 where every line of the verdict is ok.

Without root there are no namespaces: all are on 127.0.0.1 then, and nobody is cut off.
"""

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import chaos_verdict, namespaces
from benchmarks.chaos_swarm import Life, Swarm
from benchmarks.chaos_verdict import Cut, Line
from peers.identity import Identity

READY_S = 90.0
SETTLE_S = 15.0
HEAL_S = 120.0
"""The swarm is not cut in two so shortly before the end: what comes of a heal is to be seen."""
MISFORTUNES = ("kill-return", "kill-replace", "freeze", "leave-return", "daemon", "cut")


class Chaos:
    """The run: what happens to whom, and what came of it."""

    def __init__(self, swarm: Swarm, peers: int, say: Callable[[str], None]) -> None:
        self._swarm = swarm
        self._peers = peers
        self._say = say
        self._begun_s = time.monotonic()
        self._cuts: list[Cut] = []
        self._deaths = 0
        self._kept_out = 0
        """Newcomers that ended as they should: all whom they were told of were cut off from them as they came."""
        self._liars: list[Life] = []
        self._turn = 0
        self._order: list[str] = []

    def begin(self) -> bool:
        """The first peer, the others, the liar. False where the first does not start."""
        first = self._swarm.begin()
        if not wait_until(lambda: bool(first.addresses()), READY_S):
            return False
        for _ in range(self._peers - 1):
            self._swarm.join()
        if not wait_until(lambda: all(len(life.rounds()) > 2 for life in self._swarm.lives), READY_S):
            self._tell("not everybody trains yet")
        self._lie()
        self._begun_s = time.monotonic()
        return True

    def go_on(self, seconds: float) -> None:
        """Misfortunes, each after a pause."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self._watch(min(self._swarm.random.uniform(5, 15), max(end_s - time.monotonic(), 0.0)))
            self._replace_dead()
            ready = [life for life in self._swarm.honest() if life.addresses()]
            if time.monotonic() < end_s and len(ready) >= max(2, self._peers // 2):
                self._disturb(end_s - time.monotonic())

    def end(self) -> list[Line]:
        """Tells everybody to stop; the verdict."""
        swarm = self._swarm
        wait_until(lambda: all(life.rounds() for life in swarm.honest()), READY_S)
        self._watch(SETTLE_S)
        self._replace_dead()
        wait_until(lambda: all(life.rounds() for life in swarm.honest()), READY_S)
        last = swarm.honest()
        for life in swarm.lives:
            life.process.send_signal(signal.SIGINT)
        codes = {life.name: swarm.end(life) for life in list(swarm.lives)}
        folders = {life.folder: life for life in swarm.past if life.honest}
        events_of = {life.peer_id(): list(life.events()) for life in folders.values()}
        events = [event for records in events_of.values() for event in records]
        leftovers = swarm.leftovers()
        honest = [life for life in swarm.past if life.honest]
        return [
            chaos_verdict.loss(events),
            chaos_verdict.finite(events),
            chaos_verdict.spread(last),
            chaos_verdict.goodput(events),
            chaos_verdict.healed(self._cuts, events_of),
            chaos_verdict.liar(events, [_identity(life) for life in self._liars]),
            Line(
                "no member ended by itself",
                f"{self._deaths} did; kept out by a cut: {self._kept_out}",
                not self._deaths,
            ),
            Line("told to stop, everybody exits 0", str(codes), set(codes.values()) == {0}),
            Line("no process left", ", ".join(leftovers) or "none", not leftovers),
            chaos_verdict.flat("descriptors", 1, 0.1, 8, honest),
            chaos_verdict.flat("memory", 2, 0.15, 30e6, honest),
        ]

    def _tell(self, words: str) -> None:
        self._say(f"{time.monotonic() - self._begun_s:6.0f} s  {words}")

    def _watch(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            for life in self._swarm.lives:
                life.sample(time.monotonic())
            time.sleep(1.0)

    def _lie(self) -> None:
        self._liars.append(self._swarm.join_liar(len(self._liars)))

    def _replace_dead(self) -> None:
        for life in [life for life in self._swarm.lives if life.process.poll() is not None]:
            self._tell(f"{life.name} ended by itself, code {life.process.returncode}")
            self._swarm.bury(life)
            if not life.honest:
                self._lie()
                continue
            came = time.time() - (time.monotonic() - life.begun_s)
            if not life.joined() and any(cut.healed > came for cut in self._cuts):
                self._kept_out += 1
            else:
                self._deaths += 1
            self._swarm.join(life.folder)

    def _disturb(self, left_s: float) -> None:
        """Each kind of misfortune in turn, in an order of chance, to a random peer; the first is as mortal."""
        swarm = self._swarm
        if self._turn % len(MISFORTUNES) == 0:
            self._order = swarm.random.sample(MISFORTUNES, len(MISFORTUNES))
        what = self._order[self._turn % len(MISFORTUNES)]
        self._turn += 1
        victim = swarm.random.choice([life for life in swarm.honest() if life.addresses()])
        if what == "freeze":
            self._tell(self._freeze(victim))
        elif what == "daemon":
            for process in victim.daemons():
                process.kill()
            self._tell(f"{victim.name}: its p2pd killed")
        elif what == "cut":
            if swarm.lan is not None and left_s > HEAL_S:
                self._tell(self._cut())
        elif what == "leave-return":
            victim.process.send_signal(signal.SIGINT)
            code = swarm.end(victim)
            swarm.join(victim.folder)
            self._tell(f"{victim.name} left with code {code} and came back")
        else:
            victim.process.kill()
            swarm.end(victim)
            came = swarm.join(victim.folder if what == "kill-return" else None)
            self._tell(f"{victim.name} killed; {came.name} " + ("came back" if came.name == victim.name else "came"))

    def _freeze(self, victim: Life) -> str:
        seconds = self._swarm.random.uniform(2, 12)
        processes = victim.processes()
        for process in processes:
            process.suspend()
        self._watch(seconds)
        for process in processes:
            process.resume()
        return f"{victim.name} frozen for {seconds:.0f} s"

    def _cut(self) -> str:
        swarm = self._swarm
        honest = swarm.honest()
        half = swarm.random.sample(honest, len(honest) // 2)
        others = [life for life in honest if life not in half]
        began = time.time()
        swarm.cut(half)
        self._watch(swarm.random.uniform(20, 35))
        swarm.heal()
        one, other = ({life.peer_id() for life in lives} - {""} for lives in (half, others))
        self._cuts.append(Cut(frozenset(one), frozenset(other), began, time.time()))
        return f"{', '.join(life.name for life in half)} cut off for {time.time() - began:.0f} s, healed now"


def _identity(life: Life) -> str:
    """A liar's peer id; it writes no events."""
    return Identity.load_or_create(life.folder / "identity.key").peer_id


def wait_until(done: Callable[[], bool], timeout_s: float) -> bool:
    """Looks again and again; whether it came about."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if done():
            return True
        time.sleep(0.2)
    return done()


def say(line: str) -> None:
    """A line on standard output, at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description="A swarm under random misfortunes and one liar, with a verdict.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--peers", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loopback", action="store_true", help="all on 127.0.0.1: nobody is cut off")
    parser.add_argument("--dir", type=Path, help="keep everything here; default: a temporary folder, gone if all is ok")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it, and so would peers
    root = options.dir or Path(tempfile.mkdtemp(prefix="gasloc-chaos-"))
    root.mkdir(parents=True, exist_ok=True)
    if not options.loopback and namespaces.why_not():
        say(f"all on 127.0.0.1, and nobody is cut off: {namespaces.why_not()}")
    with Swarm(root, options.seed, options.peers, alone=options.loopback) as swarm:
        chaos = Chaos(swarm, options.peers, say)
        if not chaos.begin():
            say(f"the first peer did not start: see {root}/peer-0.log")
            return 1
        chaos.go_on(60 * options.minutes)
        lines = chaos.end()
    for line in lines:
        say(str(line))
    whole = all(line.ok for line in lines)
    if whole and options.dir is None:
        shutil.rmtree(root)
    else:
        say(f"everything lies in {root}")
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
