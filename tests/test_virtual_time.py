"""Virtual time and simulated links."""

import asyncio
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gasloc.errors import RunError
from gasloc.simulation.link import Link, Network
from gasloc.simulation.virtual_time import run


def now() -> float:
    return asyncio.get_running_loop().time()


def test_sleeps_take_no_real_time_and_wake_in_order() -> None:
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        woken.append((name, now()))

    async def main() -> None:
        await asyncio.gather(sleeper("late", 3e6), sleeper("early", 1.0), sleeper("middle", 5e5))

    run(main())
    assert woken == [("early", 1.0), ("middle", 5e5), ("late", 3e6)]


def test_years_of_virtual_time_go_by_and_timers_still_fire() -> None:
    async def main() -> float:
        await asyncio.sleep(1e9)
        await asyncio.sleep(0.25)
        return now()

    assert run(main()) == pytest.approx(1e9 + 0.25, abs=1e-3)


def test_a_deadlock_is_told() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RunError, match="stands still"):
        run(main())


def test_time_stands_still_while_a_thread_works() -> None:
    async def main() -> tuple[int, float]:
        answer = await asyncio.to_thread(sum, range(1000))
        return answer, now()

    assert run(main()) == (499500, 0.0)


def test_a_coroutine_over_its_limit_is_ended() -> None:
    async def main() -> None:
        await asyncio.sleep(10.0)

    with pytest.raises(TimeoutError):
        run(main(), limit_s=9.0)


def arrivals(links: dict[str, Link], transfers: list[tuple[float, str, str, float]]) -> list[float]:
    """When each transfer (start, sender, receiver, bytes) has arrived."""

    async def main() -> list[float]:
        network = Network(links)

        async def one(start_s: float, sender: str, receiver: str, size_bytes: float) -> float:
            await asyncio.sleep(start_s)
            await network.transfer(sender, receiver, size_bytes)
            return now()

        return await asyncio.gather(*(one(*transfer) for transfer in transfers))

    return run(main())


THREE = {"a": Link(100.0), "b": Link(100.0), "c": Link(100.0, latency_s=0.5)}


def test_one_transfer_takes_bytes_over_the_thinner_link_and_both_delays() -> None:
    assert arrivals({"a": Link(100.0, 0.25), "b": Link(50.0, 0.5)}, [(0, "a", "b", 100)]) == [pytest.approx(2.75)]


def test_both_directions_at_once_take_no_longer() -> None:
    assert arrivals(THREE, [(0, "a", "b", 100), (0, "b", "a", 100)]) == [pytest.approx(1.0)] * 2


def test_a_link_is_shared_by_what_leaves_it() -> None:
    assert arrivals(THREE, [(0, "a", "b", 100), (0, "a", "c", 100)]) == [pytest.approx(2.0), pytest.approx(2.5)]


def test_a_link_is_shared_by_what_enters_it() -> None:
    assert arrivals(THREE, [(0, "a", "b", 100), (0, "c", "b", 50)]) == [pytest.approx(1.5), pytest.approx(1.5)]


def test_shares_change_as_transfers_come_and_go() -> None:
    # alone until 0.5 s (50 bytes), then half each until the second is through at 1.5 s, then alone again
    assert arrivals(THREE, [(0, "a", "b", 150), (0.5, "a", "b", 50)]) == [pytest.approx(2.0), pytest.approx(1.5)]


def test_without_a_limit_only_the_delay_counts() -> None:
    links = {"a": Link(math.inf, 0.125), "b": Link(math.inf)}
    assert arrivals(links, [(0, "a", "b", 1e12)]) == [0.125]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 5), st.sampled_from("abc"), st.sampled_from("abc"), st.integers(0, 1000).map(float)
        ).filter(lambda transfer: transfer[1] != transfer[2]),
        max_size=12,
    )
)
def test_no_link_carries_more_than_its_bandwidth(transfers: list[tuple[float, str, str, float]]) -> None:
    ends = arrivals(THREE, transfers)
    for (start_s, sender, receiver, size_bytes), end_s in zip(transfers, ends, strict=True):
        assert end_s - start_s >= size_bytes / 100 - 1e-6
        for peer, role in ((sender, 1), (receiver, 2)):
            # all that began no earlier and ended no later crossed the same side of the link in that time
            within = [
                other[3]
                for other, other_end_s in zip(transfers, ends, strict=True)
                if other[role] == peer and other[0] >= start_s and other_end_s <= end_s
            ]
            assert sum(within) <= 100 * (end_s - start_s) + 1e-3


def test_a_cut_link_breaks_its_transfers_and_frees_the_others() -> None:
    async def main() -> float:
        network = Network(THREE)
        broken = asyncio.ensure_future(network.transfer("a", "b", 100))
        whole = asyncio.ensure_future(network.transfer("a", "c", 100))
        await asyncio.sleep(1.0)  # half of each is through
        network.cut("b")
        with pytest.raises(ConnectionError, match="b is gone"):
            await broken
        await whole
        return now()

    assert run(main()) == pytest.approx(2.0)


def test_a_cancelled_transfer_frees_its_share() -> None:
    async def main() -> float:
        network = Network(THREE)
        first = asyncio.ensure_future(network.transfer("a", "b", 1000))
        second = asyncio.ensure_future(network.transfer("a", "b", 100))
        await asyncio.sleep(1.0)
        first.cancel()
        await second
        return now()

    assert run(main()) == pytest.approx(1.5)
