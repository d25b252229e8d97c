"""``python -m fl_lightning``."""

import os
import sys

if __name__ == "__main__":
    # Python puts the working directory first; what lies there is imported only for a configuration that names it.
    if sys.path[:1] in ([""], [os.getcwd()]):
        del sys.path[0]

    from fl_lightning.cli import main

    main()
