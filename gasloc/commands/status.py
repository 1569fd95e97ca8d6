"""`gasloc status`: who is in a swarm, and what a peer of this machine holds against others."""

import json as jsonlib
import time
from collections.abc import Sequence
from pathlib import Path

import typer

from gasloc.commands import options
from gasloc.errors import UsageError
from gasloc.loading import loading


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
    if json:
        typer.echo(jsonlib.dumps(_document(addresses, dir, secret_file)))
        return 0
    if dir is not None:
        _print_local(dir)
    if addresses:
        with loading():
            from gasloc.roster import look, print_roster

        print_roster(look(addresses, secret_file=secret_file))
    return 0


def _document(addresses: Sequence[str], folder: Path | None, secret_file: Path | None) -> dict[str, object]:
    """The swarm's part at the top, where it was asked; what the peer here knows under `local`."""
    from gasloc.local_status import as_record as local_record
    from gasloc.local_status import local_status

    local = {} if folder is None else {"local": local_record(local_status(folder), time.time())}
    if not addresses:
        return {**local}

    with loading():
        from gasloc.roster import as_record, look

    return as_record(look(addresses, secret_file=secret_file)) | local


def _print_local(folder: Path) -> None:
    """Prints what the peer of a folder knows. Raises `UsageError` where it has no events."""
    from gasloc.local_status import lines, local_status

    for line in lines(local_status(folder), time.time()):
        typer.echo(line)
