"""What a peer tells the others of how fast it steps."""

from dataclasses import replace
from pathlib import Path

import pytest

from gasloc.recipe import parse
from gasloc.round_result import RoundResult
from gasloc.swarm import Swarm
from peers.node import PeerOptions
from tests.test_guard import Weight


def test_a_step_is_timed_by_the_steps_between_two_results(tmp_path: Path) -> None:
    """Under overlap a round of one step may end when twenty of the next are done: that is no slow step."""
    ended = RoundResult(0, 1, (), {}, 0, 0, "", None, 0.0, 0, 0, 1, "", waited_s=0.5)
    with Swarm.start(parse({"rounds": 50}), PeerOptions(tmp_path / "key", host="127.0.0.1")) as swarm:
        swarm.enter(Weight(1.0))
        swarm.train()
        swarm.publish(replace(ended, steps_since=20), seconds=2.5)
        assert swarm._status.step_time_s == pytest.approx(0.1)
        swarm.publish(replace(ended, steps_since=0), seconds=0.5)
        assert swarm._status.step_time_s == pytest.approx(0.1), "two results at once measure nothing"
        swarm.publish(replace(ended, local_steps=10), seconds=1.5)
        assert swarm._status.step_time_s == pytest.approx(0.1)
