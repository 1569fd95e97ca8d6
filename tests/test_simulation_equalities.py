"""What must be equal in the simulator, in float64 to 1e-12 over five rounds."""

import pytest
import torch
from torch import Tensor

from gasloc import mixing, sampler
from gasloc.inner import clip, learning_rate, make_inner, set_learning_rate
from gasloc.model import build
from gasloc.outer import make_outer
from gasloc.recipe import Recipe
from gasloc.simulation.conditions import Conditions
from gasloc.simulation.quadratic import QuadraticProblem
from gasloc.simulation.run import Variant
from tests.diloco import diloco
from tests.simulations import assert_equal, decoder, play, tiny_corpus, tiny_recipe

MEAN = {"quorum": 4, "overlap_steps": 0, "merge": "mean"}


def reference(recipe: Recipe, workers: int) -> list[dict[str, Tensor]]:
    """DiLoCo with the trainer's own model, AdamW, schedule, clipping and sampler: theta after each round."""
    corpus = tiny_corpus()
    models = [build(recipe.model, recipe.seed).double() for _ in range(workers)]
    inners = [make_inner(model, recipe.inner) for model in models]

    def local_steps(worker: int, round: int, theta: dict[str, Tensor]) -> dict[str, Tensor]:
        model, inner = models[worker], inners[worker]
        model.load_state_dict(theta, strict=False)
        for step in range(round * recipe.local_steps, (round + 1) * recipe.local_steps):
            set_learning_rate(inner, learning_rate(step, recipe.inner, recipe.total_steps))
            inputs, targets = sampler.batch(
                corpus.train,
                peer_id=f"worker-{worker}",
                step=step,
                seed=recipe.seed,
                batch_size=recipe.inner.batch_size,
                context_length=recipe.model.context_length,
            )
            inner.zero_grad()
            model.loss(inputs, targets).backward()  # type: ignore[no-untyped-call]
            clip(model, recipe.inner)
            inner.step()
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    start = {name: parameter.detach().clone() for name, parameter in models[0].named_parameters()}
    return diloco(start, local_steps, make_outer(recipe.outer), workers=workers, rounds=recipe.rounds)


@pytest.mark.parametrize("outer", [{"momentum": 0.9}, {"momentum": 0.0}, {"optimizer": "adam", "learning_rate": 0.01}])
def test_all_to_all_is_diloco(outer: dict[str, object]) -> None:
    recipe = tiny_recipe(outer=outer)
    result, _ = play(recipe, decoder(recipe), 4)
    expected = reference(recipe, 4)[-1]
    for parameters in result.parameters:
        assert_equal(parameters, expected)
    start = decoder(recipe).initial()
    assert any((expected[name] - start[name]).abs().max() > 1e-2 for name in start), "nothing was learned"


def test_syncer_with_everybody_in_the_quorum_is_diloco() -> None:
    recipe = tiny_recipe(topology="syncer", syncer=MEAN)
    result, heard = play(recipe, decoder(recipe), [Conditions(bandwidth=2e3, latency_s=0.1)] * 4)
    for parameters in result.parameters:
        assert_equal(parameters, reference(recipe, 4)[-1])
    assert {event.name for _, _, event in heard} == {"run_started", "joined", "evaluation", "round", "finished"}


def test_radial_directional_merging_is_another_thing() -> None:
    recipe = tiny_recipe(topology="syncer", syncer=MEAN | {"merge": "rda"})
    result, _ = play(recipe, decoder(recipe), 4)
    with pytest.raises(AssertionError):
        assert_equal(result.parameters[0], reference(recipe, 4)[-1], 1e-6)


def test_overlap_hidden_by_a_link_that_takes_no_time_is_blocking() -> None:
    blocking = tiny_recipe(topology="syncer", syncer=MEAN)
    overlapped = tiny_recipe(topology="syncer", syncer=MEAN | {"overlap_steps": 2})
    expected, _ = play(blocking, decoder(blocking), 4)
    result, _ = play(overlapped, decoder(overlapped), 4)
    slow, _ = play(overlapped, decoder(overlapped), [Conditions(bandwidth=1e4)] * 4)
    start = decoder(blocking).initial()
    # what is sent after step H is merged and back before the next step, though nobody waits for it
    moved = sum(float((expected.parameters[0][name] - start[name]).square().sum()) for name in start) ** 0.5
    apart = sum(float((result.parameters[0][n] - expected.parameters[0][n]).square().sum()) for n in start) ** 0.5
    late = sum(float((slow.parameters[0][n] - expected.parameters[0][n]).square().sum()) for n in start) ** 0.5
    assert apart < late < moved


@pytest.mark.parametrize("topology", ["all-to-all", "2-peer", "1-peer"])
def test_fragments_all_due_at_the_end_are_no_fragments(topology: str) -> None:
    whole = tiny_recipe(topology=topology)
    parts = tiny_recipe(topology=topology, fragments=3)
    expected, _ = play(whole, decoder(whole), 5)
    result, _ = play(parts, decoder(parts), 5, Variant(staggered=False))
    for left, right in zip(result.parameters, expected.parameters, strict=True):
        assert_equal(left, right)


def test_fragments_at_their_own_steps_differ_and_send_as_much() -> None:
    whole = tiny_recipe()
    parts = tiny_recipe(fragments=3)
    expected, _ = play(whole, decoder(whole), 4)
    result, _ = play(parts, decoder(parts), 4)
    assert sum(result.sent_bytes) == sum(expected.sent_bytes)
    with pytest.raises(AssertionError):
        assert_equal(result.parameters[0], expected.parameters[0], 1e-6)


def test_a_hypercube_of_mixes_is_the_exact_mean() -> None:
    cube = tiny_recipe(topology="exponential", mixes=3)
    full = tiny_recipe(topology="all-to-all")
    expected, _ = play(full, decoder(full), 8)
    result, _ = play(cube, decoder(cube), 8)
    for left, right in zip(result.parameters, expected.parameters, strict=True):
        assert_equal(left, right)


def test_ddp_is_one_worker_with_the_mean_gradient() -> None:
    recipe = tiny_recipe(topology="ddp", inner={"clip_norm": 1e6, "warmup_steps": 0, "learning_rate": 0.01})
    problem = QuadraticProblem(4, dtype=torch.float64)
    result, _ = play(recipe, problem, 4)
    theta = {name: tensor.requires_grad_() for name, tensor in problem.initial().items()}
    inner = recipe.inner
    adamw = torch.optim.AdamW(theta.values(), betas=(inner.beta1, inner.beta2), eps=inner.epsilon, weight_decay=0.0)
    for step in range(recipe.total_steps):
        set_learning_rate(adamw, learning_rate(step, inner, recipe.total_steps))
        adamw.zero_grad()
        losses = [problem.loss(theta, problem.batch(f"worker-{worker}", step)) for worker in range(4)]
        (torch.stack(losses).mean()).backward()  # type: ignore[no-untyped-call]
        adamw.step()
    for parameters in result.parameters:
        assert_equal(parameters, {name: tensor.detach() for name, tensor in theta.items()})


def test_dadam_and_local_dadam_on_complete_graphs_keep_workers_equal_after_a_mix() -> None:
    for topology in ("dadam", "local-dadam"):
        recipe = tiny_recipe(topology=topology)
        result, _ = play(recipe, decoder(recipe), 4, Variant(graph="all-to-all"))
        spread = mixing.spread(result.parameters)
        # dadam adds each worker's own update after the mix
        assert spread < 1e-12 if topology == "local-dadam" else 0 < spread < 0.1


def test_stacked_steps_are_a_plain_loop() -> None:
    recipe = tiny_recipe(topology="2-peer")
    stacked, plain = decoder(recipe), decoder(recipe)
    assert stacked.batched, "a problem this small is stacked"
    plain.batched = False
    speeds = [Conditions(step_time_s=seconds) for seconds in (1.0, 0.5, 3.0)]
    left, _ = play(recipe, stacked, speeds)
    right, _ = play(recipe, plain, speeds)
    for one, other in zip(left.parameters, right.parameters, strict=True):
        assert_equal(one, other)
