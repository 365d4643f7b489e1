"""Command line: `portmm` and its subcommands."""
