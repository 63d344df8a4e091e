"""Entry point for `python -m anyaccel`."""

from anyaccel.cli.entry import main

if __name__ == "__main__":
    main()
