"""`python -m anyaccel` is the command `anyaccel`."""

from anyaccel.cli.entry import main

if __name__ == "__main__":
    main()
