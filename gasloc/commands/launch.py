"""`gasloc launch`: several peers on this machine."""

import time
from typing import Annotated

import typer

from gasloc.commands import options
from gasloc.commands.choices import choose_recipe
from gasloc.loading import loading
from gasloc.run_folder import default_path


def launch(
    workers: Annotated[
        int | None,
        typer.Option("--workers", envvar="GASLOC_WORKERS", min=1, max=64, help="How many peers. Default: 4."),
    ] = None,
    dir: options.Dir = None,
    recipe: options.RecipeName = None,
    rounds: options.Rounds = None,
    local_steps: options.LocalSteps = None,
    topology: options.Topology = None,
    seed: options.Seed = None,
    data: options.Data = None,
    device: options.Device = "auto",
    secret_file: options.SecretFile = None,
    allow_file: options.AllowFile = None,
    deny_file: options.DenyFile = None,
    json: options.Json = False,
) -> int:
    """Train one model with several peers on this machine; in a used --dir, go on where they stopped."""
    changes: dict[str, object] = {
        "rounds": rounds,
        "local_steps": local_steps,
        "topology": topology,
        "seed": seed,
    }
    if dir is None:
        choose_recipe(recipe, changes, None)

    with loading():
        from gasloc import launch as launcher

    return launcher.launch(
        launcher.LaunchOptions(
            folder=dir or default_path(time.time()),
            workers=workers,
            recipe=recipe,
            changes=changes,
            data=data,
            device=device,
            access={"--secret-file": secret_file, "--allow-file": allow_file, "--deny-file": deny_file},
            json=json,
        )
    )
