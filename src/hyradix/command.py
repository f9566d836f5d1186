"""The ``hyradix`` command, before anything is loaded.

Owns: that an interrupt while the first modules load ends the command without a traceback: the one
import in a function, for nothing above it may be loaded earlier. Read next: ``server/cli.py``.
"""

from __future__ import annotations

import importlib
import sys

INTERRUPTED = 130


def main() -> None:
    """Run the command line."""
    try:
        importlib.import_module("hyradix.server.cli").main()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
