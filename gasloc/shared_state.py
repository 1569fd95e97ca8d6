"""The state that peers share: what a newcomer takes over, and what a checkpoint holds of it."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gasloc import fragments, named_state
from gasloc.errors import ModelError
from gasloc.learner import MERGES, Learner
from gasloc.outer import MakeOptimizer, OuterStep
from peers.exchange import Tensors


@dataclass(frozen=True, slots=True)
class Part:
    """A fragment: tensors that travel together, and their outer step."""

    names: tuple[str, ...]
    outer: OuterStep


class SharedState:
    """The anchor theta, the mixed buffers and the outer state of one replica.

    Tensors are float32 (float64 for float64 parameters), in CPU memory. As named tensors they are `anchor/NAME`,
    `buffer/NAME` and `outer/KEY/NAME`; a learner's outer state is `outer/merges` alone.
    """

    def __init__(
        self, anchor: dict[str, Tensor], buffers: dict[str, Tensor], parts: tuple[Part, ...], learner: Learner | None
    ) -> None:
        """Holds the tensors given, without copies. `learner`: where the syncer takes the outer steps."""
        self.anchor = anchor
        self.buffers = buffers
        self.parts = parts
        self.round = 0
        """The round whose start the anchor is."""
        self.lock = threading.Lock()
        """Held while anything here changes, so that `snapshot` sees one round or the next."""
        self._learner = learner

    def start(self, names: Iterable[str]) -> dict[str, Tensor]:
        """What parameters and buffers of these names were at the round's start. To be read only."""
        return only(names, {**self.anchor, **self.buffers})

    def snapshot(self) -> tuple[int, dict[str, Tensor]]:
        """The round and copies of all tensors; from any thread at any time."""
        with self.lock:
            return self.round, {name: tensor.clone() for name, tensor in self.tensors().items()}

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, not copied."""
        outer = {name: tensor for part in self.parts for name, tensor in part.outer.momentum_tensors().items()}
        if self._learner is not None:
            outer = {MERGES: self._learner.merges()}
        return (
            {f"anchor/{name}": tensor.detach() for name, tensor in self.anchor.items()}
            | {f"buffer/{name}": tensor for name, tensor in self.buffers.items()}
            | {f"outer/{name}": tensor for name, tensor in outer.items()}
        )

    @torch.no_grad()
    def load(self, round: int, tensors: Tensors) -> None:
        """Takes over `tensors`, which were checked, as the start of `round`. Raises `ModelError` for an outer state
        of another optimizer; nothing was changed then."""
        anchor, buffers, outer = (under(f"{kind}/", tensors) for kind in ("anchor", "buffer", "outer"))
        with self.lock:
            self._load_outer(outer)
            for name, tensor in self.anchor.items():
                tensor.copy_(anchor[name])
            self.buffers = {name: tensor.detach().clone() for name, tensor in buffers.items()}
            self.round = round

    def outer_hyperparameters(self) -> list[named_state.Hyperparameters]:
        """Those of each fragment's outer optimizer, fit for JSON."""
        return [named_state.hyperparameters(part.outer.optimizer, self.anchor) for part in self.parts]

    def load_outer_hyperparameters(self, values: Sequence[Sequence[Mapping[str, object]]]) -> None:
        """Takes over what `outer_hyperparameters` gave. Raises `ModelError` for another number of fragments."""
        if len(values) != len(self.parts):
            raise ModelError(f"the state was saved in {len(values)} fragments, not {len(self.parts)}")
        for part, groups in zip(self.parts, values, strict=True):
            named_state.load_hyperparameters(part.outer.optimizer, self.anchor, groups)

    def check(self, tensors: Tensors) -> None:
        """Raises `ModelError` that names the first tensor that is missing, unknown, not finite or of another shape or
        dtype."""
        _check_layout("anchor", self.anchor, under("anchor/", tensors))
        _check_layout("buffer", self.buffers, under("buffer/", tensors))
        for name in sorted(tensors):
            if not name.startswith(("anchor/", "buffer/", "outer/")):
                raise ModelError(f"'{name}' is no part of this state")
            if not name.startswith("buffer/") and not torch.isfinite(tensors[name]).all():
                raise ModelError(f"'{name}' is not finite")

    def _load_outer(self, tensors: Tensors) -> None:
        """Each fragment's outer state, or none of it. Raises `ModelError`."""
        if self._learner is not None:
            if tensors.keys() != {MERGES}:
                raise ModelError(f"a learner's outer state is '{MERGES}' alone, not {sorted(tensors)[:3]}")
            self._learner.restart(tensors[MERGES])
            return
        by_parameter: dict[str, dict[str, Tensor]] = {name: {} for name in self.anchor}
        for label, tensor in tensors.items():
            name = label.partition("/")[2]
            if name not in by_parameter:
                raise ModelError(f"outer state '{label}' is of no parameter of this model")
            by_parameter[name][label] = tensor
        before = [part.outer.momentum_tensors() for part in self.parts]
        try:
            for part in self.parts:
                part.outer.load_momentum({n: t for name in part.names for n, t in by_parameter[name].items()})
        except ModelError:
            for part, state in zip(self.parts, before, strict=True):
                part.outer.load_momentum(state)
            raise


def cut(anchor: dict[str, Tensor], count: int, make: MakeOptimizer) -> tuple[Part, ...]:
    """The anchor in `count` fragments of near-equal bytes, an outer optimizer for each."""
    sizes_bytes = {name: tensor.numel() * tensor.element_size() for name, tensor in anchor.items()}
    return tuple(
        Part(names, OuterStep(only(names, anchor), make)) for names in fragments.fragment(sizes_bytes, count).parts
    )


def only(names: Iterable[str], tensors: Tensors) -> dict[str, Tensor]:
    """The tensors of these names, in their order."""
    return {name: tensors[name] for name in names}


def under(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    """The tensors whose names begin so, by the rest of their names."""
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
