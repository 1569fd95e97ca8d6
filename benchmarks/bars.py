"""What a benchmark is held to: a line for each bar, a file of figures, an exit code."""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Bar:
    """A measured value and its limit: the least that is good enough (`at_least`), or the most."""

    name: str
    value: float
    limit: float
    at_least: bool

    def __post_init__(self) -> None:
        if not self.name or any(character.isspace() for character in self.name):
            raise ValueError(f"a bar's name is one word, not {self.name!r}")

    @property
    def ok(self) -> bool:
        """Whether the value keeps the limit. NaN never does."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def line(self) -> str:
        """`bar NAME VALUE LIMIT ok`, or `... short`; values with four significant digits."""
        return f"bar {self.name} {self.value:.4g} {self.limit:g} {'ok' if self.ok else 'short'}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--json FILE` and `--strict`, which every benchmark with bars has; see `finish`."""
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--strict", action="store_true", help="exit code 1 where a bar is short")


def finish(
    bars: Sequence[Bar], figures: Mapping[str, object], *, json_path: Path | None = None, strict: bool = False
) -> int:
    """Writes one line for each bar to stdout, and `figures` with the bars under "bars" to `json_path`, if given.

    Returns the exit code: 1 where `strict` and a bar is short, else 0. Figures must be fit for JSON; a bar whose
    value is not finite is written as null. Raises `ValueError` for figures that have "bars" of their own.
    """
    if "bars" in figures:
        raise ValueError("the name 'bars' is taken: the bars themselves are written there")
    for bar in bars:
        sys.stdout.write(bar.line() + "\n")
    sys.stdout.flush()
    if json_path:
        rows = [asdict(bar) | {"value": bar.value if math.isfinite(bar.value) else None, "ok": bar.ok} for bar in bars]
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps({**figures, "bars": rows}, indent=1) + "\n")
    return 1 if strict and not all(bar.ok for bar in bars) else 0
