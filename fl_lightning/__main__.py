"""``python -m fl_lightning``, and the command ``fl-lightning``."""

import os
import signal
import sys
from contextlib import suppress


def run() -> None:
    """Import the command line, and run it; Ctrl-C before it is there is Ctrl-C, and no traceback."""
    # Python puts the working directory first; what lies there is imported only for a configuration that names it.
    with suppress(FileNotFoundError):  # of a folder that was deleted since the command line says so
        if sys.path[:1] in ([""], [os.getcwd()]):
            del sys.path[0]
    try:
        from fl_lightning.cli import main
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    main()


if __name__ == "__main__":
    run()
