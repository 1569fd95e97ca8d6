"""`gasloc doctor`: can this machine join, and if not, what to do?"""

import json as jsonlib
from pathlib import Path

import typer

from gasloc.commands import options
from gasloc.commands.choices import announced
from gasloc.loading import loading


def doctor(
    peers: options.Peers = None,
    dir: options.Dir = None,
    port: options.Port = 0,
    host: options.Host = "0.0.0.0",
    public_ip: options.PublicIp = None,
    announce_maddr: options.AnnounceMaddr = None,
    identity: options.Identity = None,
    secret_file: options.SecretFile = None,
    recipe: options.RecipeName = None,
    json: options.Json = False,
) -> int:
    """Check this machine, and the way to a swarm, without joining it; exit code 1 where something is wrong."""
    options.check_ip("--host", host)
    announce = announced(public_ip, announce_maddr)
    addresses = options.split_addresses(peers)

    with loading():
        from gasloc import examination
        from gasloc.diagnosis import Line, passed

    def show(line: Line) -> None:
        typer.echo(jsonlib.dumps(line.as_record()) if json else str(line))

    wanted = examination.Examination(
        folder=dir or Path(),
        identity=identity or (dir / "identity.key" if dir else None),
        host=host,
        port=port,
        announce=announce,
        initial_peers=addresses,
        recipe=recipe,
        secret_file=secret_file,
    )
    return 0 if passed(examination.examine(wanted, show)) else 1
