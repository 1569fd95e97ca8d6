"""Bars of benchmarks: lines, files and exit codes."""

import json
import math
from pathlib import Path

import pytest

from benchmarks.bars import Bar, finish


@pytest.mark.parametrize(
    ("bar", "line"),
    [
        (Bar("speed", 1.7, 1.7, at_least=True), "bar speed 1.7 1.7 ok"),
        (Bar("speed", 1.69999, 1.7, at_least=True), "bar speed 1.7 1.7 short"),
        (Bar("bytes", 1.004321, 1.01, at_least=False), "bar bytes 1.004 1.01 ok"),
        (Bar("bytes", 1.02, 1.01, at_least=False), "bar bytes 1.02 1.01 short"),
        (Bar("bytes", math.nan, 1.01, at_least=False), "bar bytes nan 1.01 short"),
        (Bar("speed", math.nan, 1.01, at_least=True), "bar speed nan 1.01 short"),
    ],
)
def test_a_line_says_name_value_limit_and_verdict(bar: Bar, line: str) -> None:
    assert bar.line() == line


@pytest.mark.parametrize(("value", "code"), [(2.0, 0), (1.0, 1)])
def test_one_short_bar_fails_a_strict_run(value: float, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    bars = [Bar("a", 3.0, 2.0, at_least=True), Bar("b", value, 2.0, at_least=True)]
    assert finish(bars, {}, strict=True) == code
    assert finish(bars, {}) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_figures_and_bars_are_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "figures.json"
    bars = [Bar("a", 3.0, 2.0, at_least=True), Bar("b", math.inf, 2.0, at_least=False)]
    finish(bars, {"rows": [1, 2]}, json_path=path)
    written = json.loads(path.read_text())
    assert written["rows"] == [1, 2]
    assert [(row["name"], row["value"], row["ok"]) for row in written["bars"]] == [("a", 3.0, True), ("b", None, False)]


def test_what_cannot_be_told_apart_is_refused() -> None:
    with pytest.raises(ValueError, match="one word"):
        Bar("two words", 1.0, 1.0, at_least=True)
    with pytest.raises(ValueError, match="taken"):
        finish([], {"bars": 1})
