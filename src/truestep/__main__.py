"""``python -m truestep``: the command line, for launchers that start modules."""

from truestep.cli import main

if __name__ == "__main__":
    main()
