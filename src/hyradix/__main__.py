"""``python -m hyradix``: the same as the ``hyradix`` command."""

from __future__ import annotations

from hyradix.command import main

if __name__ == "__main__":
    main()
