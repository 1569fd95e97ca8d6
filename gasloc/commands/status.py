"""`gasloc status`: who is in a swarm."""

from gasloc.commands import options
from gasloc.errors import UsageError


def status(peers: options.Peers = None, secret_file: options.SecretFile = None, json: options.Json = False) -> int:
    """Print who is in a swarm, as seen by a client that does not train."""
    addresses = options.split_addresses(peers)
    if not addresses:
        raise UsageError("--peers is needed: the address of any peer of the swarm")

    from gasloc.roster import show

    return show(addresses, secret_file=secret_file, as_json=json)
