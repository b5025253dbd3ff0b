"""`python -m sirara` is the command line; workers are started this way, whatever is on PATH."""

from sirara.cli.main import main

if __name__ == "__main__":
    main()
