"""The other members of a run, as this peer sees them: with whom it deals, whom it pairs with, who is set aside."""

import time
from collections.abc import Callable, Collection, Mapping

from gasloc import rounds
from gasloc.confirmation import LEAST_PARTNERS, Confirmation
from gasloc.offences import Offences, SetAside, with_silent
from gasloc.round_result import RoundResult
from gasloc.rounds import APART_S
from gasloc.turns import Turns
from peers.errors import UnreachableError
from peers.exchange import Answer, PeerId, Swap
from peers.membership import Member, MemberState
from peers.node import Peer
from peers.reachability import standing_of, tradable

MOST_LEFT_OUT = 64
"""Members that are not dealt with are told one by one up to so many: ids cost a stranger nothing."""

FAR_EXCESS = 10.0
"""A partner that was clipped from so many radii counts as one that errs."""

_SILENT = frozenset({Answer.UNREACHABLE, Answer.TIMEOUT, Answer.BROKEN})


class Company:
    """A view of the others; every call looks at the members as they are known now.

    Members that count for pairing have this run's recipe, are training or waiting, and are at most
    `stale_rounds` rounds away: one further behind takes fresh state before it mixes again.
    """

    def __init__(self, peer: Peer, *, digest: str, stale_rounds: int) -> None:
        """`digest`: of the run's recipe."""
        self.on_left_out: Callable[[str], None] | None = None
        """Called once for each member that is not dealt with, with the reason in words."""
        self.on_set_aside: Callable[[PeerId, SetAside], None] | None = None
        """Called when a peer that erred again is left alone for a while."""
        self._peer = peer
        self._digest = digest
        self._stale_rounds = stale_rounds
        self._left_out: set[PeerId] = set()
        self._unpaired: set[PeerId] = set()
        """Those that we cannot trade with, as neither they nor we can be dialled."""
        self._heard: dict[PeerId, int] = {}
        """The rounds that partners answered last."""
        self._met: dict[PeerId, float] = {}
        """When we traded with each last, by `time.monotonic`."""
        self._since = time.monotonic()
        """When this peer took the state that it goes on from."""
        self._offences = Offences()
        self.confirmation = Confirmation()
        """What partners say of the state that we downloaded."""

    def others(self) -> dict[PeerId, Member]:
        """The other members of this run that are alive and that we deal with, whatever their state."""
        return {
            peer: member
            for peer, member in self._peer.membership.members().items()
            if peer != self._peer.peer_id and not self._leaves_out(member) and member.digest == self._digest
        }

    def pairable(self, round: int) -> set[PeerId]:
        """Those that may be paired in `round`, this peer included; those alone whose turn it is (`gasloc.turns`)."""
        turns = self.turns(round)
        return {peer for peer, its in turns.items() if its.has(round)} | {self._peer.peer_id}

    def turns(self, round: int) -> dict[PeerId, Turns]:
        """The turns of those that may be paired in `round` when it is theirs; this peer not among them.

        Two that cannot be dialled are not, unless relays carry both; `on_left_out` is told why.
        """
        barred = self._offences.barred(time.monotonic())
        near = {
            peer: standing_of(member)
            for peer, member in self.training().items()
            if abs(member.status.round - round) <= self._stale_rounds and peer not in barred
        }
        can, why_not = tradable(self._peer.standing, near)
        for peer in sorted(why_not.keys() - self._unpaired)[:MOST_LEFT_OUT]:
            if self.on_left_out is not None:
                self.on_left_out(f"not paired with {peer}: {why_not[peer]}")
        self._unpaired = set(why_not)
        known = {peer: member.status for peer, member in self.training().items() if peer in can}
        return {peer: Turns(status.trade_every, status.trade_round) for peer, status in known.items()}

    def rounds(self) -> list[int]:
        """The rounds that the other training members published or answered last."""
        return list(self._rounds().values())

    def rounds_apart(self, mine: int) -> list[int]:
        """As `rounds`, for a peer in round `mine` that asks whether it went on without the others.

        Whoever traded with us less than `APART_S` ago counts as in round `mine`, and so does everybody for so long
        after this peer came, or took fresh state.
        """
        return rounds.apart(mine, self._rounds(), self._met, self._since, before_s=time.monotonic() - APART_S)

    def take_note(self, swaps: Mapping[PeerId, Swap]) -> None:
        """Of how trades went: who erred, who is silent, and in which round a partner is."""
        for peer, swap in swaps.items():
            if swap.answer is Answer.ACCEPT:
                self._met[peer] = time.monotonic()
            if swap.at_fault:
                self._count_offence(peer, swap.reason)
            if swap.answer in _SILENT:
                self._peer.membership.set_aside(peer, swap.reason)
            if swap.their_round is not None:
                # fresher than its record, which we look at once a second
                self._heard[peer] = swap.their_round

    def set_aside(self) -> dict[PeerId, SetAside]:
        """Peers that erred, and those that could not be reached or did not answer; `until` by `time.monotonic`.

        One that erred sent values that are not finite, tensors of another layout or garbled frames, or lay more than
        `FAR_EXCESS` radii away. The first time has no consequence; from the second on this peer does not pair
        with it, for 30 s and then twice as long each time (`gasloc.offences`). A clean trade takes one off.

        Silence is no offence: the count is 0 where there is nothing else. It lasts until the peer publishes again, and
        `until` its last record runs out otherwise.
        """
        now = time.monotonic()
        silent = {peer: (why, now + left_s) for peer, (why, left_s) in self._peer.membership.left_aside().items()}
        return with_silent(self._offences.standing(), silent)

    def rejected_records(self) -> int:
        """Members' records that were refused so far: junk, forged, too large, of another run."""
        return self._peer.rejected_records

    def judge(self, result: RoundResult) -> None:
        """Counts a partner that lay far from us in the round as one that errs, and forgives the others a little."""
        for peer in result.partners:
            excess = result.clipped.get(peer, 0.0)
            self.confirmation.hear(peer, far=excess > FAR_EXCESS)
            if excess > FAR_EXCESS:
                self._count_offence(peer, f"its parameters were {excess:.3g} times the radius away from ours")
            else:
                self._offences.forgive(peer)

    def begin_anew(self, donors: Collection[PeerId]) -> None:
        """A state was taken from these donors: what was held against others by the one before counts no more."""
        self._since = time.monotonic()
        self._offences = Offences()
        self.confirmation.begin(donors)

    def in_doubt(self) -> bool:
        """Whether our state waits to be confirmed, and there are enough others that could."""
        return self.confirmation.open and len(self.training()) >= LEAST_PARTNERS

    def _rounds(self) -> dict[PeerId, int]:
        return {peer: max(member.status.round, self._heard.get(peer, 0)) for peer, member in self.training().items()}

    def _count_offence(self, peer: PeerId, what: str) -> None:
        now = time.monotonic()
        if peer in self._offences.barred(now):  # known, and not asked for: it came to us
            return
        follows = self._offences.add(peer, what, now)
        if follows.until > now and self.on_set_aside is not None:
            self.on_set_aside(peer, follows)

    def _leaves_out(self, member: Member) -> bool:
        """Whether a member is not dealt with: see `peers.access`."""
        reason = self._peer.objection(member)
        if reason is not None and member.peer_id not in self._left_out and len(self._left_out) < MOST_LEFT_OUT:
            self._left_out.add(member.peer_id)
            if self.on_left_out is not None:
                self.on_left_out(f"left out of this run: {reason}")
        return reason is not None

    def syncer(self) -> PeerId:
        """The run's syncer; on the network thread."""
        syncers = [peer for peer, member in self.others().items() if member.status.state is MemberState.MERGING]
        if not syncers:
            raise UnreachableError("no syncer is seen in the run")
        return min(syncers)

    def training(self) -> dict[PeerId, Member]:
        """Those of the others that train, or wait for a partner."""
        return {
            peer: member
            for peer, member in self.others().items()
            if member.status.state in (MemberState.TRAINING, MemberState.WAITING)
        }
