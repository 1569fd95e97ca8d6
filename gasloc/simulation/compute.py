"""Local steps of many workers on one device: gathered until the first result is needed, then run together.

A worker's steps depend on nothing but its own state, so when they are computed is free, as long as it is before
anybody looks. Workers ask for steps and sleep for as long as their machine would take; the first to wake runs the
steps that everybody has asked for by then.

All workers' parameters and AdamW moments are rows of three (workers, elements) buffers. A problem whose `batched` is
true has its gradients taken with `torch.func.vmap` over the rows; otherwise they are taken one worker after another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gasloc.errors import RunError
from gasloc.simulation.problem import Problem
from peers.exchange import PeerId, Tensors


@dataclass(frozen=True, slots=True)
class AdamW:
    """Decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), on matrices only, as `gasloc.inner`."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    clip_norm: float
    """Gradients longer than this are scaled down to it."""
    learning_rate: Callable[[int], float]
    """By the reference step: round * local_steps + local step, as in `gasloc.trainer`."""
    local_steps: int
    """Reference local steps a round (H)."""


@dataclass(eq=False, slots=True)
class Steps:
    """Steps that a worker has asked for. Until they are done its parameters must not be touched."""

    row: int
    count: int
    gradient_only: bool = False
    done: bool = False
    loss_sum: float = 0.0
    taken: int = 0


class Trainee:
    """One worker's row: parameters as named views, moments, and counts of steps."""

    def __init__(self, row: int, peer: PeerId, parameters: dict[str, Tensor]) -> None:
        self.row = row
        self.peer = peer
        self.parameters = parameters
        """Views; writing to them changes what is trained."""
        self.step = 0
        """Local steps taken, over the whole run; the batch follows from it."""
        self.round = 0
        self.local_step = 0
        """Local steps taken in this round; with the round, the learning rate follows from it."""
        self.updates = 0
        """AdamW updates since its moments were zero."""

    def reference_step(self, local_steps: int) -> int:
        """The step of the schedule: after a jump the rate is the swarm's, not that of our own count."""
        return self.round * local_steps + min(self.local_step, local_steps - 1)


@dataclass(slots=True)
class _Buffers:
    parameters: Tensor  # (workers, elements)
    decayed: Tensor  # (elements,): 1 where weight decay acts
    mean: Tensor = field(init=False)  # first moments
    square: Tensor = field(init=False)  # second moments
    gradient: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.mean = torch.zeros_like(self.parameters)
        self.square = torch.zeros_like(self.parameters)
        self.gradient = torch.zeros_like(self.parameters)


@dataclass(slots=True)
class _Shared:
    """What simulations have in common whose steps are taken together."""

    buffers: _Buffers
    by_row: list[Trainee] = field(default_factory=list)
    waiting: list[Steps] = field(default_factory=list)


class Compute:
    """Trains the workers of one simulation. `RunError` is raised where a loss stops being finite.

    With `beside`, in rows of that one's buffers, so that the steps of both are taken together.
    """

    def __init__(
        self,
        problem: Problem,
        optimizer: AdamW,
        peers: Sequence[PeerId],
        *,
        simulations: int = 1,
        beside: "Compute | None" = None,
    ) -> None:
        """`simulations` of as many workers, this one among them, may be `beside` it in the end.

        Those must have the same problem and optimizer.
        """
        self._problem = problem
        self._optimizer = optimizer
        initial = problem.initial()
        self._shapes = {name: tensor.shape for name, tensor in initial.items()}
        self._sizes = [tensor.numel() for tensor in initial.values()]
        if beside is None:
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in initial.values()])
            decayed = torch.cat([flat.new_full((t.numel(),), float(t.dim() >= 2)) for t in initial.values()])
            self._shared = _Shared(_Buffers(flat.repeat(simulations * len(peers), 1), decayed))
        else:
            self._shared = beside._shared
        self._buffers, self._by_row = self._shared.buffers, self._shared.by_row
        first = len(self._by_row)
        self.trainees = {
            peer: Trainee(row, peer, self._views(self._buffers.parameters[row]))
            for row, peer in enumerate(peers, first)
        }
        self._by_row.extend(self.trainees.values())

    def ask(self, peer: PeerId, count: int) -> Steps:
        """Asks for local AdamW steps. `finish` them before looking at the worker's parameters."""
        steps = Steps(self.trainees[peer].row, count)
        self._shared.waiting.append(steps)
        return steps

    def ask_gradient(self, peer: PeerId) -> Steps:
        """Asks for one gradient, without an update; `gradient` holds it once finished."""
        steps = Steps(self.trainees[peer].row, 1, gradient_only=True)
        self._shared.waiting.append(steps)
        return steps

    def drop(self, steps: Steps) -> None:
        """Forgets steps that were not yet taken, as of a worker that died."""
        if steps in self._shared.waiting:
            self._shared.waiting.remove(steps)

    def finish(self, steps: Steps) -> float:
        """Takes the steps, together with all others asked for, unless they are taken. Returns the mean loss."""
        if not steps.done:
            waiting, self._shared.waiting = self._shared.waiting, []
            self._take(waiting)
        return steps.loss_sum / steps.count

    def gradient(self, peer: PeerId) -> dict[str, Tensor]:
        """The worker's last gradient, not clipped, as named views."""
        return self._views(self._buffers.gradient[self.trainees[peer].row])

    def update(self, peer: PeerId, gradient: Tensors) -> None:
        """Clips `gradient` and takes one AdamW step with it."""
        trainee = self.trainees[peer]
        for name, view in self._views(self._buffers.gradient[trainee.row]).items():
            view.copy_(gradient[name])
        self._update([trainee.row])

    def moments(self, peer: PeerId) -> tuple[Tensor, Tensor]:
        """The worker's first and second AdamW moments, (elements,) each; views."""
        row = self.trainees[peer].row
        return self._buffers.mean[row], self._buffers.square[row]

    def reset(self, peer: PeerId) -> None:
        """Zeroes the worker's moments, as on a machine that starts anew."""
        trainee = self.trainees[peer]
        self._buffers.mean[trainee.row].zero_()
        self._buffers.square[trainee.row].zero_()
        trainee.updates = 0

    def _take(self, waiting: list[Steps]) -> None:
        if not self._problem.batched:
            for steps in waiting:
                for _ in range(steps.count):
                    self._step([steps])
                steps.done = True
            return
        active = sorted(waiting, key=lambda steps: steps.row)
        while active:
            self._step(active)
            for steps in active:
                steps.done = steps.taken == steps.count
            active = [steps for steps in active if not steps.done]

    def _step(self, active: list[Steps]) -> None:
        """One step of each; several rows at once only where the problem is batched."""
        trainees = [self._by_row[steps.row] for steps in active]
        keys = [(trainee.peer, trainee.step) for trainee in trainees]  # equal in simulations beside each other
        made = {key: self._problem.batch(*key) for key in dict.fromkeys(keys)}
        batches = [made[key] for key in keys]
        losses = self._gradients([trainee.row for trainee in trainees], batches)
        rows = []
        for steps, trainee, loss in zip(active, trainees, losses, strict=True):
            if not -float("inf") < loss < float("inf"):
                raise RunError(
                    f"worker {trainee.peer}: the loss of step {trainee.step} is {loss}; lower the learning rate"
                )
            steps.loss_sum += loss
            steps.taken += 1
            trainee.step += 1
            if not steps.gradient_only:
                rows.append(steps.row)
        if rows:
            self._update(rows)

    def _gradients(self, rows: list[int], batches: list[Tensor]) -> list[float]:
        """Writes each row's gradient into the buffer; returns the losses."""
        if not self._problem.batched:
            (row,), (batch,) = rows, batches
            views = {name: view.requires_grad_() for name, view in self._views(self._buffers.parameters[row]).items()}
            loss = self._problem.loss(views, batch)
            gradients = torch.autograd.grad(loss, list(views.values()))
            torch.cat([gradient.reshape(-1) for gradient in gradients], out=self._buffers.gradient[row])
            return [float(loss.detach())]
        whole = rows == list(range(len(self._by_row)))
        chosen = self._buffers.parameters if whole else self._buffers.parameters[rows]
        take = torch.func.vmap(torch.func.grad_and_value(self._problem.loss))
        with sdpa_kernel(SDPBackend.MATH):  # the CPU's flash kernel cannot be batched over workers
            stacked, losses = take(self._views(chosen), torch.stack(batches))
        gradient = torch.cat([stacked[name].reshape(len(rows), -1) for name in self._shapes], dim=1)
        if whole:
            self._buffers.gradient.copy_(gradient)
        else:
            self._buffers.gradient[rows] = gradient
        return [float(loss) for loss in losses]

    @torch.no_grad()
    def _update(self, rows: list[int]) -> None:
        if len(rows) == 1:
            index: slice | list[int] = slice(rows[0], rows[0] + 1)  # a view: no copies
        elif rows == list(range(len(self._by_row))):
            index = slice(None)
        else:
            index = rows
        buffers, optimizer = self._buffers, self._optimizer
        parameters, mean, square = buffers.parameters[index], buffers.mean[index], buffers.square[index]
        gradient = buffers.gradient[index]
        norms = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
        gradient = gradient * (optimizer.clip_norm / (norms + 1e-6)).clamp(max=1.0)
        rates, corrections, roots = self._factors(rows)
        parameters.mul_(1 - rates * optimizer.weight_decay * buffers.decayed)
        mean.lerp_(gradient, 1 - optimizer.beta1)
        square.mul_(optimizer.beta2).addcmul_(gradient, gradient, value=1 - optimizer.beta2)
        parameters.sub_(mean / (square.sqrt() / roots + optimizer.epsilon) * (rates / corrections))
        if isinstance(index, list):
            buffers.parameters[index], buffers.mean[index], buffers.square[index] = parameters, mean, square

    def _factors(self, rows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Learning rates and AdamW's bias corrections of each row, (rows, 1)."""
        optimizer = self._optimizer
        rates, corrections, roots = [], [], []
        for row in rows:
            trainee = self._by_row[row]
            trainee.updates += 1
            rates.append(optimizer.learning_rate(trainee.reference_step(optimizer.local_steps)))
            trainee.local_step += 1
            corrections.append(1 - optimizer.beta1**trainee.updates)
            roots.append((1 - optimizer.beta2**trainee.updates) ** 0.5)
        like = self._buffers.parameters
        columns = [like.new_tensor(values).unsqueeze(1) for values in (rates, corrections, roots)]
        return columns[0], columns[1], columns[2]

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        """Named views of a flat (..., elements) tensor."""
        parts = torch.split(flat, self._sizes, dim=-1)
        return {
            name: part.view(part.shape[:-1] + shape)
            for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
        }
