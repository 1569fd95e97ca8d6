"""What a person sees."""

import io

import pytest
from rich.console import Console

from gasloc.events import Downloading, Evaluation, Event, Finished, Joined, Listening, Round, RunStarted, Warned
from gasloc.launch_view import LiveLaunchView, PlainLaunchView, Progress
from gasloc.view import LiveView, PlainView, bytes_in_words, time_in_words

JOIN = "gasloc join --peers /ip4/203.0.113.5/tcp/31337/p2p/12D3KooWQYV9dGMFoRzNStwpXztXaBUjtPqi6aU76ZgUriHhKust"
LISTENING = Listening(peer="12D3KooWme", addresses=("/ip4/203.0.113.5/tcp/31337",), join=JOIN, local_only=False)
STARTED = RunStarted(
    peer="12D3KooWme",
    run="tiny-1",
    recipe="tiny",
    digest="d",
    rounds=30,
    round=0,
    step=0,
    resumed=False,
    parameters=402176,
    device="cpu",
    threads=2,
    pid=1,
    folder="runs/one",
)


def ended(number: int, *, mixed: bool = True, reason: str = "mixed with 1 of 1") -> Round:
    return Round(
        round=number,
        step=(number + 1) * 15,
        loss=3.25,
        lr=1e-3,
        local_steps=15,
        tokens=1000,
        tokens_per_s=12345.0,
        partners=("12D3KooWabcdef",) if mixed else (),
        mixed=mixed,
        tried=True,
        reason=reason,
        next_round=number + 1,
        next_reason="follows",
        distance=None,
        bytes_sent=1_600_000,
        bytes_received=1_500_000,
        exchange_s=0.1,
        seconds=2.0,
    )


def plain(*events: Event) -> list[str]:
    lines: list[str] = []
    view = PlainView(lines.append)
    for event in events:
        view.show(event)
    view.close()
    return lines


def test_the_join_command_is_a_line_of_its_own() -> None:
    assert JOIN in plain(LISTENING)


def test_on_a_narrow_terminal_the_join_command_is_not_broken() -> None:
    out = io.StringIO()
    view = LiveView(Console(file=out, force_terminal=True, width=40, color_system=None, legacy_windows=False))
    view.show(LISTENING)
    view.close()
    assert JOIN in out.getvalue().split("\n")


def test_a_peer_that_only_this_machine_reaches_says_which_flag_changes_it() -> None:
    local = Listening(peer="p", addresses=(), join=JOIN, local_only=True)
    assert "--host" in plain(local)[0]


def test_a_round_is_a_line_with_what_matters() -> None:
    (line,) = plain(ended(4))
    for part in ("round 4", "step 75", "3.2500", "12,345 tokens/s", "abcdef", "1.6 MB", "1.5 MB"):
        assert part in line


def test_the_reason_for_a_lonely_round_is_told_when_it_changes_only() -> None:
    lonely = "nobody to mix with this round"
    lines = plain(
        ended(0, mixed=False, reason=lonely),
        ended(1, mixed=False, reason=lonely),
        ended(2, mixed=False, reason="p: timeout"),
        ended(3),
    )
    told = [line for line in lines if not line.startswith("round")]
    assert told == [f"trained this round alone: {lonely}", "trained this round alone: p: timeout", "mixing again"]


def test_what_else_happens_is_told() -> None:
    lines = plain(
        STARTED,
        Joined(round=7, members=3, source="donor", reason="the swarm is at round 7", size_bytes=3_200_000, seconds=0.5),
        Evaluation(round=5, step=75, validation_loss=2.5, seconds=0.1),
        Warned("an address was dead"),
        Finished(round=30, step=450, tokens=900, model="m.safetensors", seconds=75.0),
    )
    assert "402,176 parameters" in lines[0]
    assert "3 members, starting at round 7" in lines[1]
    assert "3.2 MB" in lines[1]
    assert "2.5000" in lines[2]
    assert lines[3] == "warning: an address was dead"
    assert "1m15s" in lines[4]


def part(done_bytes: int, note: str = "") -> Downloading:
    return Downloading(
        round=7, done_bytes=done_bytes, total_bytes=10_000, bytes_per_s=1500.0, donors=("12D3KooWabcdef",), note=note
    )


def test_a_download_is_told_at_each_tenth_and_when_something_changes() -> None:
    downloads = [part(0, "downloading the state of round 7 from P"), *(part(done) for done in range(0, 10_001, 100))]
    downloads.insert(50, part(4_800, "Q is given up: it lied"))
    lines = plain(*downloads)
    assert lines[0] == "downloading the state of round 7 from P"
    assert lines[1] == "state of round 7: 1.0 kB of 10.0 kB, 1.5 kB per second, from ..abcdef"
    assert [line for line in lines if "given up" in line] == ["Q is given up: it lied"]
    assert len(lines) == 12


def test_the_live_view_redraws_a_download_in_one_line() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None, legacy_windows=False)
    view = LiveView(console)
    for event in (part(0, "downloading the state"), *(part(done) for done in range(0, 10_001, 100))):
        view.show(event)
    view.close()
    shown = out.getvalue()
    assert shown.count("downloading the state") == 1
    assert "state of round 7: 10.0 kB of 10.0 kB" in shown
    assert shown.count("\n") < 10
    view = LiveView(console)
    view.show(part(0))
    view.show(Joined(round=7, members=2, source="donor", reason="because", size_bytes=1, seconds=0.5))
    view.show(STARTED)
    view.close()
    assert "the first steps" in out.getvalue()


def test_the_live_view_redraws_round_and_time_left() -> None:
    out = io.StringIO()
    view = LiveView(Console(file=out, force_terminal=True, width=120, color_system=None, legacy_windows=False))
    for event in (STARTED, ended(9), Evaluation(round=10, step=150, validation_loss=2.75, seconds=0.1)):
        view.show(event)
    view.close()
    shown = out.getvalue()
    for part in ("round 10/30", "loss 3.2500", "validation 2.7500", "left 40s", "with ..abcdef", "12,345 tokens/s"):
        assert part in shown


def record(event: Event) -> dict[str, object]:
    return {"event": event.name} | {name: getattr(event, name) for name in event.__slots__}


def test_a_launch_tells_a_round_when_all_workers_ended_it() -> None:
    lines: list[str] = []
    view = PlainLaunchView(Progress(30), lines.append)
    for worker in ("worker-0", "worker-1"):
        view.show(worker, record(STARTED))
    view.show("worker-0", record(ended(0)))
    assert lines == []
    view.show("worker-1", record(ended(0, mixed=False)))
    assert len(lines) == 1
    assert lines[0].startswith("round 0: mean loss 3.2500, 1 of 2 mixed, 24,690 tokens/s")
    view.show("worker-0", record(Evaluation(round=1, step=15, validation_loss=2.0, seconds=0.1)))
    view.show("worker-1", record(Evaluation(round=1, step=15, validation_loss=3.0, seconds=0.1)))
    assert lines[1] == "after 1 rounds: mean validation loss 2.5000 nats per token"


def test_a_worker_that_died_is_not_waited_for() -> None:
    lines: list[str] = []
    view = PlainLaunchView(Progress(30), lines.append)
    for worker in ("worker-0", "worker-1"):
        view.show(worker, record(STARTED))
    view.lose("worker-1")
    view.show("worker-0", record(ended(0)))
    assert len(lines) == 1


def test_the_live_launch_view_has_a_row_a_worker() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None, legacy_windows=False)
    view = LiveLaunchView(Progress(30), console)
    for worker in ("worker-0", "worker-1"):
        view.show(worker, record(STARTED))
    view.show("worker-0", record(ended(9)))
    view.close()
    shown = out.getvalue()
    for part in ("worker-0", "worker-1", "10/30", "0/30"):
        assert part in shown


@pytest.mark.parametrize(
    ("size", "words"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_500_000, "1.5 MB"), (2e12, "2.0 TB")]
)
def test_sizes_in_words(size: float, words: str) -> None:
    assert bytes_in_words(size) == words


@pytest.mark.parametrize(("seconds", "words"), [(0, "0s"), (59.4, "59s"), (61, "1m01s"), (7260, "2h01m")])
def test_times_in_words(seconds: float, words: str) -> None:
    assert time_in_words(seconds) == words
