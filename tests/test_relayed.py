"""Two peers that nobody can dial, in network namespaces, and the relays that carry them to each other."""

import signal
from collections.abc import Callable

import pytest

from tests.namespaces import lan
from tests.processes import ProcessPool, Record
from tests.small_recipe import write_small_recipe

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

START_S = 120.0
PUBLIC = "44.0.0"
"""p2pd announces its place at a relay only where the relay's address is one of the public internet."""
RELAYS = 4
"""p2pd looks for so many before it takes a place at one; with fewer it waits for 3 minutes first."""


def mixed_with(peer: str) -> Callable[[Record], bool]:
    return lambda record: peer in record["partners"]


def test_two_that_cannot_be_dialled_mix_through_relays(pool: ProcessPool) -> None:
    with lan(3, PUBLIC) as net:
        relays = [pool.gasloc("relay", "--dir", pool.folder / "relay-0", prefix=net.inside(1))]
        known = [relays[0].line("others join by: ", START_S).split()[-1]]
        for number in range(1, RELAYS):
            more = ("--peers", known[0], "--dir", pool.folder / f"relay-{number}")
            relays.append(pool.gasloc("relay", *more, prefix=net.inside(1)))
        known += [relay.line("others join by: ", START_S).split()[-1] for relay in relays[1:]]

        recipe, text = write_small_recipe(pool.folder, rounds=100_000), pool.folder / "text.txt"
        # they listen on their own machine only, so every dial-back fails, as at a router that lets nobody in
        common = ("--peers", ",".join(known), "--data", text, "--host", "127.0.0.1", "--threads", "1", "--json")
        first = pool.gasloc(
            *("start", "--recipe", recipe, "--dir", pool.folder / "first", *common), prefix=net.inside(2)
        )
        first.event("round", START_S)
        second = pool.gasloc("join", "--dir", pool.folder / "second", *common, prefix=net.inside(3))
        for process in (first, second):
            told = process.event("warning", START_S)
            assert "others cannot dial this peer" in told["message"]
        for process, other in ((first, second), (second, first)):
            them = other.event("run_started", START_S)["peer"]
            process.event("round", START_S, mixed_with(them))
        for process in (second, first, *relays):
            process.signal(signal.SIGINT)
        for process in (second, first, *relays):
            assert process.wait(30) == 0, process.errors
