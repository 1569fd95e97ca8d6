"""`gasloc start`: begin a run, or bring one back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gasloc.commands import options
from gasloc.commands.choices import choose_recipe, presence
from gasloc.loading import loading

if TYPE_CHECKING:
    from gasloc.recipe import Recipe


def start(
    dir: options.Dir = None,
    recipe: options.RecipeName = None,
    rounds: options.Rounds = None,
    local_steps: options.LocalSteps = None,
    topology: options.Topology = None,
    seed: options.Seed = None,
    port: options.Port = 0,
    host: options.Host = "0.0.0.0",
    public_ip: options.PublicIp = None,
    announce_maddr: options.AnnounceMaddr = None,
    identity: options.Identity = None,
    secret_file: options.SecretFile = None,
    allow_file: options.AllowFile = None,
    deny_file: options.DenyFile = None,
    serve_rate: options.ServeRate = 0,
    peers: options.Peers = None,
    data: options.Data = None,
    device: options.Device = "auto",
    threads: options.Threads = 0,
    wait_for: options.WaitFor = 1,
    json: options.Json = False,
    stop_on_eof: options.StopOnEof = False,
) -> int:
    """Begin a run and print the command with which others join; in a used --dir, go on with its run."""
    changes: dict[str, object] = {
        "rounds": rounds,
        "local_steps": local_steps,
        "topology": topology,
        "seed": seed,
    }
    place = presence(
        dir=dir,
        host=host,
        port=port,
        public_ip=public_ip,
        announce_maddr=announce_maddr,
        peers=peers,
        identity=identity,
        secret_file=secret_file,
        allow_file=allow_file,
        deny_file=deny_file,
        serve_rate=serve_rate,
    )

    def make_recipe(stored: Recipe | None) -> Recipe:
        return choose_recipe(recipe, changes, stored)

    if dir is None:
        make_recipe(None)  # what is wrong with it is said before torch is loaded and a folder made

    with loading():
        from gasloc import worker

    return worker.start(
        worker.WorkerOptions(
            presence=place,
            data=data,
            device=device,
            threads=threads,
            json=json,
            wait_for=wait_for,
            stop_on_eof=stop_on_eof,
        ),
        make_recipe,
    )
