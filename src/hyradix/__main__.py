"""``python -m hyradix``: the ``hyradix`` command where no script was installed."""

from hyradix.server.cli import main

if __name__ == "__main__":
    main()
