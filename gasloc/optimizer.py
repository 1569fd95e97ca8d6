"""`GaslocOptimizer`: local steps, an exchange, an outer step, inside anybody's own training loop.

    optimizer = GaslocOptimizer(torch.optim.AdamW(model.parameters()), model, network=swarm, local_steps=30)
    for batch in batches:
        loss(model, batch).backward()
        optimizer.step()          # every 30th call also mixes with partners and takes the outer step
        optimizer.zero_grad()

One round (DESIGN: theta at its start, phi after the local steps, W this round's mixing weights):

    phi = inner(theta, H steps);   mix = sum_j W_ij phi_j;   theta = outer(theta, theta - mix)

With `topology="syncer"` the model is a learner of Decoupled DiLoCo instead: see `gasloc.learner`.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gasloc import clipping, mixing, named_state, rounds
from gasloc import fragments as fragmentation
from gasloc import topology as topologies
from gasloc.errors import ModelError, RunError, UsageError
from gasloc.gossip import Exchanged, Network, Plan, exchange, joined
from gasloc.learner import MERGES, Learner, SyncerLink
from gasloc.outer import MakeOptimizer, OuterStep
from gasloc.replica import Replica, plain_name
from peers.exchange import Answer, PeerId, Slot, Swap, Tensors

__all__ = ["GaslocOptimizer", "Network", "RoundResult", "SyncerLink", "default_outer"]


_LAST = 0
"""The fragment at offset 0: due after the last step of the round, and the only one without fragments."""
_MOST_ROLLBACKS = 3
"""The rollback in a row, without a whole round between them, that ends the run."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What happened at the end of one round."""

    round: int
    local_steps: int
    partners: tuple[PeerId, ...]
    """Those whose parameters went into the mix."""
    swaps: Mapping[PeerId, Swap]
    """One a partner over all of the round's exchanges, without tensors."""
    mixes_tried: int
    """Mixes for which there was somebody to trade with; fragments that were due, for a learner."""
    mixes_done: int
    """Mixes into which at least one partner's parameters went; merged fragments taken, for a learner."""
    reason: str
    distance: float | None
    """||mix - phi|| / ||phi||: how far mixing moved this peer; None where nobody mixed."""
    exchange_s: float
    bytes_sent: int
    bytes_received: int
    next_round: int
    next_reason: str
    radius: float | None = None
    """How far from phi a partner may be before it is clipped, in the last exchange; None where nobody was measured."""
    excess: float | None = None
    """The farthest partner's distance in units of its radius; above 1 it was clipped. None as above."""
    clipped: Mapping[PeerId, float] = field(default_factory=dict)
    """Those that were clipped, with their largest excess."""
    rolled_back: int = 0
    """How often this peer put its own state back, since it was not finite."""

    @property
    def tried(self) -> bool:
        """There was somebody to mix with."""
        return self.mixes_tried > 0

    @property
    def mixed(self) -> bool:
        """Somebody's parameters went into the mix."""
        return self.mixes_done > 0


@dataclass(frozen=True, slots=True)
class _Part:
    """A fragment: tensors that travel together, and their outer step."""

    names: tuple[str, ...]
    outer: OuterStep


def default_outer(anchor: list[Tensor]) -> Optimizer:
    """SGD with Nesterov momentum, learning rate 0.7, momentum 0.5."""
    return torch.optim.SGD(anchor, lr=0.7, momentum=0.5, nesterov=True)


class GaslocOptimizer(Optimizer):
    """A `torch.optim.Optimizer` around `inner` that makes the model one replica in a swarm.

    Each `step` is a step of `inner`; every `local_steps`-th also exchanges parameters and takes the outer
    step, on the calling thread. Parameter groups and state are those of `inner`, so learning-rate schedulers
    and gradient scalers work on either.

    What travels is fixed at construction: every parameter that requires a gradient (tied ones once, under
    their first name) and every persistent floating-point buffer (masks that hold infinities apart). Parameters
    take the outer step; buffers are mixed plainly. Frozen parameters and integer buffers stay local. The anchor
    and the outer state are float32 (float64 for float64 parameters) and live in CPU memory, about twice the
    model in float32.

    `network=None` trains alone: with an outer learning rate of 1 and no momentum as `inner` would, to rounding.
    A partner that does not answer is left out; its weight goes to oneself. `on_round` is called on the
    training thread after each round, with the model at the next round's start.

    `mixes` partners are drawn one after another in each exchange. With `fragments` above 1 the model is cut into
    as many parts of whole tensors, each of which is exchanged and takes its outer step at its own step of the
    round (streaming, arXiv 2501.18512); buffers travel with the last, at the round's end.

    `topology="syncer"` makes the model a learner (Decoupled DiLoCo, arXiv 2604.21428): a fragment that is due is
    sent and training goes on; what the syncer made of it is applied at the first step after it came, and the
    progress since is kept. `overlap_steps` 0 waits for it instead. The syncer takes the outer steps, and weighs
    learners by `step_tokens`, the tokens of one local step; it may be changed at any time. Buffers stay local.
    While there is no syncer, the learner trains on.

    `mixing="clipped"` shortens partners' differences to a radius from recent history before they are mixed
    (`gasloc.clipping`), so that nobody can pull this peer far; nothing changes, bit for bit, while all are near.
    `"average"` takes everything that is finite as it comes.

    Parameters that are not finite when they are due are put back as they were at the round's start, and the round
    goes on; see `roll_back`.

    Raises `UsageError` for an unknown topology, counts below 1 or more fragments than tensors or steps, and
    `ModelError` where `inner` holds a parameter that is not of `model` or `model` has nothing to train.
    """

    def __init__(
        self,
        inner: Optimizer,
        model: nn.Module,
        *,
        network: Network | SyncerLink | None = None,
        topology: str = "2-peer",
        local_steps: int = 30,
        mixes: int = 1,
        fragments: int = 1,
        seed: int = 0,
        outer: MakeOptimizer | None = None,
        grace_s: float = 10.0,
        overlap_steps: int = 2,
        step_tokens: float = 1.0,
        mixing: Literal["clipped", "average"] = "clipped",
        on_round: Callable[[RoundResult], None] | None = None,
    ) -> None:
        _check(topology, local_steps, mixes, mixing)
        fragmentation.offsets(fragments, local_steps)
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self._inner_starts_empty = not inner.state
        self._share_groups(inner)
        # torch replaces the groups when it loads; ours must stay the same objects
        inner.register_load_state_dict_post_hook(self._share_groups)

        self.local_steps = local_steps
        """Local steps a round; may be changed at any time."""
        self.round = 0
        self.local_step = 0
        """Local steps taken in this round."""
        self.step_tokens = step_tokens
        self._network = _gossip_network(topology, network)
        self._overlap_steps = overlap_steps
        self._plan = Plan(topology, seed, mixes, grace_s)
        self._on_round = on_round
        self._replica = Replica(model)
        self._inner_parameters = _named_for(inner, model)
        self._anchor = self._replica.parameters()
        self._buffers = self._replica.buffers()
        self._parts = _cut(self._anchor, fragments, outer or default_outer)
        self._clipping = mixing == "clipped"
        self._reference_steps = local_steps
        self._histories: list[tuple[float, ...]] = [()] * len(self._parts)
        """Accepted distances of each fragment, the latest last; see `gasloc.clipping.radius`."""
        self._rollbacks_in_row = 0
        self._link = _syncer_link(topology, network)
        self._learner = Learner([part.names for part in self._parts], self._link) if self._link else None
        self._begin_round()
        self._lock = threading.Lock()
        """Held while anchor, outer state and round change, so that `snapshot` sees one round or the next."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes one local step; where a fragment is due, exchanges it and takes its outer step.

        Then blocks for the exchange, up to the grace and the transfer itself, and sets gradients to None.
        Without fragments all is due after the round's last step. Raises `RunError`, before anything is sent,
        when the parameters are not finite for the third time in a row.
        """
        loss = self.inner.step(closure) if closure is not None else self.inner.step()
        self.local_step += 1
        if self._learner is not None:
            self._learn(self._learner)
            return loss
        for index in self._due():
            mix = self._mixed(index)
            if index != _LAST:
                with self._lock:
                    self._take_outer_step(index, mix)
                continue
            result = self._end_round(mix)
            if self._on_round is not None:
                self._on_round(result)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, as `inner` does."""
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def roll_back(self, why: str) -> None:
        """Puts the model back as it was at the round's start, and empties the inner optimizer's state.

        For a state that is no longer finite, which `step` looks for where parameters are due; a loop of one's own
        may call it at once where its loss is not finite. The moments are emptied, not restored: what made the
        parameters infinite is in them too, and a copy would cost twice the model. The local steps of the round so
        far are lost but counted, so the round goes on and nobody waits for this peer. Raises `RunError` with
        `why` at the third time without a round between that needed none.
        """
        self._rollbacks_in_row += 1
        if self._rollbacks_in_row >= _MOST_ROLLBACKS:
            raise RunError(
                f"round {self.round}: {why}, for the {_MOST_ROLLBACKS}rd time in a row; "
                "lower the learning rate and resume from the last checkpoint"
            )
        self._rollbacks.append(why)
        if self._learner is not None:
            self._learner.forget()
        self._replica.assign(self._anchor, self._buffers)
        self._reset_inner()
        self.inner.zero_grad(set_to_none=True)

    def _reset_inner(self) -> None:
        if self._inner_starts_empty:  # it makes its state when it needs it
            self.inner.state.clear()
            return
        for state in self.inner.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    value.zero_()
                elif isinstance(value, int | float):
                    state[key] = type(value)(0)

    def settle(self, timeout_s: float) -> None:
        """As a learner, has the syncer merge all that is left, and takes it: waits twice `timeout_s` at most.

        For the end of a run; does nothing in other topologies.
        """
        learner = self._learner
        if learner is None:
            return
        learner.wait(timeout_s)
        self._take_merges(learner)
        names = [name for index in learner.unreported for name in self._parts[index].names]
        if names:
            phi = self._moved(names)
            for index in learner.unreported:
                learner.report(index, phi, max(self.round - 1, 0))
            learner.wait(timeout_s)
            self._take_merges(learner)

    def _due(self) -> list[int]:
        """The fragments to exchange after this local step, in the order of their turns."""
        count = len(self._parts)
        if self.local_steps < count:  # a peer that takes few steps: all at once
            return [*range(1, count), _LAST] if self.local_step >= self.local_steps else []
        return fragmentation.due(min(self.local_step, self.local_steps), self.local_steps, count)

    def _begin_round(self) -> None:
        self._exchanged: list[Exchanged] = []
        self._exchange_s = 0.0
        self._moved_squared = self._size_squared = 0.0
        self._radius: float | None = None
        self._radius_reason = ""
        self._rollbacks: list[str] = []

    @torch.no_grad()
    def _mixed(self, index: int) -> Tensors:
        """Fragment `index` after mixing it with this round's partners. The last one brings the buffers."""
        self.inner.zero_grad(set_to_none=True)
        part = self._parts[index]
        names = (*part.names, *self._buffers) if index == _LAST else part.names
        phi = self._moved(names)
        return self._trade(index, phi) if self._network is not None else phi

    def _moved(self, names: Iterable[str]) -> dict[str, Tensor]:
        """phi of these names; after a rollback where it was not finite."""
        wanted = tuple(names)
        phi = _only(wanted, self._replica.moved(self._anchor))
        broken = _not_finite(phi)
        if broken is None:
            return phi
        self.roll_back(f"'{broken}' of the model is no longer finite")
        phi = _only(wanted, self._replica.moved(self._anchor))
        broken = _not_finite(phi)
        if broken is not None:
            raise RunError(
                f"round {self.round}: '{broken}' was not finite at the round's start already, so nothing was sent; "
                "resume from the last checkpoint"
            )
        return phi

    @torch.no_grad()
    def _learn(self, learner: Learner) -> None:
        """After a learner's local step: takes what came, reports what is due, ends the round at its last step."""
        learner.count_step(self.step_tokens)
        self._take_merges(learner)
        due = self._due()
        if not due:
            return
        phi = self._moved(name for index in due for name in self._parts[index].names)
        for index in due:
            learner.report(index, phi, self.round)
        if self._overlap_steps == 0:
            started = time.perf_counter()
            learner.wait(math.inf)
            self._exchange_s += time.perf_counter() - started
            self._take_merges(learner)
        if _LAST in due:
            result = self._end_learners_round(learner)
            if self._on_round is not None:
                self._on_round(result)

    @torch.no_grad()
    def _take_merges(self, learner: Learner) -> None:
        if not learner.arrived():
            return
        current = self._moved(self._anchor)  # the progress since is kept, so it must be finite
        with self._lock:
            values = learner.take(current)
            for name, value in values.items():
                self._anchor[name].copy_(value)
        self._replica.assign(values, {})

    def _end_learners_round(self, learner: Learner) -> RoundResult:
        assert self._link is not None, "a learner has a link"
        outcome = learner.end_round()
        next_round, next_reason = rounds.next_round(self.round, self._link.others_rounds())
        result = RoundResult(
            round=self.round,
            local_steps=self.local_step,
            partners=tuple(outcome.swaps),
            swaps=outcome.swaps,
            mixes_tried=outcome.reported,
            mixes_done=outcome.merged,
            reason=outcome.reason + _rollback_words(self._rollbacks),
            distance=outcome.distance,
            exchange_s=self._exchange_s,
            bytes_sent=sum(swap.bytes_sent for swap in outcome.swaps.values()),
            bytes_received=sum(swap.bytes_received for swap in outcome.swaps.values()),
            next_round=next_round,
            next_reason=next_reason,
            rolled_back=len(self._rollbacks),
        )
        self._count_rollbacks()
        with self._lock:
            self.round, self.local_step = next_round, 0
        self._begin_round()
        return result

    def _count_rollbacks(self) -> None:
        if not self._rollbacks:
            self._rollbacks_in_row = 0

    @torch.no_grad()
    def _take_outer_step(self, index: int, mix: Tensors) -> None:
        part = self._parts[index]
        part.outer.step(_only(part.names, mix))
        if index == _LAST:
            self._buffers = _only(self._buffers, mix)
        self._replica.assign(_only(part.names, self._anchor), self._buffers if index == _LAST else {})

    def _trade(self, index: int, phi: Tensors) -> Tensors:
        """What mixing with this round's partners makes of `phi`."""
        assert self._network is not None, "a peer without a network does not trade"
        started = time.perf_counter()
        phase = f"fragment-{index}-" if len(self._parts) > 1 else ""
        # fragments are due in the order 1, 2, ..., and 0 at the end
        turn = (index - 1) % len(self._parts)
        radius = self._choose_radius(index, phi) if self._clipping else math.inf
        exchanged = exchange(
            self._network,
            self._plan,
            phi,
            Slot(self.round, turn, phase),
            members=self._network.members(self.round),
            note={"local_steps": float(self.local_step)},
            radius=radius,
            start=_only(phi, {**self._anchor, **self._buffers}),
        )
        self._exchange_s += time.perf_counter() - started
        self._exchanged.append(exchanged)
        self._histories[index] = clipping.remembered(self._histories[index], [clip for _, clip in exchanged.clips])
        if exchanged.mixes_done:
            size_squared = mixing.squared_norm(phi)
            self._moved_squared += mixing.distance(phi, exchanged.mix) ** 2 * size_squared
            self._size_squared += size_squared
        return exchanged.mix

    def _choose_radius(self, index: int, phi: Tensors) -> float:
        start = _only(phi, {**self._anchor, **self._buffers})
        moved = clipping.apart(start, phi) * clipping.pace_allowance(self.local_steps, self._reference_steps)
        self._radius, self._radius_reason = clipping.radius(self._histories[index], moved)
        return self._radius

    def _end_round(self, mix: Tensors) -> RoundResult:
        swaps: dict[PeerId, Swap] = {}
        for exchanged in self._exchanged:
            for peer, swap in exchanged.swaps.items():
                swaps[peer] = joined(swaps[peer], swap) if peer in swaps else swap
        measured = [clip for exchanged in self._exchanged for clip in exchanged.clips]
        clipped: dict[PeerId, float] = {}
        for peer, clip in measured:
            if clip.shortened:
                clipped[peer] = max(clip.excess, clipped.get(peer, 0.0))
        others = self._network.others_rounds() if self._network else []
        next_round, next_reason = rounds.next_round(self.round, others)
        tried = sum(exchanged.mixes_tried for exchanged in self._exchanged)
        done = sum(exchanged.mixes_done for exchanged in self._exchanged)
        result = RoundResult(
            round=self.round,
            local_steps=self.local_step,
            partners=tuple(dict.fromkeys(peer for exchanged in self._exchanged for peer in exchanged.partners)),
            swaps=swaps,
            mixes_tried=tried,
            mixes_done=done,
            reason=_words(swaps, alone=self._network is None)
            + self._clip_words(clipped)
            + _rollback_words(self._rollbacks),
            distance=(self._moved_squared / self._size_squared) ** 0.5 if self._size_squared else None,
            exchange_s=self._exchange_s,
            bytes_sent=sum(swap.bytes_sent for swap in swaps.values()),
            bytes_received=sum(swap.bytes_received for swap in swaps.values()),
            next_round=next_round,
            next_reason=next_reason,
            radius=self._radius if measured else None,
            excess=max((clip.excess for _, clip in measured), default=None),
            clipped=clipped,
            rolled_back=len(self._rollbacks),
        )
        self._count_rollbacks()
        with self._lock:
            self._take_outer_step(_LAST, mix)
            self.round, self.local_step = next_round, 0
        self._begin_round()
        return result

    def _clip_words(self, clipped: Mapping[PeerId, float]) -> str:
        far = ", ".join(f"{peer} at {excess:.3g}" for peer, excess in sorted(clipped.items()))
        return f"; clipped {far} times the radius, {self._radius:.3g}: {self._radius_reason}" if far else ""

    def snapshot(self) -> tuple[int, dict[str, Tensor]]:
        """This round and its state, for a newcomer: `anchor/NAME`, `buffer/NAME`, `outer/KEY/NAME`.

        Copies; may be called from any thread at any time.
        """
        with self._lock:
            state = {name: tensor.clone() for name, tensor in self._shared_state().items()}
            return self.round, state

    @torch.no_grad()
    def load_snapshot(self, round: int, tensors: Tensors) -> None:
        """Takes over a state from `snapshot`: the model becomes the anchor, at the start of `round`.

        The inner optimizer keeps its own moments. Raises `ModelError` that names the first tensor that is
        missing, unknown, not finite or of another shape or dtype; nothing was changed then. To be called
        from the training thread.
        """
        anchor, buffers, outer = self._checked(tensors)
        with self._lock:
            self._load_outer(outer)
            self._take(anchor, buffers)
            self.round, self.local_step = round, 0
        self._begin_round()
        self._replica.assign(self._anchor, self._buffers)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resume needs besides the model's own `state_dict`, at any step of a round.

        `{"meta": plain values fit for JSON, "tensors": named tensors}`; tensors are references, as is usual
        in torch. `gasloc.checkpoint.save` writes the two without pickling.
        """
        inner = named_state.state_tensors(self.inner, self._inner_parameters)
        return {
            "meta": {
                "round": self.round,
                "local_step": self.local_step,
                "inner": named_state.hyperparameters(self.inner, self._inner_parameters),
                "outer": [named_state.hyperparameters(p.outer.optimizer, self._anchor) for p in self._parts],
                "learner": self._learner.counts() if self._learner else None,
            },
            "tensors": self._shared_state() | {f"inner/{name}": tensor for name, tensor in inner.items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken, bit for bit; load the model's own state too.

        Raises `ModelError` for a state of another model or optimizer, naming the first difference.
        """
        meta, tensors = state_dict["meta"], state_dict["tensors"]
        inner = _under("inner/", tensors)
        anchor, buffers, outer = self._checked({n: t for n, t in tensors.items() if not n.startswith("inner/")})
        with self._lock:
            named_state.load_hyperparameters(self.inner, self._inner_parameters, meta["inner"])
            if len(meta["outer"]) != len(self._parts):
                raise ModelError(f"the state was saved in {len(meta['outer'])} fragments, not {len(self._parts)}")
            for part, values in zip(self._parts, meta["outer"], strict=True):
                named_state.load_hyperparameters(part.outer.optimizer, self._anchor, values)
            named_state.load_state_tensors(self.inner, self._inner_parameters, inner)
            self._load_outer(outer)
            if self._learner is not None:
                self._learner.load_counts(meta["learner"])
            self._take(anchor, buffers)
            self.round, self.local_step = int(meta["round"]), int(meta["local_step"])

    def _shared_state(self) -> dict[str, Tensor]:
        outer = {name: tensor for part in self._parts for name, tensor in part.outer.momentum_tensors().items()}
        if self._learner is not None:
            outer = {MERGES: self._learner.merges()}
        return (
            {f"anchor/{name}": tensor.detach() for name, tensor in self._anchor.items()}
            | {f"buffer/{name}": tensor for name, tensor in self._buffers.items()}
            | {f"outer/{name}": tensor for name, tensor in outer.items()}
        )

    def _checked(self, tensors: Tensors) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """Anchor, buffers and outer state out of a snapshot, each tensor of the right name, shape and dtype."""
        anchor, buffers = _under("anchor/", tensors), _under("buffer/", tensors)
        outer = _under("outer/", tensors)
        _check_layout("anchor", self._anchor, anchor)
        _check_layout("buffer", self._buffers, buffers)
        for name in sorted(tensors):
            if not name.startswith(("anchor/", "buffer/", "outer/")):
                raise ModelError(f"'{name}' is no part of this state")
            if not name.startswith("buffer/") and not torch.isfinite(tensors[name]).all():
                raise ModelError(f"'{name}' is not finite")
        return anchor, buffers, outer

    def _load_outer(self, tensors: Tensors) -> None:
        """Each fragment's outer state, or none of it. Raises `ModelError`."""
        if self._learner is not None:
            if tensors.keys() != {MERGES}:
                raise ModelError(f"a learner's outer state is '{MERGES}' alone, not {sorted(tensors)[:3]}")
            self._learner.restart(tensors[MERGES])
            return
        by_parameter: dict[str, dict[str, Tensor]] = {name: {} for name in self._anchor}
        for label, tensor in tensors.items():
            name = label.partition("/")[2]
            if name not in by_parameter:
                raise ModelError(f"outer state '{label}' is of no parameter of this model")
            by_parameter[name][label] = tensor
        before = [part.outer.momentum_tensors() for part in self._parts]
        try:
            for part in self._parts:
                part.outer.load_momentum({n: t for name in part.names for n, t in by_parameter[name].items()})
        except ModelError:
            for part, state in zip(self._parts, before, strict=True):
                part.outer.load_momentum(state)
            raise

    def _take(self, anchor: Tensors, buffers: Tensors) -> None:
        for name, tensor in self._anchor.items():
            tensor.copy_(anchor[name])
        self._buffers = {name: tensor.detach().clone() for name, tensor in buffers.items()}

    def _share_groups(self, inner: Optimizer) -> None:
        self.param_groups = inner.param_groups
        self.state = inner.state


def _check(topology: str, local_steps: int, mixes: int, mixing: str) -> None:
    if local_steps < 1:
        raise UsageError(f"local_steps = {local_steps}: a round has at least 1 local step")
    if mixes < 1:
        raise UsageError(f"mixes = {mixes}: an exchange has at least 1")
    if mixing not in ("clipped", "average"):
        raise UsageError(f"mixing = '{mixing}' is unknown: choose 'clipped' or 'average'")
    if topology != "syncer":
        topologies.row(topology, round=0, members=[""], me="", seed=0)


def _gossip_network(topology: str, network: Network | SyncerLink | None) -> Network | None:
    if topology == "syncer" or network is None:
        return None
    if not isinstance(network, Network):
        raise UsageError(f"topology = '{topology}' needs a network that can swap: see gasloc.gossip.Network")
    return network


def _syncer_link(topology: str, network: Network | SyncerLink | None) -> SyncerLink | None:
    if topology != "syncer":
        return None
    if not isinstance(network, SyncerLink):
        raise UsageError("topology = 'syncer' needs a network with a syncer, which takes the outer steps")
    return network


def _cut(anchor: dict[str, Tensor], count: int, make: MakeOptimizer) -> tuple[_Part, ...]:
    sizes_bytes = {name: tensor.numel() * tensor.element_size() for name, tensor in anchor.items()}
    return tuple(
        _Part(names, OuterStep(_only(names, anchor), make))
        for names in fragmentation.fragment(sizes_bytes, count).parts
    )


def _named_for(inner: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The inner optimizer's parameters by the model's names for them."""
    held = {id(parameter) for group in inner.param_groups for parameter in group["params"]}
    named: dict[str, Tensor] = {plain_name(n): p for n, p in model.named_parameters() if id(p) in held}
    if len(named) < len(held):
        raise ModelError(
            f"the inner optimizer holds {len(held) - len(named)} parameters that are not of the model: "
            "make it of the model's own parameters"
        )
    return named


def _under(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _check_layout(kind: str, ours: Tensors, theirs: Tensors) -> None:
    for name in sorted({*ours, *theirs}):
        if name not in theirs:
            raise ModelError(f"{kind} '{name}' of this model is missing in the state")
        if name not in ours:
            raise ModelError(f"{kind} '{name}' of the state is not in this model")
        own, their = ours[name], theirs[name]
        if own.shape != their.shape or own.dtype != their.dtype:
            raise ModelError(
                f"{kind} '{name}' is {tuple(own.shape)} {own.dtype} in this model, "
                f"{tuple(their.shape)} {their.dtype} in the state"
            )


def _not_finite(tensors: Tensors) -> str | None:
    return next((name for name, tensor in tensors.items() if not tensor.isfinite().all()), None)


def _rollback_words(rollbacks: Sequence[str]) -> str:
    return "".join(f"; rolled back to the round's start: {why}" for why in rollbacks)


def _only(names: Iterable[str], tensors: Tensors) -> dict[str, Tensor]:
    return {name: tensors[name] for name in names}


def _words(swaps: Mapping[PeerId, Swap], *, alone: bool) -> str:
    if alone:
        return "alone, by choice"
    if not swaps:
        return "nobody to mix with this round"
    failed = [f"{peer}: {swap.reason}" for peer, swap in sorted(swaps.items()) if swap.answer is not Answer.ACCEPT]
    mixed = len(swaps) - len(failed)
    return f"mixed with {mixed} of {len(swaps)}" + "".join(f"; {reason}" for reason in failed)
