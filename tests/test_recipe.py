"""Recipes: the shipped ones, their digest, and what is refused."""

import re
from importlib import resources
from pathlib import Path

import pytest

from gasloc import model, recipe
from gasloc.errors import RecipeError
from gasloc.stability import Verdict, safe_momentum, stability, verdict


@pytest.mark.parametrize("name", recipe.shipped())
def test_shipped_recipes_load_and_state_their_size(name: str) -> None:
    loaded = recipe.load(name)
    assert loaded.name == name
    text = (resources.files("gasloc") / "recipes" / f"{name}.toml").read_text()
    stated = re.search(r"([\d,]+) parameters", text)
    assert stated is not None
    assert int(stated[1].replace(",", "")) == model.parameter_count(loaded.model)


@pytest.mark.parametrize("name", recipe.shipped())
@pytest.mark.parametrize("n", [2, 8, 64])
def test_peers_of_a_shipped_recipe_stay_together(name: str, n: int) -> None:
    loaded = recipe.load(name)
    outer = loaded.outer
    growth = stability(loaded.topology, n, outer.learning_rate, outer.momentum, loaded.mixes, outer.nesterov)
    safe = safe_momentum(loaded.topology, n, outer.learning_rate, loaded.mixes, outer.nesterov)
    answer, reason = verdict(growth, safe)
    assert answer is Verdict.OK, reason


def test_the_three_shipped_recipes_are_there() -> None:
    assert recipe.shipped() == ["134m", "small", "tiny"]
    assert 9e6 < model.parameter_count(recipe.load("small").model) < 11e6
    assert 133e6 < model.parameter_count(recipe.load("134m").model) < 135e6


def test_a_recipe_survives_json_and_keeps_its_digest() -> None:
    loaded = recipe.load("tiny")
    again = recipe.parse(loaded.model_dump(mode="json"))
    assert again == loaded
    assert again.digest == loaded.digest
    assert re.fullmatch("[0-9a-f]{64}", loaded.digest)


def test_the_digest_changes_with_any_value_and_not_with_the_way_it_is_written(tmp_path: Path) -> None:
    plain = recipe.parse({})
    assert recipe.parse({"outer": {"momentum": 0.6}}).digest != plain.digest
    assert recipe.parse({"seed": 1}).digest != plain.digest
    spelled = tmp_path / "spelled.toml"
    spelled.write_text("local_steps = 15\nrounds = 30\n[outer]\nmomentum = 0.50\n")
    assert recipe.load(str(spelled)).digest == plain.digest


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("rounds = 0", r"rounds = 0: "),
        ("round = 3", r"round = 3: "),
        ("topology = 'torus'", r"topology = 'torus': "),
        ("[outer]\nmomentum = 1.0", r"outer\.momentum = 1\.0: "),
        ("[inner]\nlearning_rate = nan", r"inner\.learning_rate = nan: "),
        ("[model]\ndim = 65", r"model: dim 65 over heads 4"),
        ("[model]\nkey_value_heads = 3", r"model: heads 4 must be a multiple of key_value_heads 3"),
        ("fragments = 16", r"fragments 16 is more than local_steps 15"),
        ("rounds = ", r"is not TOML"),
    ],
)
def test_an_impossible_value_is_refused_in_one_line_that_names_it(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(RecipeError, match=reason) as caught:
        recipe.load(str(file))
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_told_with_the_names_that_exist() -> None:
    with pytest.raises(RecipeError, match="'tinny' is neither a file nor one of the shipped: 134m, small, tiny"):
        recipe.load("tinny")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "binary.toml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="cannot be read"):
        recipe.load(str(file))


def test_override_changes_only_what_is_given_and_checks_again() -> None:
    loaded = recipe.load("tiny")
    changed = recipe.override(loaded, {"rounds": 7, "local_steps": None})
    assert (changed.rounds, changed.local_steps) == (7, loaded.local_steps)
    assert changed.total_steps == 7 * loaded.local_steps
    with pytest.raises(RecipeError, match="rounds = -1"):
        recipe.override(loaded, {"rounds": -1})
