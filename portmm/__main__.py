"""Entry point of `python -m portmm`: the command line."""

from portmm.cli.main import main

if __name__ == "__main__":
    main()
