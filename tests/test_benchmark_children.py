"""Processes that benchmarks start: asked, answered, reported, and gone whatever happens."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.children import nursery

ECHO = """
import json, sys, time
while time.process_time() < 0.1:  # more than the clock tick that CPU time is told in
    pass
print("a library says something", flush=True)
for line in sys.stdin:
    print(json.dumps({"report": "seen"}), flush=True)
    print(line, end="", flush=True)
"""
STUBBORN = """
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print('{"child": %d}' % child.pid, flush=True)
time.sleep(600)  # even where its own child is gone
"""


def test_a_child_answers_and_reports_and_ends_with_the_block() -> None:
    with nursery("test") as home:
        child = home.start([sys.executable, "-c", ECHO])
        for number in range(3):
            child.ask({"number": number})
            assert child.answer(60) == {"number": number}
        assert child.reports == ["seen"] * 3
        child.check()
        assert child.cpu_s() > 0
        folder = home.folder
    assert child.process.returncode == 0
    assert not folder.exists()


def test_a_child_that_ends_early_is_told_with_its_last_words() -> None:
    with pytest.raises(RuntimeError, match=r"ended early; the last words: .*no such luck"), nursery("test") as home:
        home.start([sys.executable, "-c", "raise SystemExit('no such luck')"]).answer(60)


def test_a_child_that_does_not_end_is_ended_with_its_own_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.children._END_S", 0.2)
    with nursery("test") as home:
        child = home.start([sys.executable, "-c", STUBBORN])
        grandchild = child.answer(60)["child"]
    assert child.process.returncode == -signal.SIGKILL
    assert not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_block_once(number: signal.Signals) -> None:
    script = """
from benchmarks.children import interrupt_on_signals
import os, signal, sys
interrupt_on_signals()
number = signal.Signals(int(sys.argv[1]))
try:
    os.kill(os.getpid(), number)
    signal.pause()
except KeyboardInterrupt:
    os.kill(os.getpid(), number)  # taken no more
    print("cleared up")
"""
    words = [sys.executable, "-c", script, str(int(number))]
    root = Path(__file__).parents[1]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=root, check=True)
    assert done.stdout == "cleared up\n"


def test_folders_of_killed_processes_are_removed_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    names = [f"gasloc-test-{gone.pid}-abc", f"gasloc-test-{os.getpid()}-abc", "gasloc-test-mine", f"other-{gone.pid}-a"]
    for name in names:
        (tmp_path / name / "inner").mkdir(parents=True)
    with nursery("test"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])
