"""`gasloc join`: become a peer of a run."""

from gasloc.commands import options
from gasloc.commands.choices import presence
from gasloc.errors import UsageError
from gasloc.loading import loading


def join(
    peers: options.Peers = None,
    dir: options.Dir = None,
    port: options.Port = 0,
    host: options.Host = "0.0.0.0",
    public_ip: options.PublicIp = None,
    announce_maddr: options.AnnounceMaddr = None,
    identity: options.Identity = None,
    secret_file: options.SecretFile = None,
    allow_file: options.AllowFile = None,
    deny_file: options.DenyFile = None,
    serve_rate: options.ServeRate = 0,
    data: options.Data = None,
    device: options.Device = "auto",
    threads: options.Threads = 0,
    wait_for: options.WaitFor = 1,
    json: options.Json = False,
    stop_on_eof: options.StopOnEof = False,
) -> int:
    """Join a run: recipe and current state come from the peers at the addresses given."""
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
    if not place.initial_peers and (dir is None or not (dir / "peers.json").exists()):
        raise UsageError("--peers is needed: the address that 'gasloc start' printed on the first machine")

    with loading():
        from gasloc import worker

    return worker.join(
        worker.WorkerOptions(
            presence=place,
            data=data,
            device=device,
            threads=threads,
            json=json,
            wait_for=wait_for,
            stop_on_eof=stop_on_eof,
        )
    )
