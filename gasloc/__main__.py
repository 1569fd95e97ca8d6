"""`gasloc`, and `python -m gasloc`."""

from gasloc.loading import loading


def main() -> None:
    """Loads the command line and runs it; see `gasloc.cli.main`."""
    with loading():
        from gasloc.cli import main as run
    run()


if __name__ == "__main__":
    main()
