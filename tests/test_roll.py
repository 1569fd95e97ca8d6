"""Reading the members from those that hold them: in memory streams, with holders that die, forge and flood."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest

from peers.dht import key_bytes, now
from peers.errors import DaemonError, UnreachableError
from peers.exchange import PeerId
from peers.identity import Identity
from peers.pipes import Fault, FaultKind, PipeNetwork, PipeTransport
from peers.record import Member, MemberState, RecordValidator, Status, seal
from peers.record_desk import MEMBERS_PROTOCOL, RecordDesk, RecordStream
from peers.record_line import OwnRecord, RecordLine
from peers.record_log import Change, Page
from peers.record_store import RecordStore
from peers.record_wire import Ask
from peers.roll import HOLDERS, MOST_CHECKS, MOST_PAGES, Roll

NAME = "gasloc/tiny/members"
KEY = key_bytes(NAME)

PEOPLE = [Identity(Path(), number.to_bytes(32, "big")) for number in range(1500)]


def own(identity: Identity, round: int = 1, life_s: float = 20.0) -> OwnRecord:
    """A member's record that lives from now on."""
    expires = now() + life_s
    member = Member(identity.peer_id, Status(round, MemberState.TRAINING), "d" * 64, True, (), expires)
    return OwnRecord(identity.peer_id, seal(member, KEY, identity), expires)


class Holding:
    """Nodes that hold the records, nearest first, and one reader of them."""

    def __init__(self, network: PipeNetwork, names: Sequence[PeerId], reader: PeerId) -> None:
        self.names = list(names)
        self.validator = RecordValidator(max_life_s=60.0, clock=now)
        self.validator.key = KEY
        self.forgotten: list[PeerId] = []
        self._transport = network.join(reader)
        self._streams: dict[PeerId, RecordStream] = {}

    def holders(self, key: str) -> list[PeerId]:
        return [name for name in self.names if name not in self.forgotten]

    def line(self, key: str, holder: PeerId) -> RecordLine:
        return RecordLine(key_bytes(key), partial(self._ask, holder))

    def release(self, kept: Collection[PeerId]) -> None:
        for holder in self._streams.keys() - set(kept):
            self._streams.pop(holder).retire()

    async def forget(self, peer: PeerId) -> None:
        self.forgotten.append(peer)

    async def _ask(self, holder: PeerId, ask: Ask) -> Page:
        return await self._streams.setdefault(holder, RecordStream(self._transport, holder)).ask(ask)


@dataclass
class Watcher:
    """A reader and its view."""

    holding: Holding
    view: dict[PeerId, Member] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.roll = Roll(self.holding, NAME, KEY)

    async def look(self, own: OwnRecord | None = None) -> int:
        return await self.roll.consult(own, self._known, self._see)

    def _known(self, peer: PeerId) -> float:
        return self.view[peer].expires if peer in self.view else 0.0

    async def _see(self, members: Sequence[Member]) -> None:
        self.view |= {member.peer_id: member for member in members}


class Swarm:
    """Two holders more than are asked, and watchers of them."""

    names = tuple(f"h{number}" for number in range(HOLDERS + 2))

    def __init__(self) -> None:
        self.network = PipeNetwork()
        self.asked: list[Ask] = []
        self.stores: dict[str, RecordStore] = {}

    async def start(self) -> None:
        for name in self.names:
            store = RecordStore(RecordValidator(max_life_s=60.0, clock=now), clock=now)
            self.stores[name] = store
            await RecordDesk(self.network.join(name), partial(self._answer, store)).start()

    async def end(self) -> None:
        """All streams are cut, and the handlers have seen it."""
        transports = [self.network.find(peer) for peer in [*self.names, "a", "b", "mute"]]
        for transport in filter(None, transports):
            transport.cut()
        for transport in filter(None, transports):
            await transport.finished()

    def _answer(self, store: RecordStore, ask: Ask) -> Page:
        self.asked.append(ask)
        return store.answer(ask)

    async def replace(self, name: str, page: Callable[[int], Page]) -> list[Ask]:
        """Another node in a holder's place; `page`: its answer to its first question, its second, and so on.

        Returns the questions that it was asked so far.
        """
        asked: list[Ask] = []

        def answer(ask: Ask) -> Page:
            asked.append(ask)
            return page(len(asked))

        self.network.leave(name)
        await RecordDesk(self.network.join(name), answer).start()
        return asked

    def watcher(self, reader: PeerId) -> Watcher:
        return Watcher(Holding(self.network, self.names, reader))


@pytest.fixture
async def swarm() -> AsyncIterator[Swarm]:
    made = Swarm()
    await made.start()
    yield made
    await made.end()


async def test_what_one_brings_the_other_sees_and_a_renewal_travels_without_its_body(swarm: Swarm) -> None:
    a, b = swarm.watcher("a"), swarm.watcher("b")
    for renewal in range(3):
        record = own(PEOPLE[0], life_s=10 + renewal)
        assert await a.look(record) == await b.look() == HOLDERS
        assert b.view[record.peer].expires == record.expires
    brought = [ask.change for ask in swarm.asked if ask.change]
    assert [bool(change.body) for change in brought] == [True] * HOLDERS + [False] * 2 * HOLDERS
    await b.look()
    assert [ask.number for ask in swarm.asked[-HOLDERS:]] == [3] * HOLDERS, "read on from there"
    assert len({dialled for dialled in swarm.network.dialled if dialled[0] == "b"}) == HOLDERS
    assert len([dialled for dialled in swarm.network.dialled if dialled[0] == "b"]) == HOLDERS, "streams are kept"


async def test_holders_that_died_are_replaced_and_get_what_they_lack(swarm: Swarm) -> None:
    a, b = swarm.watcher("a"), swarm.watcher("b")
    await a.look(own(PEOPLE[0]))
    record = own(PEOPLE[1])
    await b.look(record)
    for name in swarm.names[:HOLDERS]:
        swarm.network.leave(name)
    assert await b.look(record) == 2
    assert await a.look() == 2
    assert a.view[PEOPLE[1].peer_id].expires == record.expires, "brought to those that are left, though not renewed"
    assert a.holding.forgotten == list(swarm.names[:HOLDERS])


async def test_a_holder_that_started_anew_is_read_anew_and_told_again(swarm: Swarm) -> None:
    a = swarm.watcher("a")
    a.holding.names = ["h0"]
    record = own(PEOPLE[0])
    await a.look(record)
    swarm.network.leave("h0")
    store = RecordStore(RecordValidator(max_life_s=60.0, clock=now), clock=now)
    store.answer(Ask(KEY, bytes(8), 0, Change.of(PEOPLE[1].peer_id, own(PEOPLE[1]).record, own(PEOPLE[1]).expires)))
    await RecordDesk(swarm.network.join("h0"), store.answer).start()
    other = own(PEOPLE[2])
    store.answer(Ask(KEY, bytes(8), 0, Change.of(other.peer, other.record, other.expires)))
    assert await a.look(record) == 1
    assert not a.holding.forgotten, "it was dialled again"
    assert other.peer in a.view
    assert record.peer in {change.peer for change in store.answer(Ask(KEY, bytes(8), 0)).changes}


async def test_a_holder_that_does_not_speak_is_passed_over(swarm: Swarm) -> None:
    a = swarm.watcher("a")
    swarm.network.join("mute")
    a.holding.names.insert(0, "mute")
    swarm.network.order(MEMBERS_PROTOCOL)
    swarm.network.order(MEMBERS_PROTOCOL, Fault(FaultKind.GARBLE, after_bytes=12, back=True))
    assert await a.look(own(PEOPLE[0])) == HOLDERS
    assert "mute" in a.holding.forgotten
    assert len(a.holding.forgotten) == 2, "and so is one whose answer is garbled"


async def test_a_liar_among_the_holders_is_not_believed_and_hides_nobody(swarm: Swarm) -> None:
    a, b = swarm.watcher("a"), swarm.watcher("b")
    good = own(PEOPLE[0], round=4)
    await b.look(good)
    for liar in (PEOPLE[1], PEOPLE[2]):
        await b.look(own(liar))
    other = own(PEOPLE[3])
    lies = (
        Change(good.peer, good.expires + 5, good.record[:64], good.record[64:]),
        Change(good.peer, good.expires + 6, bytes(64), b""),
        Change(PEOPLE[4].peer_id, other.expires, other.record[:64], other.record[64:]),
        Change(PEOPLE[5].peer_id, now() + 5, bytes(64), b'{"round": 1}'),
        Change(PEOPLE[6].peer_id, float("inf"), bytes(64), b"junk"),
        Change(PEOPLE[7].peer_id, float("nan"), bytes(64), b"junk"),
        Change.of(PEOPLE[8].peer_id, own(PEOPLE[8], life_s=1e6).record, now() + 1e6),
    )
    asked = await swarm.replace("h0", lambda number: Page(b"lies....", number, lies, more=True, held=True))
    assert await a.look() == HOLDERS
    assert {peer: member.status.round for peer, member in a.view.items()} == {
        good.peer: 4,
        PEOPLE[1].peer_id: 1,
        PEOPLE[2].peer_id: 1,
    }
    assert a.view[good.peer].expires == good.expires
    assert a.holding.validator.rejected.total() >= len(lies)
    assert len(asked) <= MOST_CHECKS, "endless pages end with what may be checked in one look"


async def test_endless_pages_of_what_is_known_already_end_a_look_after_so_many(swarm: Swarm) -> None:
    a, b = swarm.watcher("a"), swarm.watcher("b")
    good = own(PEOPLE[0])
    await b.look(good)
    await a.look()
    known = (Change.of(good.peer, good.record, good.expires),)
    asked = await swarm.replace("h0", lambda number: Page(b"endless.", number, known, more=True, held=True))
    for look in range(1, 3):
        late = own(PEOPLE[look])
        await b.look(late)
        asked.clear()
        assert await a.look() == HOLDERS
        assert late.peer in a.view, "the others are heard"
        assert len(asked) == MOST_PAGES
    assert not a.holding.forgotten, "an honest holder may have as much to tell"


async def test_a_slow_holder_is_read_for_some_seconds_of_a_look(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peers.roll._MOST_PAGES_S", 0.0)
    a = swarm.watcher("a")
    a.holding.names = ["h0"]
    asked = await swarm.replace("h0", lambda number: Page(b"slow....", number, more=number < 5))
    for look in range(1, 4):
        assert await a.look() == 1
        assert [ask.number for ask in asked] == list(range(look)), "the next look reads on"


async def test_a_look_checks_so_many_signatures_and_the_next_looks_the_rest(swarm: Swarm) -> None:
    a, b = swarm.watcher("a"), swarm.watcher("b")
    records = [own(identity, life_s=50.0) for identity in PEOPLE]
    for name in swarm.names[:HOLDERS]:
        for record in records:
            change = Change.of(record.peer, record.record, record.expires)
            assert swarm.stores[name].answer(Ask(KEY, bytes(8), 0, change)).held
    await a.look()
    assert MOST_CHECKS <= len(a.view) < len(PEOPLE)
    await a.look()
    assert len(a.view) == len(PEOPLE)
    await asyncio.gather(b.look(), b.look(), b.look())
    assert len(b.view) == len(PEOPLE)


async def test_a_record_that_is_refused_is_not_brought_again_until_it_is_renewed(swarm: Swarm) -> None:
    a = swarm.watcher("a")
    for life_s in (100.0, 101.0):
        record = own(PEOPLE[0], life_s=life_s)
        for _ in range(3):
            assert await a.look(record) == HOLDERS
    assert [store.validator.rejected.total() for store in swarm.stores.values()] == [2] * HOLDERS + [0, 0]
    assert not a.view
    await a.look(own(PEOPLE[0]))
    assert PEOPLE[0].peer_id in a.view


async def test_a_stream_that_is_retired_answers_once_more(swarm: Swarm) -> None:
    transport = swarm.network.join("a")
    stream = RecordStream(transport, "h0")
    asking = asyncio.create_task(stream.ask(Ask(KEY, bytes(8), 0)))
    await asyncio.sleep(0)
    stream.retire()
    assert (await asking).changes == ()
    assert transport.open_streams == 0


async def test_a_question_that_was_given_up_does_not_spoil_the_next(swarm: Swarm) -> None:
    stream = RecordStream(swarm.network.join("a"), "h0")
    swarm.network.order(MEMBERS_PROTOCOL, Fault(FaultKind.STALL, back=True))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await stream.ask(Ask(KEY, bytes(8), 0))
    record = own(PEOPLE[0])
    change = Change.of(record.peer, record.record, record.expires)
    assert (await stream.ask(Ask(KEY, bytes(8), 0, change))).held
    swarm.network.leave("h0")
    with pytest.raises(UnreachableError):
        await stream.ask(Ask(KEY, bytes(8), 0))


async def test_a_p2pd_that_just_ended_says_nothing_about_the_holders(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = swarm.watcher("a")
    ended = DaemonError("p2pd has ended")

    async def dial(self: PipeTransport, peer: PeerId, protocol: str, *, timeout_s: float) -> NoReturn:
        raise ended

    with monkeypatch.context() as down:
        down.setattr(PipeTransport, "dial", dial)
        assert await a.look(own(PEOPLE[0])) == 0
    assert not a.holding.forgotten
    assert await a.look(own(PEOPLE[0])) == HOLDERS
