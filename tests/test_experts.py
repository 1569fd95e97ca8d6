"""The mixture of experts: routing, balance, and training in a swarm."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from gasloc import inner, model
from gasloc.errors import RecipeError
from gasloc.experts import Experts, balance
from gasloc.optimizer import GaslocOptimizer
from gasloc.recipe import InnerConfig, ModelConfig, parse
from tests.meeting import at_once, seats

SMALL = ModelConfig(
    vocabulary_size=32,
    dim=16,
    layers=2,
    heads=2,
    key_value_heads=1,
    hidden_dim=24,
    context_length=12,
    experts=4,
    experts_per_token=2,
)


def layer(config: ModelConfig = SMALL) -> Experts:
    made = Experts(config).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return made


def test_each_token_gets_the_weighted_words_of_its_best_experts() -> None:
    experts = layer()
    x = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    output, _ = experts(x)
    for token, said in zip(x.reshape(-1, 16), output.reshape(-1, 16), strict=True):
        shares = (experts.router.weight @ token).softmax(0)
        best = shares.argsort(descending=True)[:2]
        expected = sum(
            shares[e]
            / shares[best].sum()
            * (experts.down[e] @ (F.silu(experts.gate[e] @ token) * (experts.up[e] @ token)))
            for e in best.tolist()
        )
        assert torch.allclose(said, torch.as_tensor(expected), atol=1e-12, rtol=0)


def test_one_expert_a_token_of_equal_experts_is_the_dense_layer() -> None:
    experts = layer()
    with torch.no_grad():
        for stacked in (experts.gate, experts.up, experts.down):
            stacked.copy_(stacked[:1].expand_as(stacked))
    x = torch.randn(3, 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    dense = F.linear(F.silu(F.linear(x, experts.gate[0])) * F.linear(x, experts.up[0]), experts.down[0])
    assert torch.allclose(experts(x)[0], dense, atol=1e-12, rtol=0)


@given(st.integers(2, 8), st.integers(1, 60), st.integers(0, 2**31))
def test_the_balance_is_one_for_a_uniform_router_and_at_most_the_number_of_experts(
    experts: int, tokens: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shares = torch.randn(tokens, experts, dtype=torch.float64, generator=generator).softmax(-1)
    chosen = shares.topk(1, dim=-1).indices
    assert 0 < float(balance(shares, chosen)) <= experts
    uniform = torch.full((tokens, experts), 1 / experts, dtype=torch.float64)
    assert float(balance(uniform, chosen)) == pytest.approx(1.0)


def test_the_balancing_loss_alone_spreads_a_router_that_sends_all_to_one_expert() -> None:
    experts = layer()
    with torch.no_grad():
        experts.router.weight.zero_()
        experts.router.weight[0] = 0.5
    x = torch.rand(8, 12, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    optimizer = torch.optim.SGD([experts.router.weight], lr=0.2)
    first = float(experts(x)[1].detach())
    for _ in range(50):
        optimizer.zero_grad()
        torch.autograd.backward(experts(x)[1])
        optimizer.step()
    assert float(experts(x)[1].detach()) < 1.1 < first


def test_the_count_of_parameters_is_that_of_the_model_and_the_loss_has_the_balance_in_training_only() -> None:
    made = model.build(SMALL, seed=0)
    assert sum(p.numel() for p in made.parameters()) == model.parameter_count(SMALL)
    tokens = torch.arange(24).reshape(2, 12) % 32
    made.train()
    training = float(made.loss(tokens, tokens).detach())
    made.eval()
    assert training > float(made.loss(tokens, tokens).detach())


@pytest.mark.parametrize("topology", ["all-to-all", "2-peer"])
def test_a_swarm_trains_it(topology: str) -> None:
    """Three peers learn a repeating text for four rounds and end equal."""
    models = [model.build(SMALL, seed=0) for _ in range(3)]
    before = {name: parameter.clone() for name, parameter in models[0].named_parameters()}
    losses: dict[int, list[float]] = {}

    def work(index: int) -> None:
        made, config = models[index], InnerConfig(learning_rate=0.01)
        optimizer = GaslocOptimizer(
            inner.make_inner(made, config),
            made,
            network=places[index],
            topology=topology,
            local_steps=8,
            seed=5,
        )
        generator = torch.Generator().manual_seed(index)
        for _ in range(32):
            start = torch.randint(32, (8, 1), generator=generator)
            text = (start + torch.arange(13)) % 32
            loss = made.loss(text[:, :-1], text[:, 1:])
            torch.autograd.backward(loss)
            losses.setdefault(index, []).append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()

    places = seats("abc")
    at_once(*(partial(work, index) for index in range(3)))
    for index, made in enumerate(models):
        assert losses[index][-1] < 0.6 * losses[index][0]
        for name, parameter in made.named_parameters():
            assert not torch.equal(parameter, before[name]), name
            # a ring of three is complete, too
            assert torch.allclose(parameter, models[0].get_parameter(name), atol=1e-6), name


def test_more_experts_a_token_than_experts_is_refused() -> None:
    with pytest.raises(RecipeError, match="experts_per_token 3 is more than experts 2"):
        parse({"model": {"experts": 2, "experts_per_token": 3}})
