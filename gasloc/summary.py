"""What came of a run with several peers on one machine: `summary.json` and `loss.png`, out of their events."""

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gasloc import mixing
from gasloc.errors import RunError
from gasloc.events import read_events
from gasloc.run_folder import write_whole

Record = dict[str, Any]
"""One event as it was read."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Means are over peers; losses are in nats per token on the held-out split."""

    validation_loss_first: float
    validation_loss_last: float
    mixed_share: float
    """Rounds mixed over rounds tried: those in which there was somebody to mix with."""
    replica_spread: float
    """`mean_i ||theta_i - mean|| / ||mean||` over the final weights."""
    rounds: int
    peers: int
    """Peers that finished."""
    workers: int
    """Peers that were started."""
    tokens: int
    seconds: float
    """Of the peer that took longest, from its first event to its last, pauses between launches left out."""
    bytes_sent: int
    bytes_received: int


def summarise(folders: Sequence[Path]) -> Summary:
    """Reads the run folders of all peers. Raises `RunError` where none of them finished."""
    from safetensors.torch import load_file

    histories = {folder: _events(folder) for folder in folders}
    finished = {folder: events for folder, events in histories.items() if is_finished(events)}
    if not finished:
        raise RunError("no worker finished, so there is nothing to sum up; their events tell why")
    rounds = [record for events in histories.values() for record in events if record["event"] == "round"]
    tried = [record for record in rounds if record["tried"]]
    validations = [_of_kind(events, "evaluation") for events in finished.values()]
    ends = [_of_kind(events, "finished")[-1] for events in finished.values()]
    return Summary(
        validation_loss_first=_mean(records[0]["validation_loss"] for records in validations),
        validation_loss_last=_mean(records[-1]["validation_loss"] for records in validations),
        mixed_share=_mean(float(record["mixed"]) for record in tried) if tried else 0.0,
        replica_spread=mixing.spread([load_file(folder / "model.safetensors") for folder in finished]),
        rounds=max(int(end["round"]) for end in ends),
        peers=len(finished),
        workers=len(folders),
        tokens=sum(int(end["tokens"]) for end in ends),
        seconds=round(max(active_s(events) for events in histories.values()), 3),
        bytes_sent=sum(int(record["bytes_sent"]) for record in rounds),
        bytes_received=sum(int(record["bytes_received"]) for record in rounds),
    )


def write(path: Path, summary: Summary) -> None:
    """Writes `summary.json`, whole or not at all."""
    write_whole(path, json.dumps(asdict(summary), indent=1).encode() + b"\n")


def read(path: Path) -> Summary | None:
    """Reads a `summary.json`; None where there is no whole one."""
    try:
        return Summary(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def lines(summary: Summary) -> list[str]:
    """The summary for a person."""
    from gasloc.view import bytes_in_words, time_in_words

    share = f"{summary.mixed_share:.1%} of rounds with a partner in sight"
    return [
        f"peers            {summary.peers} of {summary.workers} finished",
        f"rounds           {summary.rounds}, mixed {share}",
        f"validation loss  {summary.validation_loss_first:.4f} -> {summary.validation_loss_last:.4f} nats per token",
        f"replica spread   {summary.replica_spread:.5f}",
        f"tokens           {summary.tokens:,} in {time_in_words(summary.seconds)}",
        f"sent             {bytes_in_words(summary.bytes_sent)}, all peers together",
    ]


def is_finished(events: Iterable[Record]) -> bool:
    """Whether a peer came to the end of its run."""
    return any(record["event"] == "finished" for record in events)


def active_s(events: Sequence[Record]) -> float:
    """Seconds between a peer's events, without the pauses between one process and the next."""
    total = 0.0
    for before, after in itertools.pairwise(events):
        # `listening` comes first in every process
        if after["event"] != "listening":
            total += max(float(after["time"]) - float(before["time"]), 0.0)
    return total


def plot(path: Path, folders: Sequence[Path]) -> bool:
    """Draws the loss of every peer, and the validation loss, over rounds; False without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    validation: dict[int, list[float]] = {}
    for folder in folders:
        events = _events(folder)
        # after a crash rounds are done again: the last time counts
        losses = {int(r["round"]) + 1: float(r["loss"]) for r in _of_kind(events, "round")}
        axes.plot(list(losses), list(losses.values()), linewidth=1, alpha=0.7, label=f"{folder.name}, training")
        for number, loss in {int(r["round"]): r["validation_loss"] for r in _of_kind(events, "evaluation")}.items():
            validation.setdefault(number, []).append(float(loss))
    numbers = sorted(validation)
    means = [_mean(validation[number]) for number in numbers]
    axes.plot(numbers, means, "ko-", linewidth=2, markersize=4, label="validation, mean over peers")
    axes.set_xlabel("round")
    axes.set_ylabel("loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def _events(folder: Path) -> list[Record]:
    path = folder / "events.jsonl"
    return read_events(path) if path.exists() else []


def _of_kind(events: Iterable[Record], name: str) -> list[Record]:
    return [record for record in events if record["event"] == name]


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
