"""`python -m falaj` is the command `falaj`."""

from falaj.apps.cli import main

if __name__ == "__main__":
    main()
