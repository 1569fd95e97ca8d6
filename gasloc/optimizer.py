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

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gasloc import fragments as fragmentation
from gasloc import named_state
from gasloc import topology as topologies
from gasloc.errors import ModelError, UsageError
from gasloc.gossip import Network, Plan
from gasloc.gossip_rounds import GossipRounds
from gasloc.learner import Learner, SyncerLink
from gasloc.learner_rounds import LearnerRounds
from gasloc.outer import MakeOptimizer
from gasloc.overlap import Choice, Overlap, resolved
from gasloc.progress import Progress
from gasloc.radii import MixingRule, Radii
from gasloc.replica import Replica, plain_name
from gasloc.rollback import Rollback
from gasloc.round_result import RoundResult
from gasloc.shared_state import SharedState, cut, under
from peers.exchange import Tensors

__all__ = ["GaslocOptimizer", "Network", "RoundResult", "SyncerLink", "default_outer"]


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
    A partner that does not answer is left out; its weight goes to oneself. Where all partners are in a later round, by
    `stale_rounds` at most, this peer mixes in theirs and goes on from there. `on_round` is called on the
    training thread after each round, with the model at the next round's start.

    `mixes` partners are drawn one after another in each exchange. With `fragments` above 1 the model is cut into
    as many parts of whole tensors, each of which is exchanged and takes its outer step at its own step of the
    round (streaming, arXiv 2501.18512); buffers travel with the last, at the round's end.

    `overlap` has training go on during an exchange (`gasloc.overlap`): "off" waits; a number waits only after so many
    local steps; "auto" decides by this peer's own measured times. What is due is copied and exchanged on a thread of
    its own, and the outcome is taken in the first `step` after it came; the progress since is kept. `round` counts
    on when the last fragment is sent, and `on_round` hears of the round when its last outcome is taken. Call
    `take_outcomes` before the model is used apart from training.

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
        stale_rounds: int = 5,
        overlap: Overlap = "off",
        overlap_steps: int = 2,
        step_tokens: float = 1.0,
        mixing: MixingRule = "clipped",
        on_round: Callable[[RoundResult], None] | None = None,
    ) -> None:
        progress = Progress(local_steps, step_tokens)
        on_round = on_round or _unheard
        _check(topology, mixes, mixing)
        fragmentation.offsets(fragments, local_steps)
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self._share_groups(inner)
        # torch replaces the groups when it loads; ours must stay the same objects
        inner.register_load_state_dict_post_hook(self._share_groups)

        self._progress = progress
        self._replica = Replica(model)
        self._inner_parameters = _named_for(inner, model)
        anchor = self._replica.parameters()
        parts = cut(anchor, fragments, outer or default_outer)
        link = _syncer_link(topology, network)
        self._learner = Learner([part.names for part in parts], link) if link else None
        self._state = SharedState(anchor, self._replica.buffers(), parts, self._learner)
        self._rollback = Rollback(inner, self._replica, self._state, progress)
        self._rounds: GossipRounds | LearnerRounds
        if link is not None and self._learner is not None:
            self._rounds = LearnerRounds(
                self._learner,
                link,
                self._replica,
                self._state,
                self._rollback,
                progress,
                blocking=overlap_steps == 0,
                on_round=on_round,
            )
        else:
            self._rounds = GossipRounds(
                _gossip_network(topology, network),
                Plan(topology, seed, mixes, grace_s, stale_rounds),
                inner,
                self._replica,
                self._state,
                self._rollback,
                progress,
                Radii(mixing, fragments),
                Choice(resolved(overlap, topology), local_steps, fragments),
                on_round,
            )

    @property
    def round(self) -> int:
        """The round in which local steps are taken now."""
        return self._progress.round

    @property
    def local_step(self) -> int:
        """Local steps taken in this round."""
        return self._progress.local_step

    @property
    def local_steps(self) -> int:
        """Local steps a round; may be changed at any time."""
        return self._progress.local_steps

    @local_steps.setter
    def local_steps(self, count: int) -> None:
        self._progress.local_steps = count

    @property
    def step_tokens(self) -> float:
        """The tokens of one local step, by which a syncer weighs a learner; may be changed at any time."""
        return self._progress.step_tokens

    @step_tokens.setter
    def step_tokens(self, tokens: float) -> None:
        self._progress.step_tokens = tokens

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes one local step; where a fragment is due, exchanges it and takes its outer step.

        Then blocks for the exchange, up to the grace and the transfer itself, and sets gradients to None; with
        overlap it blocks only for an exchange that takes longer than that allows, or whose fragment is due again.
        Without fragments all is due after the round's last step. Raises `RunError`, before anything is sent,
        when the parameters are not finite for the third time in a row, and what an exchange raised.
        """
        loss = self.inner.step(closure) if closure is not None else self.inner.step()
        self._progress.local_step += 1
        self._rounds.after_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, as `inner` does."""
        self.inner.zero_grad(set_to_none)

    def roll_back(self, why: str) -> None:
        """Puts the model back as it was at the round's start, and empties the inner optimizer's state.

        For a state that is no longer finite, which `step` looks for where parameters are due; a loop of one's own
        may call it at once where its loss is not finite. The moments are emptied, not restored: what made the
        parameters infinite is in them too, and a copy would cost twice the model. The local steps of the round so
        far are lost but counted, so the round goes on and nobody waits for this peer. Raises `RunError` with
        `why` at the third time without a round between that needed none.
        """
        self._rollback.back(why)

    def settle(self, timeout_s: float) -> None:
        """As a learner, has the syncer merge all that is left, and takes it: waits twice `timeout_s` at most.

        In other topologies, takes the outcome of every exchange that is under way. For the end of a run.
        """
        self._rounds.settle(timeout_s)

    def take_outcomes(self) -> None:
        """Takes the outcome of every exchange that is under way, which ends by itself in bounded time.

        For a stop, or before the model is used apart from training: with overlap, training goes on meanwhile.
        """
        self._rounds.take_outcomes()

    def snapshot(self) -> tuple[int, dict[str, Tensor]]:
        """This round and its state, for a newcomer: `anchor/NAME`, `buffer/NAME`, `outer/KEY/NAME`.

        Copies; may be called from any thread at any time. While the outcome of a round's last exchange is not taken,
        that is the start of that round; never a part of an outer step.
        """
        return self._state.snapshot()

    def load_snapshot(self, round: int, tensors: Tensors) -> None:
        """Takes over a state from `snapshot`: the model becomes the anchor, at the start of `round`.

        An earlier round than this replica's is gone through again; the network must be told, as `Swarm` does. The
        inner optimizer keeps its own moments. Exchanges under way are waited for and dropped. Raises `ModelError`
        that names the first tensor that is missing, unknown, not finite or of another shape or dtype; nothing was
        changed then. To be called from the training thread.
        """
        self._state.check(tensors)
        self._rounds.drop()
        if round < self.round:
            self._rounds.step_back()
        self._state.load(round, tensors)
        self._progress.begin(round)
        self._rounds.restart()
        self._replica.assign(self._state.anchor, self._state.buffers)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resume needs besides the model's own `state_dict`, at any step of a round.

        `{"meta": plain values fit for JSON, "tensors": named tensors}`; tensors are references, as is usual
        in torch. `gasloc.checkpoint.save` writes the two without pickling. Exchanges under way are not in it: what is
        resumed goes on as if they had not been, and their progress is in the next exchange.
        """
        inner = named_state.state_tensors(self.inner, self._inner_parameters)
        return {
            "meta": {
                "round": self.round,
                "local_step": self.local_step,
                "anchor_round": self._state.round,
                "inner": named_state.hyperparameters(self.inner, self._inner_parameters),
                "outer": self._state.outer_hyperparameters(),
                "learner": self._learner.counts() if self._learner else None,
            },
            "tensors": self._state.tensors() | {f"inner/{name}": tensor for name, tensor in inner.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken, bit for bit; load the model's own state too.

        Raises `ModelError` for a state of another model or optimizer, naming the first difference.
        """
        meta, tensors = state_dict["meta"], state_dict["tensors"]
        shared = {name: tensor for name, tensor in tensors.items() if not name.startswith("inner/")}
        self._state.check(shared)
        self._rounds.drop()
        named_state.load_hyperparameters(self.inner, self._inner_parameters, meta["inner"])
        self._state.load_outer_hyperparameters(meta["outer"])
        named_state.load_state_tensors(self.inner, self._inner_parameters, under("inner/", tensors))
        self._state.load(int(meta.get("anchor_round", meta["round"])), shared)
        if self._learner is not None:
            self._learner.load_counts(meta["learner"])
        self._progress.resume(int(meta["round"]), int(meta["local_step"]), len(self._state.parts))

    def _share_groups(self, inner: Optimizer) -> None:
        self.param_groups = inner.param_groups
        self.state = inner.state


def _unheard(result: RoundResult) -> None:
    """For those who do not listen to rounds."""


def _check(topology: str, mixes: int, mixing: str) -> None:
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
