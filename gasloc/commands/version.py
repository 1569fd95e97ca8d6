"""`gasloc version`."""

from importlib import metadata

import typer


def version() -> None:
    """Print the version."""
    typer.echo(f"gasloc {metadata.version('gasloc')}")
