"""What came of a run, out of the peers' events and final weights."""

import math
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gasloc import summary
from gasloc.errors import RunError
from gasloc.events import Evaluation, Event, Finished, Listening, Round, as_line

START = Listening(peer="p", addresses=("/ip4/127.0.0.1/tcp/1/p2p/p",), join="gasloc join --peers x", local_only=True)


def ended(number: int, *, loss: float, mixed: bool, tried: bool) -> Round:
    return Round(
        round=number,
        step=(number + 1) * 10,
        loss=loss,
        lr=1e-3,
        local_steps=10,
        tokens=(number + 1) * 100,
        tokens_per_s=50.0,
        partners=("x",) if mixed else (),
        mixed=mixed,
        tried=tried,
        reason="mixed with 1 of 1" if mixed else "nobody to mix with this round",
        next_round=number + 1,
        next_reason="follows",
        distance=0.1 if mixed else None,
        bytes_sent=7 if mixed else 0,
        bytes_received=5 if mixed else 0,
        exchange_s=0.1,
        seconds=2.0,
    )


def validated(number: int, loss: float) -> Evaluation:
    return Evaluation(round=number, step=number * 10, validation_loss=loss, seconds=0.1)


def finished(tokens: int) -> Finished:
    return Finished(round=2, step=20, tokens=tokens, model="model.safetensors", seconds=4.0)


def lay_down(folder: Path, events: list[tuple[float, Event]], weight: float | None) -> Path:
    folder.mkdir()
    (folder / "events.jsonl").write_text("".join(as_line(event, now) + "\n" for now, event in events))
    if weight is not None:
        save_file({"w": torch.full((4,), weight)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two peers of two rounds; the second was started twice, with an hour between, and did round 1 twice."""
    one: list[tuple[float, Event]] = [
        (10.0, START),
        (11.0, validated(0, 5.0)),
        (13.0, ended(0, loss=4.0, mixed=True, tried=True)),
        (15.0, ended(1, loss=3.0, mixed=True, tried=True)),
        (16.0, validated(2, 3.5)),
        (17.0, finished(200)),
    ]
    other: list[tuple[float, Event]] = [
        (10.0, START),
        (12.0, validated(0, 5.2)),
        (13.0, ended(0, loss=4.2, mixed=False, tried=True)),
        (15.0, ended(1, loss=3.8, mixed=False, tried=False)),
        (3615.0, START),
        (3617.0, ended(1, loss=3.2, mixed=True, tried=True)),
        (3618.0, validated(2, 3.7)),
        (3619.0, finished(210)),
    ]
    return [lay_down(tmp_path / "worker-0", one, 1.0), lay_down(tmp_path / "worker-1", other, 3.0)]


def test_the_summary_is_what_the_events_and_weights_say(folders: list[Path]) -> None:
    result = summary.summarise(folders)

    assert result.validation_loss_first == pytest.approx(5.1)
    assert result.validation_loss_last == pytest.approx(3.6)
    assert result.mixed_share == pytest.approx(3 / 4)  # the round with nobody in sight was not tried
    assert result.replica_spread == pytest.approx(0.5)  # 1 and 3 around 2
    assert (result.rounds, result.peers, result.workers, result.tokens) == (2, 2, 2, 410)
    assert result.seconds == pytest.approx(5.0 + 4.0)  # without the hour's pause
    assert (result.bytes_sent, result.bytes_received) == (21, 15)


def test_a_worker_that_died_is_counted_as_started_only(folders: list[Path], tmp_path: Path) -> None:
    half: list[tuple[float, Event]] = [(10.0, START), (11.0, validated(0, 9.0))]
    dead = lay_down(tmp_path / "worker-2", half, None)
    never = tmp_path / "worker-3"
    never.mkdir()

    result = summary.summarise([*folders, dead, never])

    assert (result.peers, result.workers) == (2, 4)
    assert result.validation_loss_first == pytest.approx(5.1)


def test_with_nobody_finished_there_is_no_summary(tmp_path: Path) -> None:
    dead = lay_down(tmp_path / "worker-0", [(10.0, START)], None)

    with pytest.raises(RunError, match="no worker finished"):
        summary.summarise([dead])


def test_a_summary_is_read_as_it_was_written(folders: list[Path], tmp_path: Path) -> None:
    result = summary.summarise(folders)
    summary.write(tmp_path / "summary.json", result)

    assert summary.read(tmp_path / "summary.json") == result
    assert summary.read(tmp_path / "missing.json") is None
    (tmp_path / "torn.json").write_text((tmp_path / "summary.json").read_text()[:-9])
    assert summary.read(tmp_path / "torn.json") is None
    text = "\n".join(summary.lines(result))
    assert "5.1000 -> 3.6000" in text
    assert "75.0%" in text


def test_one_peer_alone_has_a_spread_of_zero_and_no_share(tmp_path: Path) -> None:
    events: list[tuple[float, Event]] = [
        (1.0, START),
        (2.0, validated(0, 5.0)),
        (3.0, ended(0, loss=4.0, mixed=False, tried=False)),
        (4.0, validated(1, 4.0)),
        (5.0, finished(100)),
    ]
    result = summary.summarise([lay_down(tmp_path / "worker-0", events, 1.0)])

    assert result.replica_spread == 0.0
    assert result.mixed_share == 0.0


def test_the_plot_is_a_picture_of_some_size(folders: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    assert summary.plot(tmp_path / "loss.png", folders)
    pixels = imread(tmp_path / "loss.png")
    assert pixels.shape[0] > 400
    assert pixels.shape[1] > 600
    assert not math.isclose(float(pixels.min()), float(pixels.max()))


def test_without_matplotlib_there_is_no_plot_and_no_error(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    assert not summary.plot(tmp_path / "loss.png", folders)
    assert not (tmp_path / "loss.png").exists()
