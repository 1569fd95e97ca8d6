"""`gasloc recipe check`: is a recipe whole, and what does it ask of a peer?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gasloc.errors import RecipeError
from gasloc.loading import loading

if TYPE_CHECKING:
    from gasloc.recipe import Recipe

app = typer.Typer(help="Look at recipes.", no_args_is_help=True, rich_markup_mode=None)

_CODEC_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1.02, "modular8": 1.02, "modular4": 0.53}
_PARTNERS = {"none": 0, "1-peer": 1, "2-peer": 2, "ring": 2, "exponential": 1}


@app.callback()
def _group() -> None:
    """Look at recipes."""


@app.command("check")
def check(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A shipped recipe's name, or a TOML file.")],
) -> None:
    """Validate a recipe and print its parameters, memory a peer and bytes a round."""
    from gasloc.recipe import load

    recipe = load(name)
    for line in describe(recipe):
        typer.echo(line)


def describe(recipe: Recipe) -> list[str]:
    """What the recipe asks of a peer, a line each. Raises `RecipeError` if its peers would drift apart."""
    with loading():
        from gasloc.consensus import consensus
        from gasloc.model import parameter_count
        from gasloc.stability import Verdict
        from gasloc.view import bytes_in_words

    parameters = parameter_count(recipe.model)
    partners = _PARTNERS.get(recipe.topology)
    # float32: weights, gradients, two AdamW moments, anchor, outer momentum, and what each partner sends
    copies = 6 + (partners if partners is not None else 2)
    once = parameters * _CODEC_BYTES[recipe.exchange.codec]
    # an all-reduce sends 2 (n-1)/n of the model; a learner sends each fragment once
    models = partners if partners is not None else 2 if recipe.topology == "all-to-all" else 1
    sent = bytes_in_words(once * models * recipe.mixes)
    lines = [
        f"recipe      {recipe.name}, digest {recipe.digest[:12]}",
        f"parameters  {parameters:,}",
        f"memory      {bytes_in_words(4 * parameters * copies)} a peer, activations aside",
        f"bytes       {sent} sent a round and peer ({recipe.topology}, {recipe.exchange.codec})",
        f"steps       {recipe.rounds} rounds of {recipe.local_steps}, {recipe.total_steps} steps a peer",
    ]
    verdict, reason = consensus(recipe)
    if verdict is Verdict.REFUSE:
        raise RecipeError(f"recipe: outer: {reason}")
    lines.append(f"consensus   {reason}")
    return lines
