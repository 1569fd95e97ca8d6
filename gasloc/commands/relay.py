"""`gasloc relay`: help peers that cannot be dialled, and train nothing."""

import typer

from gasloc.commands import options
from gasloc.commands.choices import presence
from gasloc.loading import loading


def relay(
    dir: options.Dir = None,
    port: options.Port = 0,
    host: options.Host = "0.0.0.0",
    public_ip: options.PublicIp = None,
    announce_maddr: options.AnnounceMaddr = None,
    identity: options.Identity = None,
    secret_file: options.SecretFile = None,
    allow_file: options.AllowFile = None,
    deny_file: options.DenyFile = None,
    peers: options.Peers = None,
) -> int:
    """Carry streams between peers that cannot be dialled, and be an address to join at; trains nothing."""
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
    )

    with loading():
        from gasloc import relay as relaying

    return relaying.run(place, typer.echo)
