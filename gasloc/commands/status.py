"""`gasloc status`: who is in a swarm, and what a peer of this machine holds against others."""

import time
from pathlib import Path

from gasloc.commands import options
from gasloc.errors import UsageError


def status(
    peers: options.Peers = None,
    dir: options.RunDir = None,
    secret_file: options.SecretFile = None,
    json: options.Json = False,
) -> int:
    """Print who is in a swarm, as seen by a client that does not train; with --dir, what the peer there knows."""
    addresses = options.split_addresses(peers)
    if not addresses and dir is None:
        raise UsageError("--peers is needed: the address of any peer of the swarm; or --dir: the folder of one here")
    if dir is not None:
        show_local(dir, as_json=json)
    if not addresses:
        return 0

    from gasloc.roster import show

    return show(addresses, secret_file=secret_file, as_json=json)


def show_local(folder: Path, *, as_json: bool) -> None:
    """Prints what the peer of a folder knows. Raises `UsageError` where it has no events."""
    import dataclasses
    import json

    import typer

    from gasloc.local_status import lines, local_status

    found = local_status(folder)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found)))
        return
    for line in lines(found, time.time()):
        typer.echo(line)
