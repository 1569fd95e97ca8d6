"""The simulator: speeds, failures, joins, determinism, costs, and what it refuses."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gasloc import mixing
from gasloc.errors import RecipeError, RunError, UsageError
from gasloc.events import Joined, Round, Warned, as_line
from gasloc.recipe import Recipe
from gasloc.simulation.conditions import Conditions, conditions_of, numbers
from gasloc.simulation.quadratic import QuadraticProblem
from gasloc.simulation.record import Record
from gasloc.simulation.run import Simulation, Variant, beside, run_together
from tests.simulations import Heard, decoder, play, tiny_recipe

EVERYTHING: list[dict[str, Any]] = [
    {"topology": "1-peer"},
    {"topology": "2-peer"},
    {"topology": "2-peer", "mixes": 2},
    {"topology": "2-peer", "fragments": 3},
    {"topology": "1-peer", "outer": {"rule": "published", "momentum": 0.3}},
    {"topology": "all-to-all"},
    {"topology": "all-to-all", "fragments": 2},
    {"topology": "ring"},
    {"topology": "exponential"},
    {"topology": "none"},
    {"topology": "syncer", "syncer": {"quorum": 2}},
    {"topology": "syncer", "syncer": {"quorum": 1}, "fragments": 3},
    {"topology": "ddp"},
    {"topology": "dadam"},
    {"topology": "local-dadam"},
    {"topology": "noloco"},
]


def name_of(changes: dict[str, Any]) -> str:
    return "-".join(f"{key}={value}" for key, value in changes.items())


def quadratic_recipe(**changes: Any) -> Recipe:
    values: dict[str, Any] = {
        "rounds": 12,
        "topology": "2-peer",
        "local_steps": 30,
        "inner": {"learning_rate": 0.02, "warmup_steps": 10, "weight_decay": 0.0},
        "evaluation": {"every_rounds": 100},
    }
    return tiny_recipe(**values | changes)


def rounds_of(heard: list[Heard], peer: str) -> list[Round]:
    return [event for who, _, event in heard if who == peer and isinstance(event, Round)]


def lines(heard: list[Heard]) -> str:
    return "\n".join(f"{peer} {as_line(event, now_s)}" for peer, now_s, event in heard)


@pytest.mark.parametrize("changes", EVERYTHING, ids=name_of)
def test_everything_trains(changes: dict[str, Any]) -> None:
    recipe = quadratic_recipe(**changes, local_steps=10)
    problem = QuadraticProblem(6, tensors=4)
    result, heard = play(recipe, problem, [Conditions(bandwidth=1e3, latency_s=0.01)] * 5)
    start = problem.validation_loss(problem.initial())
    for parameters in result.parameters:
        assert problem.validation_loss(parameters) < 0.2 * start
    assert result.tokens == [recipe.total_steps] * 5
    assert all(len(rounds_of(heard, f"worker-{number}")) == recipe.rounds for number in range(5))
    assert (sum(result.sent_bytes) > 0) == (changes["topology"] != "none")


@pytest.mark.parametrize("changes", EVERYTHING, ids=name_of)
def test_failures_and_joins_run_to_the_end(changes: dict[str, Any]) -> None:
    recipe = quadratic_recipe(**changes, local_steps=10)
    problem = QuadraticProblem(6, tensors=4)
    conditions = [
        Conditions(bandwidth=1e4, mtbf_s=60.0, mttr_s=15.0, join_s=25.0 if number == 4 else 0.0) for number in range(5)
    ]
    result, heard = play(recipe, problem, conditions)
    events = [event for _, _, event in heard]
    assert any(isinstance(event, Warned) and event.message.startswith("failed") for event in events)
    late = [event for who, _, event in heard if who == "worker-4" and isinstance(event, Joined)]
    assert late[0].source == "donor"
    assert late[0].size_bytes >= 4 * 24
    assert sum(event.name == "finished" for event in events) == 5
    start = problem.validation_loss(problem.initial())
    assert all(problem.validation_loss(parameters) < 0.5 * start for parameters in result.parameters)


@pytest.mark.parametrize("topology", ["2-peer", "syncer", "ddp"])
def test_same_seed_same_bytes_and_another_seed_others(topology: str) -> None:
    conditions = [Conditions(step_time_s=1.0 + number, mtbf_s=40.0, mttr_s=5.0, bandwidth=1e4) for number in range(4)]

    def run(seed: int) -> tuple[str, list[dict[str, torch.Tensor]]]:
        recipe = tiny_recipe(topology=topology, seed=seed)
        result, heard = play(recipe, decoder(recipe, torch.float32), conditions)
        return lines(heard), result.parameters

    text, parameters = run(0)
    text_again, parameters_again = run(0)
    assert text == text_again
    for one, other in zip(parameters, parameters_again, strict=True):
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    text_else, parameters_else = run(1)
    assert text != text_else
    assert not torch.equal(parameters[0]["embedding.weight"], parameters_else[0]["embedding.weight"])


def test_ddp_stays_equal_through_failures() -> None:
    recipe = quadratic_recipe(topology="ddp", local_steps=10)
    conditions = [Conditions(mtbf_s=80.0, mttr_s=10.0, bandwidth=1e4)] * 4
    result, heard = play(recipe, QuadraticProblem(6), conditions)
    assert any(isinstance(event, Warned) for _, _, event in heard)
    assert mixing.spread(result.parameters) == 0.0


SLOW_LAST = [Conditions(step_time_s=1.0)] * 3 + [Conditions(step_time_s=10.0)]


def test_with_pacing_a_straggler_takes_fewer_steps_and_all_converge() -> None:
    recipe, problem = quadratic_recipe(pacing=True, rounds=24), QuadraticProblem(6)
    result, heard = play(recipe, problem, SLOW_LAST)
    taken = [{event.local_steps for event in rounds_of(heard, f"worker-{number}")[1:]} for number in range(4)]
    assert taken == [{30}, {30}, {30}, {3}]
    start = problem.validation_loss(problem.initial())
    assert all(problem.validation_loss(parameters) < 0.02 * start for parameters in result.parameters)
    assert mixing.spread(result.parameters) < 1.0
    # its first round is as long as ten of the others'; then it jumps to theirs and falls into step
    slow = rounds_of(heard, "worker-3")
    assert len(slow) >= 12
    assert all(event.mixed for event in slow[-8:])


def test_a_round_with_a_straggler_is_as_long_as_one_without_when_paced() -> None:
    def longest_s(slow: list[Conditions], *, pacing: bool) -> float:
        recipe = quadratic_recipe(rounds=24, pacing=pacing, exchange={"grace_s": 1000.0})
        conditions = [Conditions(bandwidth=100.0)] * 3 + slow
        _, heard = play(recipe, QuadraticProblem(6), conditions)
        last = [event for number in range(4) for event in rounds_of(heard, f"worker-{number}")[-8:]]
        return max(event.seconds for event in last)

    alone_s = longest_s([Conditions(bandwidth=100.0)], pacing=False)
    slow = [Conditions(step_time_s=10.0, bandwidth=100.0)]
    assert longest_s(slow, pacing=False) > 5 * alone_s
    assert longest_s(slow, pacing=True) <= 1.02 * alone_s


def test_a_worker_on_a_thin_link_takes_fewer_steps_when_paced() -> None:
    conditions = [Conditions(bandwidth=100.0)] * 11 + [Conditions(bandwidth=3.0)]
    _, heard = play(quadratic_recipe(pacing=True), QuadraticProblem(6), conditions)
    thin = [event.local_steps for event in rounds_of(heard, "worker-11")]
    assert thin[0] == 30
    assert max(thin[1:]) <= 20


@pytest.mark.parametrize("topology", ["1-peer", "2-peer"])
def test_nobody_waits_for_a_thin_link_when_paced_and_its_partners_of_the_round_alone_take_fewer_steps(
    topology: str,
) -> None:
    even = [Conditions(bandwidth=24.0)] * 8
    seconds, steps = {}, {}
    for name, conditions in (("even", even), ("thin", [*even[1:], Conditions(bandwidth=2.4)])):
        recipe = quadratic_recipe(topology=topology, pacing=True, rounds=14, exchange={"grace_s": 6.0})
        _, heard = play(recipe, QuadraticProblem(6), conditions)
        late = [rounds_of(heard, f"worker-{number}")[6:] for number in range(7)]
        seconds[name] = sum(event.seconds for events in late for event in events) / sum(map(len, late))
        steps[name] = {
            (beside, event.local_steps)
            for events in late
            for event in events
            for beside in ["worker-7" in event.partners and name == "thin"]
        }
        assert all(event.mixed for events in late for event in events)
    assert steps["even"] == {(False, 30)}
    assert {count for beside, count in steps["thin"] if not beside} == {30}
    assert all(count < 30 for beside, count in steps["thin"] if beside)
    assert seconds["thin"] == pytest.approx(seconds["even"], rel=0.01)


@pytest.mark.parametrize("overlap", ["off", 30])
@pytest.mark.parametrize(("topology", "bandwidth"), [("1-peer", 0.6), ("2-peer", 1.2)])
def test_a_link_that_needs_longer_than_a_round_is_waited_for_by_nobody_once_known(
    topology: str, bandwidth: float, overlap: str | int
) -> None:
    # a model takes 40 s to a partner, or to both; a round 30 s and 1 or 2 s of exchange
    even = [Conditions(bandwidth=24.0)] * 8
    seconds, thin = {}, []
    for name, conditions in (("even", even), ("thin", [*even[1:], Conditions(bandwidth=bandwidth)])):
        exchange = {"grace_s": 60.0, "overlap": overlap}
        recipe = quadratic_recipe(topology=topology, pacing=True, rounds=30, exchange=exchange)
        _, heard = play(recipe, QuadraticProblem(6), conditions)
        ended_s = {(peer, event.round): now_s for peer, now_s, event in heard if isinstance(event, Round)}
        first_s, last_s = (max(ended_s[f"worker-{number}", at] for number in range(7)) for at in (4, 28))
        seconds[name] = last_s - first_s  # from one round in which it rests to another
        thin = rounds_of(heard, "worker-7")
    assert seconds["thin"] <= 1.03 * seconds["even"]
    traded = [event.round for event in thin[2:] if event.partners]
    assert len(traded) >= 5, "it is not left out"
    assert {later - earlier for earlier, later in itertools.pairwise(traded)} == {3}, "and its turns do not swing"
    assert sum(event.local_steps for event in thin) >= 0.5 * 30 * len(thin), "its link is busy for half of the time"


def test_a_slow_learner_is_neither_waited_for_nor_over_weighted() -> None:
    recipe = quadratic_recipe(topology="syncer", syncer={"quorum": 2}, local_steps=10)
    problem = QuadraticProblem(6)
    speeds = [Conditions(step_time_s=seconds) for seconds in (1.0, 1.0, 3.0, 10.0)]
    result, heard = play(recipe, problem, speeds)
    fast, slow = rounds_of(heard, "worker-0"), rounds_of(heard, "worker-3")
    assert max(event.seconds for event in fast[:-1]) == pytest.approx(10.0), "a learner never waits before its end"
    assert len(slow) < len(fast)
    assert any(event.mixed for event in slow)
    start = problem.validation_loss(problem.initial())
    assert problem.validation_loss(result.parameters[0]) < 0.05 * start


def test_a_peer_far_behind_takes_the_swarms_round_and_state() -> None:
    recipe = quadratic_recipe(rounds=30, local_steps=5, stale_rounds=2, exchange={"grace_s": 1.0})
    speeds = [Conditions(step_time_s=1.0)] * 3 + [Conditions(step_time_s=7.0)]
    _, heard = play(recipe, QuadraticProblem(4), speeds)
    slow = rounds_of(heard, "worker-3")
    assert len(slow) < 10
    assert [event.round for event in slow] == sorted({event.round for event in slow})
    assert any(event.next_round > event.round + 1 for event in slow)


def test_bytes_are_what_the_topology_says() -> None:
    problem = QuadraticProblem(8)  # 32 bytes
    expected = {"1-peer": 32, "2-peer": 64, "all-to-all": 48, "exponential": 32, "none": 0, "noloco": 64, "syncer": 32}
    for topology, size_bytes in expected.items():
        recipe = quadratic_recipe(topology=topology, rounds=3, local_steps=4)
        result, heard = play(recipe, problem, 4)
        assert result.sent_bytes == [3 * size_bytes] * 4, topology
        reported = sum(event.bytes_sent for event in rounds_of(heard, "worker-0"))
        assert reported == result.sent_bytes[0], topology


@pytest.mark.parametrize("topology", ["1-peer", "2-peer", "all-to-all", "syncer"])
def test_under_a_codec_less_travels_and_all_converge(topology: str) -> None:
    """The modular ones send a syncer what they would send in fp32."""
    problem = QuadraticProblem(64)  # a row of one dimension is never quantized
    changes: dict[str, Any] = {"topology": topology, "rounds": 3, "local_steps": 5}
    exact, _ = play(quadratic_recipe(**changes), problem, 4)
    for codec, share in (("bf16", 0.5), ("int8", 1.0), ("modular4", 1.0)):
        result, _ = play(quadratic_recipe(**changes, exchange={"codec": codec}), problem, 4)
        assert sum(result.sent_bytes) == pytest.approx(share * sum(exact.sent_bytes))
        loss, exact_loss = (problem.validation_loss(run.parameters[0]) for run in (result, exact))
        assert loss == pytest.approx(exact_loss, rel=0.05)


@pytest.mark.parametrize(("codec", "share"), [("int8", 0.30), ("modular8", 0.40), ("modular4", 0.30)])
def test_a_decoder_trades_what_the_wire_would_carry(codec: str, share: float) -> None:
    """In its first rounds: peers are not near each other yet, and many blocks are sent again."""
    sizes = {"dim": 32, "hidden_dim": 64}
    model = tiny_recipe().model.model_dump() | sizes
    runs = {}
    for name in ("fp32", codec):
        recipe = tiny_recipe(topology="2-peer", model=model, exchange={"codec": name})
        runs[name] = play(recipe, decoder(recipe, torch.float32), 4)[0]
    assert runs[codec].sent_bytes[0] <= share * runs["fp32"].sent_bytes[0]
    exact, lossy = (runs[name].parameters[0]["embedding.weight"] for name in ("fp32", codec))
    assert not torch.equal(exact, lossy)
    assert torch.allclose(exact, lossy, atol=0.05)


def test_simulations_beside_each_other_come_to_what_each_comes_to_alone() -> None:
    changes: list[dict[str, Any]] = [{"topology": "2-peer"}, {"topology": "all-to-all"}, {"topology": "1-peer"}]
    recipes = [tiny_recipe(**each) for each in changes]
    conditions = [Conditions()] * 3
    together = run_together(beside(recipes, decoder(recipes[0], torch.float64), conditions))
    for recipe, result in zip(recipes, together, strict=True):
        alone, _ = play(recipe, decoder(recipe, torch.float64), conditions)
        assert result.sent_bytes == alone.sent_bytes
        assert result.tokens == alone.tokens
        for one, other in zip(result.parameters, alone.parameters, strict=True):
            assert all(torch.allclose(tensor, other[name], rtol=0, atol=1e-9) for name, tensor in one.items())


def test_only_what_trains_alike_is_simulated_beside_each_other() -> None:
    recipes = [tiny_recipe(seed=0), tiny_recipe(seed=1)]
    with pytest.raises(ValueError, match="differ in seed"):
        beside(recipes, QuadraticProblem(4), [Conditions()] * 2)


def test_many_workers_reach_consensus() -> None:
    recipe = quadratic_recipe(rounds=10, local_steps=5, outer={"learning_rate": 0.7, "momentum": 0.5})
    problem = QuadraticProblem(8, diversity=1.0)
    result, _ = play(recipe, problem, 64)
    alone, _ = play(quadratic_recipe(topology="none", rounds=10, local_steps=5), problem, 64)
    assert mixing.spread(result.parameters) < 0.2 * mixing.spread(alone.parameters)


def test_a_lost_state_is_told_and_never_made_up() -> None:
    conditions = [Conditions(mtbf_s=60.0, mttr_s=float("inf"))] * 2
    with pytest.raises(RunError, match="state"):
        play(quadratic_recipe(), QuadraticProblem(4), [*conditions, Conditions(join_s=5e3)])


def test_a_loss_that_is_not_finite_ends_the_run_by_name() -> None:
    recipe = quadratic_recipe()
    with pytest.raises(RunError, match=r"worker-\d: the loss of step \d+ is"):
        play(recipe, QuadraticProblem(4, noise=1e30), 2)


@pytest.mark.parametrize(
    ("changes", "variant", "words"),
    [
        ({"topology": "syncer", "syncer": {"quorum": 9}}, Variant(), "quorum = 9 with 4 learners"),
        ({"fragments": 3}, Variant(), "a model of 2 tensors"),
        ({"topology": "ddp", "mixes": 2}, Variant(), "mixes = 2"),
        ({"topology": "syncer", "mixes": 2}, Variant(), "mixes = 2"),
        ({"topology": "noloco", "outer": {"rule": "published"}}, Variant(), "published"),
        ({"topology": "2-peer"}, Variant(graph="ring"), "--graph ring"),
        ({"topology": "dadam"}, Variant(graph="star"), "graph 'star' is unknown"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    changes: dict[str, Any], variant: Variant, words: str
) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        Simulation(quadratic_recipe(**changes), QuadraticProblem(4, tensors=2), [Conditions()] * 4, variant=variant)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "values",
    [
        {"step_time_s": 0.0},
        {"step_time_s": float("inf")},
        {"bandwidth": -1.0},
        {"bandwidth": float("nan")},
        {"latency_s": -0.1},
        {"mtbf_s": 0.0},
        {"mttr_s": -5.0},
        {"join_s": float("inf")},
    ],
)
def test_conditions_that_cannot_be_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(values))):
        Conditions(**values)


def test_values_are_given_once_or_once_a_worker() -> None:
    rest = {"step_time_s": [1.0], "latency_s": [0.0], "mtbf_s": [1e9], "mttr_s": [1.0], "join_s": [0.0]}
    each = conditions_of(3, bandwidth=[1.0, 2.0, 3.0], **rest)
    assert [one.bandwidth for one in each] == [1.0, 2.0, 3.0]
    with pytest.raises(UsageError, match="--bandwidth has 2 values for 3 workers"):
        conditions_of(3, bandwidth=[1.0, 2.0], **rest)
    with pytest.raises(UsageError, match="'fast' is not a number"):
        numbers("bandwidth", "1e6,fast")
    assert numbers("bandwidth", "1e6, inf") == [1e6, float("inf")]


def test_the_folder_holds_what_a_launch_leaves(tmp_path: Path) -> None:
    recipe = tiny_recipe(topology="2-peer")
    record = Record(tmp_path / "run", 3)
    result = Simulation(recipe, decoder(recipe, torch.float32), [Conditions(bandwidth=1e5)] * 3).run(record.listen)
    values = record.finish(recipe, result, 1.5)
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == values
    assert values["validation_loss_last"] < values["validation_loss_first"]
    assert values["mixed_share"] == 1.0
    assert values["bytes_sent_per_worker"] == result.sent_bytes
    assert values["bytes_sent"] == sum(result.sent_bytes)
    assert values["seconds"] == pytest.approx(result.seconds, abs=1e-3)
    assert values["peers"] == values["workers"] == 3
    assert values["replica_spread"] == pytest.approx(mixing.spread(result.parameters))
    for number in range(3):
        events = (tmp_path / "run" / f"worker-{number}" / "events.jsonl").read_text().splitlines()
        kinds = [json.loads(line)["event"] for line in events]
        assert kinds[0] == "run_started"
        assert kinds[-1] == "finished"
        assert kinds.count("round") == recipe.rounds
    with pytest.raises(UsageError, match="choose another --dir"):
        Record(tmp_path / "run", 3)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        Record(tmp_path / "file" / "run", 2)


def test_an_unknown_topology_is_refused() -> None:
    with pytest.raises(RecipeError, match="topology"):
        tiny_recipe(topology="star")
