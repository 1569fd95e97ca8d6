"""The command line: `gasloc ...`. Each subcommand is a module in `gasloc.commands`."""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import typer
from typer.exceptions import TyperException

from gasloc import environment
from gasloc.commands import doctor, join, launch, recipe, relay, simulate, start, status, syncer, version
from gasloc.errors import GaslocError, UsageError
from peers.errors import AccessError, AddressError, IdentityError, PeersError

app = typer.Typer(
    name="gasloc",
    help="Train one language model together with other machines, with no server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("start")(start.start)
app.command("join")(join.join)
app.command("syncer")(syncer.syncer)
app.command("launch")(launch.launch)
app.command("simulate")(simulate.simulate)
app.command("status")(status.status)
app.command("doctor")(doctor.doctor)
app.command("relay")(relay.relay)
app.command("version")(version.version)
app.add_typer(recipe.app, name="recipe")


class _Parameter(Protocol):
    envvar: str | Sequence[str] | None
    opts: Sequence[str]


class _Command(Protocol):
    """As much of a click command as we look at."""

    params: Sequence[_Parameter]


def known_variables() -> set[str]:
    """The environment variables that some flag reads."""
    names: set[str] = set()
    for parameter in parameters():
        variable = parameter.envvar
        names.update([variable] if isinstance(variable, str) else variable or ())
    return names


def parameters() -> list[_Parameter]:
    """The flags and arguments of every command."""
    return list(_parameters(cast(_Command, typer.main.get_command(app))))


def _parameters(command: _Command) -> Iterator[_Parameter]:
    yield from command.params
    for child in getattr(command, "commands", {}).values():
        yield from _parameters(child)


def main() -> None:
    """Runs the command line and exits: 0 done, 1 failed, 2 wrong usage, 130 told twice to stop."""
    code = run(sys.argv[1:])
    # a Ctrl-C while Python ends must not start a traceback
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit code. What the user did wrong is one line on stderr."""
    try:
        environment.check(os.environ, known_variables())
        code = app(list(arguments), prog_name="gasloc", standalone_mode=False)
    except (UsageError, AccessError, AddressError, IdentityError) as error:
        return _complain(str(error), 2)
    except (GaslocError, PeersError) as error:
        return _complain(str(error), 1)
    except TyperException as error:
        return _complain(_with_value(error, arguments), 2)
    except KeyboardInterrupt:
        return 130
    return code if isinstance(code, int) else 0


def _with_value(error: TyperException, arguments: Sequence[str]) -> str:
    """What is wrong, with the flag and the value that was given for it, which the exception leaves out."""
    parameter = cast(_Parameter | None, getattr(error, "param", None))
    if parameter is None:
        return error.format_message()
    flag = parameter.opts[0]
    given = [*arguments, ""]
    for name in parameter.opts:
        if name in given:
            return f"{flag} = {given[given.index(name) + 1]!r}: {error.message}"
        for argument in given:
            if argument.startswith(f"{name}="):
                return f"{flag} = {argument.removeprefix(f'{name}=')!r}: {error.message}"
    variable = parameter.envvar
    if isinstance(variable, str) and variable in os.environ:
        return f"{variable} = {os.environ[variable]!r}: {error.message}"
    return error.format_message()


def _complain(message: str, code: int) -> int:
    line = " ".join(message.split())
    typer.echo(f"gasloc: {line}", err=True)
    return code
