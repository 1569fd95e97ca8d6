"""`GaslocOptimizer`: local steps, an exchange, an outer step, inside anybody's own training loop.

    optimizer = GaslocOptimizer(torch.optim.AdamW(model.parameters()), model, network=swarm, local_steps=30)
    for batch in batches:
        loss(model, batch).backward()
        optimizer.step()          # every 30th call also mixes with partners and takes the outer step
        optimizer.zero_grad()

One round (DESIGN: theta at its start, phi after the local steps, W this round's mixing weights):

    phi = inner(theta, H steps);   mix = sum_j W_ij phi_j;   theta = outer(theta, theta - mix)
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gasloc import mixing, named_state, rounds, topology
from gasloc.errors import ModelError, RunError, UsageError
from gasloc.outer import MakeOptimizer, OuterStep
from gasloc.replica import Replica, plain_name
from peers.exchange import Answer, Offer, PeerId, Slot, Swap, Tensors


class Network(Protocol):
    """What the optimizer sees of the swarm. `gasloc.swarm.Swarm` is one."""

    @property
    def me(self) -> PeerId: ...

    def members(self, round: int) -> Collection[PeerId]:
        """Those ready to mix near `round`, me included."""
        ...

    def swap(self, slot: Slot, offers: Mapping[PeerId, Offer], *, timeout_s: float) -> dict[PeerId, Swap]:
        """Trades with every partner at once and blocks until done; see `peers.exchange.Exchange.swap`."""
        ...

    def others_rounds(self) -> list[int]:
        """The rounds that the other members publish."""
        ...


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What happened at the end of one round."""

    round: int
    local_steps: int
    partners: tuple[PeerId, ...]
    """Those whose parameters went into the mix."""
    swaps: Mapping[PeerId, Swap]
    tried: bool
    """There was somebody to mix with."""
    mixed: bool
    reason: str
    distance: float | None
    """Mean over partners of ||phi_partner - phi|| / ||phi|| before mixing; None where nobody mixed."""
    exchange_s: float
    bytes_sent: int
    bytes_received: int
    next_round: int
    next_reason: str


def default_outer(anchor: list[Tensor]) -> Optimizer:
    """SGD with Nesterov momentum, learning rate 0.7, momentum 0.5."""
    return torch.optim.SGD(anchor, lr=0.7, momentum=0.5, nesterov=True)


class GaslocOptimizer(Optimizer):
    """A `torch.optim.Optimizer` around `inner` that makes the model one replica in a swarm.

    Each `step` is a step of `inner`; every `local_steps`-th also exchanges parameters and takes the outer
    step, on the calling thread. Parameter groups and state are those of `inner`, so learning-rate schedulers
    and gradient scalers work on either.

    What travels is fixed at construction: every parameter that requires a gradient (tied ones once, under
    their first name) and every persistent floating-point buffer. Parameters take the outer step; buffers are
    mixed plainly. Frozen parameters and integer buffers stay local. The anchor and the outer state are
    float32 (float64 for float64 parameters) and live in CPU memory, about twice the model in float32.

    `network=None` trains alone: with an outer learning rate of 1 and no momentum as `inner` would, to rounding.
    A partner that does not answer is left out; its weight goes to oneself. `on_round` is called on the
    training thread after each round, with the model at the next round's start.

    Raises `UsageError` for an unknown topology or `local_steps` below 1, and `ModelError` where `inner` holds
    a parameter that is not of `model` or `model` has nothing to train.
    """

    def __init__(
        self,
        inner: Optimizer,
        model: nn.Module,
        *,
        network: Network | None = None,
        topology: str = "2-peer",
        local_steps: int = 30,
        seed: int = 0,
        outer: MakeOptimizer | None = None,
        grace_s: float = 10.0,
        on_round: Callable[[RoundResult], None] | None = None,
    ) -> None:
        _check(topology, local_steps)
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self._share_groups(inner)
        # torch replaces the groups when it loads; ours must stay the same objects
        inner.register_load_state_dict_post_hook(self._share_groups)

        self.local_steps = local_steps
        """Local steps a round; may be changed at any time."""
        self.round = 0
        self.local_step = 0
        """Local steps taken in this round."""
        self._network = network
        self._topology = topology
        self._seed = seed
        self._grace_s = grace_s
        self._on_round = on_round
        self._replica = Replica(model)
        self._inner_parameters = _named_for(inner, model)
        self._anchor = self._replica.parameters()
        self._buffers = self._replica.buffers()
        self._outer = OuterStep(self._anchor, outer or default_outer)
        self._lock = threading.Lock()
        """Held while anchor, outer state and round change, so that `snapshot` sees one round or the next."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes one local step; after the round's last one, exchanges and takes the outer step.

        Then blocks for the exchange, up to the grace and the transfer itself, and sets gradients to None.
        Raises `RunError`, before anything is sent, when the parameters are not finite.
        """
        loss = self.inner.step(closure) if closure is not None else self.inner.step()
        self.local_step += 1
        if self.local_step >= self.local_steps:
            result = self._end_round()
            if self._on_round is not None:
                self._on_round(result)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, as `inner` does."""
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def _end_round(self) -> RoundResult:
        self.inner.zero_grad(set_to_none=True)
        phi = self._replica.moved(self._anchor)
        for name in self._anchor:
            if not phi[name].isfinite().all():
                raise RunError(
                    f"round {self.round}: parameter '{name}' is no longer finite, so nothing was sent; "
                    "lower the learning rate and resume from the last checkpoint"
                )
        started = time.perf_counter()
        weights, swaps = self._trade(phi)
        exchange_s = time.perf_counter() - started
        received: dict[PeerId, Tensors] = {}
        for peer, swap in swaps.items():
            if swap.tensors is None:
                continue
            spoiled = _spoiled(swap.tensors, phi)
            if spoiled is None:
                received[peer] = swap.tensors
            else:
                reason = f"it sent values in '{spoiled}' that are not finite"
                swaps[peer] = replace(swap, answer=Answer.REFUSED, reason=reason, tensors=None)
        distances = [mixing.distance(_only(self._anchor, phi), _only(self._anchor, t)) for t in received.values()]
        mix = mixing.mix(phi, received, weights, self._network.me if self._network else "")
        others = self._network.others_rounds() if self._network else []
        next_round, next_reason = rounds.next_round(self.round, others)
        result = RoundResult(
            round=self.round,
            local_steps=self.local_step,
            partners=tuple(received),
            swaps=swaps,
            tried=bool(swaps),
            mixed=bool(received),
            reason=_words(swaps, alone=self._network is None),
            distance=sum(distances) / len(distances) if distances else None,
            exchange_s=exchange_s,
            bytes_sent=sum(swap.bytes_sent for swap in swaps.values()),
            bytes_received=sum(swap.bytes_received for swap in swaps.values()),
            next_round=next_round,
            next_reason=next_reason,
        )
        with self._lock:
            self._outer.step(_only(self._anchor, mix))
            self._buffers = _only(self._buffers, mix)
            self.round, self.local_step = next_round, 0
        self._replica.assign(self._anchor, self._buffers)
        return result

    def _trade(self, phi: Tensors) -> tuple[dict[PeerId, float], dict[PeerId, Swap]]:
        """This round's weights, and what came of the trade with each partner in them."""
        network = self._network
        if network is None:
            return {"": 1.0}, {}
        members = {*network.members(self.round), network.me}
        weights = topology.row(self._topology, round=self.round, members=members, me=network.me, seed=self._seed)
        note = {"local_steps": float(self.local_step)}
        offers = {
            peer: Offer(send=phi, note=note) for peer, weight in weights.items() if peer != network.me and weight > 0
        }
        # with nobody to trade with this returns at once, and tells those who ask which round we are at
        return weights, dict(network.swap(Slot(self.round), offers, timeout_s=self._grace_s))

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
            self._outer.load_momentum(outer)
            self._take(anchor, buffers)
            self.round, self.local_step = round, 0
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
                "outer": named_state.hyperparameters(self._outer.optimizer, self._anchor),
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
            named_state.load_hyperparameters(self._outer.optimizer, self._anchor, meta["outer"])
            named_state.load_state_tensors(self.inner, self._inner_parameters, inner)
            self._outer.load_momentum(outer)
            self._take(anchor, buffers)
            self.round, self.local_step = int(meta["round"]), int(meta["local_step"])

    def _shared_state(self) -> dict[str, Tensor]:
        outer = self._outer.momentum_tensors()
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

    def _take(self, anchor: Tensors, buffers: Tensors) -> None:
        for name, tensor in self._anchor.items():
            tensor.copy_(anchor[name])
        self._buffers = {name: tensor.detach().clone() for name, tensor in buffers.items()}

    def _share_groups(self, inner: Optimizer) -> None:
        self.param_groups = inner.param_groups
        self.state = inner.state


def _check(name: str, local_steps: int) -> None:
    if local_steps < 1:
        raise UsageError(f"local_steps = {local_steps}: a round has at least 1 local step")
    topology.row(name, round=0, members=[""], me="", seed=0)


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


def _only(names: Iterable[str], tensors: Tensors) -> dict[str, Tensor]:
    return {name: tensors[name] for name in names}


def _spoiled(theirs: Tensors, ours: Tensors) -> str | None:
    """The first tensor of theirs that is not finite where ours is; a mask of ours may hold infinities."""
    for name, own in ours.items():
        if bool((~theirs[name].isfinite() & own.isfinite()).any()):
            return name
    return None


def _words(swaps: Mapping[PeerId, Swap], *, alone: bool) -> str:
    if alone:
        return "alone, by choice"
    if not swaps:
        return "nobody to mix with this round"
    failed = [f"{peer}: {swap.reason}" for peer, swap in sorted(swaps.items()) if swap.tensors is None]
    mixed = len(swaps) - len(failed)
    return f"mixed with {mixed} of {len(swaps)}" + "".join(f"; {reason}" for reason in failed)
