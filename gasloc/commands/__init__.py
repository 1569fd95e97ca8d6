"""One module a subcommand. Each imports torch and peers only when it runs, so that `--help` is quick."""
