"""Recipes whose peers would drift apart are refused with a safe value, before anything starts."""

import pytest

from gasloc import cli
from gasloc.consensus import consensus
from gasloc.recipe import load, parse, shipped
from gasloc.stability import Verdict

DIVERGING = {"topology": "1-peer", "outer": {"learning_rate": 1.0, "momentum": 0.9}}


def test_one_peer_with_too_much_momentum_is_refused_and_the_value_proposed_is_safe() -> None:
    verdict, reason = consensus(parse(DIVERGING))
    assert verdict is Verdict.REFUSE
    assert "drift apart" in reason
    momentum = float(reason.split("use outer momentum ")[1].split(" or less")[0])
    safe = parse({"topology": "1-peer", "outer": {"learning_rate": 1.0, "momentum": momentum}})
    assert consensus(safe)[0] is Verdict.OK


def test_slow_consensus_is_warned_about() -> None:
    verdict, reason = consensus(parse({"topology": "2-peer", "outer": {"learning_rate": 1.05, "momentum": 0.9}}))
    assert verdict is Verdict.WARN, reason


@pytest.mark.parametrize("topology", ["none", "syncer"])
def test_where_peers_do_not_mix_there_is_nothing_to_refuse(topology: str) -> None:
    assert consensus(parse(DIVERGING | {"topology": topology}))[0] is Verdict.OK


@pytest.mark.parametrize("name", shipped())
def test_shipped_recipes_hold_together(name: str) -> None:
    assert consensus(load(name))[0] is Verdict.OK


def test_start_refuses_it_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path_factory.mktemp("drift")
    recipe = folder / "drift.toml"
    recipe.write_text('topology = "1-peer"\n[outer]\nlearning_rate = 1.0\nmomentum = 0.9\n')
    arguments = ["start", "--recipe", str(recipe), "--dir", str(folder / "run"), "--host", "127.0.0.1"]
    assert cli.run(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gasloc: recipe: outer: peers drift apart")
    assert "use outer momentum" in line
