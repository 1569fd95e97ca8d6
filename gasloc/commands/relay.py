"""`gasloc relay`: help peers that cannot be dialled, and train nothing."""

import time

import typer

from gasloc.commands import options
from gasloc.commands.choices import announced
from gasloc.run_folder import default_path


def relay(
    dir: options.Dir = None,
    port: options.Port = 0,
    host: options.Host = "0.0.0.0",
    public_ip: options.PublicIp = None,
    announce_maddr: options.AnnounceMaddr = None,
    peers: options.Peers = None,
) -> int:
    """Carry streams between peers that cannot be dialled, and be an address to join at; trains nothing."""
    announce = announced(public_ip, announce_maddr)
    options.check_ip("--host", host)
    addresses = options.split_addresses(peers)

    from gasloc import relay as relaying

    return relaying.run(
        relaying.RelayOptions(
            folder=dir or default_path(time.time()),
            host=host,
            port=port,
            announce=announce,
            initial_peers=addresses,
        ),
        typer.echo,
    )
