"""One peer's training loop: it learns, it resumes bit for bit, and it stops in good order."""

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gasloc import checkpoint
from gasloc import trainer as trainer_module
from gasloc.corpus import Corpus
from gasloc.errors import CheckpointError, DataError, RunError
from gasloc.events import (
    CheckpointSaved,
    Evaluation,
    Event,
    EventLog,
    Finished,
    Round,
    Stopped,
    Warned,
    read_events,
)
from gasloc.recipe import Recipe, parse
from gasloc.trainer import Trainer


def tiny_recipe(**changes: object) -> Recipe:
    """A model of some thousand parameters, 4 rounds of 6 steps."""
    values: dict[str, object] = {
        "rounds": 4,
        "local_steps": 6,
        "model": {"dim": 16, "layers": 1, "heads": 2, "key_value_heads": 1, "hidden_dim": 32, "context_length": 16},
        "inner": {"batch_size": 4, "warmup_steps": 3, "learning_rate": 1e-2},
        "evaluation": {"every_rounds": 2, "batches": 2},
    }
    return parse(values | changes)


@pytest.fixture(scope="module")
def text() -> Corpus:
    """Some thousand bytes of text with a pattern to learn."""
    content = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 120, dtype=np.uint8).astype(np.uint16)
    return Corpus(train=content[:5000], held_out=content[5000:], name="fox")


class Runs:
    """Makes trainers on one text, and keeps what they emit."""

    def __init__(self, text: Corpus) -> None:
        self._text = text
        self.events: list[Event] = []

    def train(
        self,
        folder: Path,
        recipe: Recipe,
        *,
        peer_id: str = "peer",
        stop_when: Callable[[Event], bool] | None = None,
        stop_after_step: int | None = None,
    ) -> Trainer:
        """Trains until the end, or until told to stop by an event or after a number of steps in all."""
        stop = threading.Event()

        def emit(event: Event) -> None:
            self.events.append(event)
            if stop_when is not None and stop_when(event):
                stop.set()

        trainer = Trainer(
            recipe,
            self._text,
            peer_id=peer_id,
            folder=folder,
            device=torch.device("cpu"),
            emit=emit,
            stop=stop,
        )
        if stop_after_step is not None:

            def count(*_: object) -> None:
                if trainer.step == stop_after_step:
                    stop.set()

            trainer.optimizer.inner.register_step_post_hook(count)
        trainer.run()
        return trainer


@pytest.fixture
def runs(text: Corpus) -> Runs:
    return Runs(text)


def whole_state(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """Weights, AdamW moments, anchor, outer momentum; and learning rates, counters and position in the data."""
    found = checkpoint.load_latest(folder / "checkpoints")
    assert found is not None
    return found.tensors, found.meta


def test_alone_the_loss_falls_and_the_model_is_saved(runs: Runs, tmp_path: Path) -> None:
    trainer = runs.train(tmp_path, tiny_recipe(rounds=8))

    validation = [event.validation_loss for event in runs.events if isinstance(event, Evaluation)]
    rounds = [event for event in runs.events if isinstance(event, Round)]
    assert [event.round for event in runs.events if isinstance(event, Evaluation)] == [0, 2, 4, 6, 8]
    assert validation[-1] < validation[0] - 1.0
    assert [event.round for event in rounds] == list(range(8))
    assert rounds[-1].step == 48
    assert rounds[-1].tokens == 48 * 4 * 16
    assert not any(event.mixed or event.tried for event in rounds)
    (finished,) = (event for event in runs.events if isinstance(event, Finished))
    saved = load_file(finished.model)
    assert saved.keys() == {name for name, _ in trainer.model.named_parameters()}
    assert all(torch.equal(saved[name], tensor) for name, tensor in trainer.model.named_parameters())


@pytest.mark.parametrize("stops", [(9,), (3, 12, 13), (6,), (12, 18)], ids=str)
def test_a_run_resumed_equals_the_straight_run_bit_for_bit(
    text: Corpus, tmp_path: Path, stops: tuple[int, ...]
) -> None:
    """In the middle of a round and at its end: weights, moments, outer momentum, rates, counters, losses."""
    straight, halting = Runs(text), Runs(text)
    recipe = tiny_recipe()
    straight.train(tmp_path / "straight", recipe)
    for step in stops:
        halting.train(tmp_path / "halting", recipe, stop_after_step=step)
        assert isinstance(halting.events[-1], Stopped)
        assert halting.events[-1].step == step
    resumed = halting.train(tmp_path / "halting", recipe)

    assert resumed.resumed
    tensors, meta = whole_state(tmp_path / "straight")
    their_tensors, their_meta = whole_state(tmp_path / "halting")
    assert tensors.keys() == their_tensors.keys()
    assert {name.split("/")[0] for name in tensors} == {"model", "anchor", "outer", "inner"}
    assert all(torch.equal(tensors[name], their_tensors[name]) for name in tensors)
    assert meta == their_meta
    for kind in (Round, Evaluation):
        ours = [_values(event) for event in straight.events if isinstance(event, kind)]
        theirs = [_values(event) for event in halting.events if isinstance(event, kind)]
        assert ours == theirs


def _values(event: Event) -> dict[str, object]:
    """What must repeat: everything but durations."""
    timed = ("seconds", "tokens_per_s", "exchange_s", "waited_s")
    return {name: getattr(event, name) for name in event.__slots__ if name not in timed}


def test_another_peer_draws_other_text(text: Corpus, tmp_path: Path) -> None:
    recipe = tiny_recipe(rounds=1)
    losses = []
    for peer in ("one", "other"):
        runs = Runs(text)
        runs.train(tmp_path / peer, recipe, peer_id=peer)
        losses.append([event.loss for event in runs.events if isinstance(event, Round)])
    assert losses[0] != losses[1]


def test_told_to_stop_it_finishes_the_step_and_saves(runs: Runs, tmp_path: Path) -> None:
    trainer = runs.train(tmp_path, tiny_recipe(), stop_after_step=8)

    assert trainer.step == 8
    assert isinstance(runs.events[-2], CheckpointSaved)
    assert runs.events[-1] == Stopped(reason="told to stop", round=1, step=8)
    assert not (tmp_path / "model.safetensors").exists()


def test_a_finished_run_started_again_trains_no_further(runs: Runs, tmp_path: Path) -> None:
    runs.train(tmp_path, tiny_recipe())
    before = load_file(tmp_path / "model.safetensors")
    runs.events.clear()
    trainer = runs.train(tmp_path, tiny_recipe())

    assert trainer.step == 24
    assert not [event for event in runs.events if isinstance(event, Round)]
    assert isinstance(runs.events[-1], Finished)
    after = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_learning_rate_follows_the_round_after_a_jump(runs: Runs, tmp_path: Path, text: Corpus) -> None:
    """A peer taken from round 0 to round 3 trains at round 3's rate, not at its own step's."""
    recipe = tiny_recipe()
    runs.train(tmp_path / "straight", recipe)
    straight = {event.round: event.lr for event in runs.events if isinstance(event, Round)}
    jumped: list[Event] = []
    trainer = Trainer(
        recipe,
        text,
        peer_id="late",
        folder=tmp_path / "late",
        device=torch.device("cpu"),
        emit=jumped.append,
        stop=threading.Event(),
    )
    _, tensors = trainer.optimizer.snapshot()
    trainer.optimizer.load_snapshot(3, tensors)
    trainer.run()

    assert {event.round: event.lr for event in jumped if isinstance(event, Round)} == {3: straight[3]}


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_a_loss_that_is_not_finite_is_a_plain_error(runs: Runs, tmp_path: Path, text: Corpus) -> None:
    recipe = tiny_recipe()
    trainer = Trainer(
        recipe,
        text,
        peer_id="peer",
        folder=tmp_path,
        device=torch.device("cpu"),
        emit=runs.events.append,
        stop=threading.Event(),
    )
    trainer.model.norm.register_forward_hook(lambda module, inputs, output: output * float("nan"))

    with pytest.raises(RunError, match=r"^round 0: the loss is nan at step 2, for the 3rd time in a row; lower the"):
        trainer.run()
    assert not (tmp_path / "checkpoints").exists()


def test_a_single_loss_that_is_not_finite_costs_the_rounds_steps_and_nothing_else(
    runs: Runs, tmp_path: Path, text: Corpus
) -> None:
    recipe = tiny_recipe()
    trainer = Trainer(
        recipe,
        text,
        peer_id="peer",
        folder=tmp_path,
        device=torch.device("cpu"),
        emit=runs.events.append,
        stop=threading.Event(),
    )
    with torch.no_grad():
        trainer.model.norm.weight.fill_(float("nan"))
    trainer.run()
    warnings = [event.message for event in runs.events if isinstance(event, Warned)]
    assert warnings == ["the loss is nan at step 0: back at the start of round 0"]
    rounds = [event for event in runs.events if isinstance(event, Round)]
    assert [event.round for event in rounds] == list(range(recipe.rounds))
    assert "rolled back to the round's start: the loss is nan at step 0" in rounds[0].reason
    assert rounds[-1].loss < rounds[0].loss
    assert trainer.step == recipe.total_steps + 1


def test_a_checkpoint_of_another_recipe_is_refused(runs: Runs, tmp_path: Path) -> None:
    runs.train(tmp_path, tiny_recipe(), stop_after_step=2)

    with pytest.raises(CheckpointError, match="belongs to another run"):
        runs.train(tmp_path, tiny_recipe(seed=1))


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(runs: Runs, tmp_path: Path) -> None:
    recipe = tiny_recipe()
    runs.train(tmp_path, recipe, stop_after_step=2)
    runs.train(tmp_path, recipe, stop_after_step=4)
    newest = max((tmp_path / "checkpoints").iterdir())
    (newest / "tensors.safetensors").write_bytes(b"torn")
    runs.events.clear()

    trainer = runs.train(tmp_path, recipe, stop_after_step=3)

    warnings = [event.message for event in runs.events if isinstance(event, Warned)]
    assert len(warnings) == 1
    assert newest.name in warnings[0]
    assert trainer.step == 3


def test_text_shorter_than_the_context_is_refused(tmp_path: Path) -> None:
    short = Corpus(train=np.zeros(16, dtype=np.uint16), held_out=np.zeros(16, dtype=np.uint16), name="short.txt")

    with pytest.raises(DataError, match=r"short\.txt"):
        Runs(short).train(tmp_path, tiny_recipe())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 5 MB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    return filler


def test_a_full_disk_is_a_warning_and_training_goes_on(
    runs: Runs, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints and events; and both go on once there is room again."""
    monkeypatch.setattr(trainer_module, "CHECKPOINT_INTERVAL_S", 0.0)
    log = EventLog(small_disk / "events.jsonl")
    heard: list[Event] = []
    log.listen(heard.append)
    fillers: list[Path] = []

    def at_each(event: Event) -> bool:
        log.emit(event)
        if isinstance(event, Round) and event.round == 1:
            fillers.append(fill(small_disk))
        if isinstance(event, Round) and event.round == 3:
            (last,) = fillers
            state = checkpoint.load_latest(small_disk / "checkpoints")
            assert state is not None
            assert state.skipped == ()
            assert not list((small_disk / "checkpoints").glob(".saving-*"))
            last.unlink()
        return False

    trainer = runs.train(small_disk, tiny_recipe(rounds=6), stop_when=at_each)
    log.close()
    warnings = [event.message for event in heard if isinstance(event, Warned)]
    assert len(warnings) == 2, warnings
    assert any("checkpoint" in line and "No space left on device" in line for line in warnings)
    assert any("events are not written" in line and "No space left on device" in line for line in warnings)
    assert trainer.step == 36
    assert isinstance(runs.events[-1], Finished)
    told = [record["round"] for record in read_events(small_disk / "events.jsonl") if record["event"] == "round"]
    assert told[:2] == [0, 1]
    assert told[-2:] == [4, 5]
    newest = checkpoint.load_latest(small_disk / "checkpoints")
    assert newest is not None
    assert newest.meta["step"] == 36


def test_told_to_stop_on_a_full_disk_it_says_that_nothing_was_saved(
    runs: Runs, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.train(small_disk, tiny_recipe(), stop_after_step=2)
    fill(small_disk)
    with pytest.raises(CheckpointError, match="No space left on device"):
        runs.train(small_disk, tiny_recipe(), stop_after_step=8)
    state = checkpoint.load_latest(small_disk / "checkpoints")
    assert state is not None
    assert state.meta["step"] == 2
    assert not list((small_disk / "checkpoints").glob(".saving-*"))
