"""A newcomer's download between real processes, whose only donor is killed in the middle of it."""

import signal

import pytest

from tests.processes import ProcessPool
from tests.small_recipe import write_small_recipe

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

START_S = 120.0
LOCAL = ("--host", "127.0.0.1", "--threads", "1", "--json")


def test_with_all_donors_dead_the_newcomer_says_so_and_ends(pool: ProcessPool) -> None:
    """It never begins from fresh weights."""
    recipe = write_small_recipe(pool.folder, rounds=2000)
    text = recipe.read_text().replace("\ndim = 32", "\ndim = 128").replace("hidden_dim = 64", "hidden_dim = 1024")
    recipe.write_text(text)  # a state of megabytes: a minute of it at that rate
    data = ("--data", pool.folder / "text.txt")
    first = pool.gasloc("start", "--recipe", recipe, *data, "--dir", "first", *LOCAL, "--serve-rate", "65536")
    address = first.event("listening", START_S)["addresses"][0]
    first.event("round", START_S)
    late = pool.gasloc("join", "--peers", address, *data, "--dir", "late", *LOCAL)
    begun = late.event("downloading", START_S)
    assert begun["done_bytes"] < begun["total_bytes"]
    first.signal(signal.SIGKILL)
    assert late.wait(90) != 0
    assert not late.of("round")
    assert not late.of("run_started")
    failed = late.of("failed")[0]["message"]
    assert failed.startswith("nobody could give the state: ")
    assert "\n" not in failed
    assert any("nobody could give the state" in line for line in late.errors)
    assert not any("Traceback" in line for line in late.errors)
