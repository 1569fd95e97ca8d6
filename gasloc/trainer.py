"""The training loop of `gasloc start` and `gasloc join`: an ordinary user of `GaslocOptimizer`."""

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors.torch
import torch

from gasloc import checkpoint, inner, model, sampler
from gasloc.corpus import Corpus
from gasloc.errors import CheckpointError, RunError, UsageError
from gasloc.events import (
    CheckpointSaved,
    Evaluation,
    Event,
    ExchangeStarted,
    Finished,
    Paced,
    Round,
    Standing,
    Stopped,
    Warned,
)
from gasloc.optimizer import GaslocOptimizer, RoundResult
from gasloc.outer import make_outer
from gasloc.reasons import Reasons
from gasloc.recipe import Recipe
from gasloc.run_folder import write_whole
from peers.errors import NoDonorError, PeersError
from peers.exchange import PeerId, Slot

if TYPE_CHECKING:
    from gasloc.offences import SetAside
    from gasloc.swarm import Swarm

CHECKPOINT_INTERVAL_S = 60.0


class Trainer:
    """Trains one peer's replica from wherever it is to the recipe's last round.

    `swarm=None` trains alone. `peer_id` decides which text is drawn; a swarm's peer gives its own id.
    `folder` has the checkpoints to resume from, and gets checkpoints and the final model. `emit` is called on
    the training thread.
    """

    def __init__(
        self,
        recipe: Recipe,
        corpus: Corpus,
        *,
        peer_id: str,
        folder: Path,
        device: torch.device,
        emit: Callable[[Event], None],
        stop: threading.Event,
        swarm: "Swarm | None" = None,
    ) -> None:
        """Builds the model and loads the last whole checkpoint, if there is one.

        Raises `DataError` for text too short for the context, and `CheckpointError` or `ModelError` for a
        checkpoint of another run or model.
        """
        corpus.check(recipe.model.context_length)
        self.recipe = recipe
        self.step = 0
        """Local steps taken so far, over all rounds."""
        self.tokens = 0
        self._corpus = corpus
        self._peer_id = peer_id
        self._folder = folder
        self._device = device
        self._emit = emit
        self._stop = stop
        self._swarm = swarm
        self.model = model.build(recipe.model, recipe.seed).to(device)
        self.optimizer = GaslocOptimizer(
            inner.make_inner(self.model, recipe.inner),
            self.model,
            network=swarm,
            topology=recipe.topology,
            local_steps=recipe.local_steps,
            mixes=recipe.mixes,
            fragments=recipe.fragments,
            seed=recipe.seed,
            outer=make_outer(recipe.outer),
            grace_s=recipe.exchange.grace_s,
            stale_rounds=recipe.stale_rounds,
            overlap=recipe.exchange.overlap,
            overlap_steps=recipe.syncer.overlap_steps,
            step_tokens=recipe.inner.batch_size * recipe.model.context_length,
            mixing=recipe.exchange.mixing,
            on_round=self._end_round,
        )
        self._held_out = sampler.evaluation_batches(
            corpus.held_out,
            batches=recipe.evaluation.batches,
            batch_size=recipe.inner.batch_size,
            context_length=recipe.model.context_length,
        )
        self._losses: dict[int, tuple[float, int]] = {}
        """Their sum and count by round, of rounds whose end is not told yet: under overlap the next has begun then."""
        self._evaluated_round = -1
        self.resumed = self._resume()
        if swarm is not None:
            swarm.on_exchange = self._announce
            swarm.company.on_set_aside = self._warn_of
        self._save_trouble = ""
        """Why the last checkpoint could not be written, as told."""
        self._no_state = Reasons()
        self._told_standing: tuple[int, dict[PeerId, tuple[int, str]]] = (0, {})
        self._rate = 0.0
        self._round_started = self._started = self._saved = time.monotonic()

    @property
    def parameter_count(self) -> int:
        return model.parameter_count(self.recipe.model)

    def run(self) -> None:
        """Trains until the last round or until told to stop; a checkpoint is saved in either case.

        A loss or parameters that are not finite put the replica back at its round's start; the third time in a row
        raises `RunError`. Passes on what the network raises, after the last whole state was saved. A checkpoint that
        cannot be written is a warning while there is something to train, and `CheckpointError` when told to stop.
        """
        self._round_started = self._started = self._saved = time.monotonic()
        if self.optimizer.local_step == 0:
            self._losses.clear()
        if self._swarm is not None:
            self._swarm.train()
        try:
            if self.optimizer.local_step == 0:
                self._evaluate_if_due()
            while self.optimizer.round < self.recipe.rounds and not self._stop.is_set():
                self._take_step()
                if self._swarm is not None:
                    self._attend(self._swarm)
                if time.monotonic() - self._saved > CHECKPOINT_INTERVAL_S:
                    self._save_if_possible()
            self.optimizer.take_outcomes()
        except PeersError:
            self._save_if_possible()
            raise
        if self.optimizer.round < self.recipe.rounds:
            self._save()
            self._emit(Stopped(reason="told to stop", round=self.optimizer.round, step=self.step))
        else:
            self._finish()

    def _take_step(self) -> None:
        recipe, optimizer = self.recipe, self.optimizer
        inputs, targets = sampler.batch(
            self._corpus.train,
            peer_id=self._peer_id,
            step=self.step,
            seed=recipe.seed,
            batch_size=recipe.inner.batch_size,
            context_length=recipe.model.context_length,
        )
        # from round and local step, not from our own count: after a jump the rate is the swarm's
        share = min(optimizer.local_step / optimizer.local_steps, 1.0)
        reference_step = optimizer.round * recipe.local_steps + min(
            int(share * recipe.local_steps + 0.5), recipe.local_steps - 1
        )
        self._rate = inner.learning_rate(reference_step, recipe.inner, recipe.total_steps)
        inner.set_learning_rate(optimizer, self._rate)
        with inner.autocast(self._device):
            loss = self.model.loss(inputs.to(self._device), targets.to(self._device))
        value = float(loss.detach())
        if not math.isfinite(value):
            self._skip_step(f"the loss is {value} at step {self.step}")
            return
        torch.autograd.backward(loss)
        inner.clip(self.model, recipe.inner)
        self.step += 1
        self.tokens += inputs.numel()
        total, count = self._losses.get(optimizer.round, (0.0, 0))
        self._losses[optimizer.round] = total + value, count + 1
        optimizer.step()
        optimizer.zero_grad()

    def _skip_step(self, why: str) -> None:
        """Goes back to the round's start, and on with the next batch. Raises `RunError` at the third time in a row."""
        self.optimizer.roll_back(why)
        self._emit(Warned(f"{why}: back at the start of round {self.optimizer.round}"))
        self.step += 1

    def _end_round(self, result: RoundResult) -> None:
        now = time.monotonic()
        seconds = max(now - self._round_started, 1e-9)
        told = [self._losses.pop(round) for round in list(self._losses) if round <= result.round]
        count = sum(steps for _, steps in told)
        loss = sum(total for total, _ in told) / count if count else math.nan
        config = self.recipe
        round_tokens = result.local_steps * config.inner.batch_size * config.model.context_length
        self._emit(
            Round(
                round=result.round,
                step=self.step,
                loss=loss,
                lr=self._rate,
                local_steps=result.local_steps,
                tokens=self.tokens,
                tokens_per_s=round_tokens / seconds,
                partners=result.partners,
                mixed=result.mixed,
                tried=result.tried,
                reason=result.reason,
                next_round=result.next_round,
                next_reason=result.next_reason,
                distance=result.distance,
                bytes_sent=result.bytes_sent,
                bytes_received=result.bytes_received,
                exchange_s=result.exchange_s,
                seconds=seconds,
                radius=result.radius,
                excess=result.excess,
                clipped=tuple(sorted(result.clipped)),
                rolled_back=result.rolled_back,
                waited_s=result.waited_s,
                overlap_steps=result.overlap_steps,
            )
        )
        if self._swarm is not None and not self._stop.is_set():
            self._swarm.publish(result, tokens=self.tokens, loss=loss, seconds=seconds)
            self._tell_standing(self._swarm)
            self._catch_up(self._swarm)
            self._pace(self._swarm)
        if self.optimizer.round >= self.recipe.rounds:
            self.optimizer.settle(self.recipe.exchange.grace_s)
        self._evaluate_if_due()
        self._round_started = time.monotonic()

    def _announce(self, slot: Slot, partners: tuple[PeerId, ...]) -> None:
        self._emit(ExchangeStarted(round=slot.round, mix=slot.mix, phase=slot.phase, partners=partners))

    def _warn_of(self, peer: PeerId, offender: "SetAside") -> None:
        self._emit(Warned(f"{peer}: {offender.reason}"))

    def _attend(self, swarm: "Swarm") -> None:
        """Tells what happened to the network, and makes good what it cost. Raises `DaemonError` if that cannot be."""
        notices = swarm.take_notices()
        for notice in notices:
            self._emit(Warned(notice))
        if notices:
            self._catch_up(swarm)

    def _tell_standing(self, swarm: "Swarm") -> None:
        """What is held against others, for `gasloc status`; where it changed."""
        held, rejected = swarm.company.set_aside(), swarm.company.rejected_records()
        told = rejected, {peer: (one.count, one.reason) for peer, one in held.items()}
        if told == self._told_standing:
            return
        self._told_standing = told
        now = time.monotonic()
        self._emit(
            Standing(
                peers=tuple(held),
                counts=tuple(one.count for one in held.values()),
                seconds_left=tuple(max(one.until - now, 0.0) for one in held.values()),
                reasons=tuple(one.reason for one in held.values()),
                rejected_records=rejected,
            )
        )

    def _catch_up(self, swarm: "Swarm") -> None:
        try:
            entry = swarm.catch_up()
        except NoDonorError as error:
            why = f"too far behind the swarm to mix, and its state cannot be had yet: {error}"
            if self._no_state.changed(why):
                self._emit(Warned(why))
            return
        self._no_state.changed("")
        if entry is not None:
            self._emit(Warned(f"took the swarm's state at round {entry.round}: {entry.reason}"))

    def _pace(self, swarm: "Swarm") -> None:
        steps, reason = swarm.pace(self.optimizer.local_steps)
        if steps != self.optimizer.local_steps:
            self.optimizer.local_steps = steps
            self._emit(Paced(round=self.optimizer.round, local_steps=steps, reason=reason))

    def _evaluate_if_due(self) -> None:
        """Once a round's outcomes are taken; a stop puts it off until the run is resumed."""
        done, every = self.optimizer.round, self.recipe.evaluation.every_rounds
        due = done >= self.recipe.rounds or done % every == 0
        if due and self._evaluated_round != done and not self._stop.is_set():
            self._evaluate()
            self._evaluated_round = done

    @torch.no_grad()
    def _evaluate(self) -> None:
        started = time.monotonic()
        total = torch.zeros((), dtype=torch.float64)
        self.model.eval()
        for inputs, targets in self._held_out:
            with inner.autocast(self._device):
                total += self.model.loss(inputs.to(self._device), targets.to(self._device)).double().cpu()
        self.model.train()
        loss = float(total) / len(self._held_out)
        self._emit(
            Evaluation(
                round=self.optimizer.round,
                step=self.step,
                validation_loss=loss,
                seconds=time.monotonic() - started,
            )
        )

    def _finish(self) -> None:
        self._save_if_possible()
        named = {name: tensor.detach().cpu().contiguous() for name, tensor in self.model.named_parameters()}
        path = self._folder / "model.safetensors"
        try:
            write_whole(path, safetensors.torch.save(named, {"recipe": self.recipe.model_dump_json()}))
        except UsageError as error:
            raise RunError(f"the run is done, but its model is not saved: {error}") from None
        self._emit(
            Finished(
                round=self.optimizer.round,
                step=self.step,
                tokens=self.tokens,
                model=str(path),
                seconds=time.monotonic() - self._started,
            )
        )

    def _save_if_possible(self) -> None:
        """Saves; where that fails, as on a full disk, it is told once and tried again after the usual time."""
        try:
            self._save()
            self._save_trouble = ""
        except CheckpointError as error:
            self._saved = time.monotonic()
            if str(error) != self._save_trouble:
                self._save_trouble = str(error)
                self._emit(Warned(f"{error}; training goes on, tried again every {CHECKPOINT_INTERVAL_S:g} s"))

    def _save(self) -> None:
        started = time.monotonic()
        state = self.optimizer.state_dict()
        weights = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        path = checkpoint.save(
            self._folder / "checkpoints",
            state["tensors"] | weights,
            {
                "digest": self.recipe.digest,
                "peer": self._peer_id,
                "step": self.step,
                "tokens": self.tokens,
                "loss_sum": sum(total for total, _ in self._losses.values()),
                "loss_count": sum(count for _, count in self._losses.values()),
                "evaluated_round": self._evaluated_round,
                "optimizer": state["meta"],
            },
        )
        self._saved = time.monotonic()
        self._emit(
            CheckpointSaved(path=str(path), round=self.optimizer.round, step=self.step, seconds=self._saved - started)
        )

    def _resume(self) -> bool:
        found = checkpoint.load_latest(self._folder / "checkpoints", digest=self.recipe.digest)
        if found is None:
            return False
        for reason in found.skipped:
            self._emit(Warned(f"a newer checkpoint is not whole and was passed over: {reason}"))
        try:
            optimizer_meta = found.meta["optimizer"]
            step, tokens = int(found.meta["step"]), int(found.meta["tokens"])
            loss_sum, loss_count = float(found.meta["loss_sum"]), int(found.meta["loss_count"])
            evaluated_round = int(found.meta["evaluated_round"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"checkpoint '{found.path}' lacks {error}; choose another --dir") from None
        weights = {n.removeprefix("model/"): t for n, t in found.tensors.items() if n.startswith("model/")}
        others = {name: tensor for name, tensor in found.tensors.items() if not name.startswith("model/")}
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict({"meta": optimizer_meta, "tensors": others})
        self.step, self.tokens = step, tokens
        self._losses = {self.optimizer.round: (loss_sum, loss_count)} if loss_count else {}
        self._evaluated_round = evaluated_round
        return True
