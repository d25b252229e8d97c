"""The command line: finds the command, and says how it ended. A command's own imports come late: help is at once."""

from __future__ import annotations

import os
import pkgutil
import signal
import sys
import warnings
from collections.abc import Sequence

from fl_lightning import __version__, catalog
from fl_lightning.commands import COMMANDS
from fl_lightning.errors import ConfigError, line_of, refuse, require, suggest
from fl_lightning.federation.signals import exit_code
from fl_lightning.files import WriteError
from fl_lightning.terminal import outlived, require_whole_output, say


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line.

    Exits with 0 when all went well, 1 when `evaluate` finds other figures, or tables, than the run wrote down, when
    `compare` finds two runs different, when a worker was lost, a client fell sick (`federation.on_client_error`), a run
    of a table or a search failed, or a file of the user's own raised, 2
    on bad input or where a file takes no more, that of the standard output as well (one line on stderr), 128 + the
    number of the signal that stopped it: 130 for SIGINT (Ctrl-C), 143 for SIGTERM, 129 for SIGHUP, 138 for SIGUSR1.
    The first signal stops `fit` once the present round is saved, the second at once.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    os.environ["MPLBACKEND"] = "agg"  # pictures are files; one that matplotlib does not know would end its import
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")  # lightning 2.6 on torch 2.15
    with outlived():
        try:
            code = _code_of(arguments)
            _leave_what_is_stuck(code)
            sys.exit(code)
        except ConfigError as error:
            refuse(str(error))
        except WriteError as error:
            refuse(f"output: {error}")
        except OSError as error:
            if error.filename is None:
                raise
            refuse(f"{error.filename}: {error.strerror or error}")
        except Exception as error:
            if not line_of(error):
                raise
            say(line_of(error))
            sys.exit(1)
        except KeyboardInterrupt:  # before anything was there to be saved, or after all was
            sys.exit(exit_code(signal.SIGINT))


def _code_of(arguments: list[str]) -> int:
    """Run a command; success is none where what it printed into a file is cut."""
    try:
        code = _dispatch(arguments)
    except SystemExit as ended:  # a parser's, after it printed what was asked of it
        if ended.code:
            raise
        code = 0
    if code == 0:
        require_whole_output()
    return code


def _leave_what_is_stuck(code: int) -> None:
    """End the process at once where a logger's service never answered: its own work at the end may hang, too."""
    patience = sys.modules.get("fl_lightning.report.patience")
    if patience is not None and patience.Patience.stuck:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print("usage: fl-lightning COMMAND …\n")
        print("\n".join(f"  {name:10} {command.says}" for name, command in COMMANDS.items()))
        print("\nfl-lightning COMMAND --help says more.")
        return 0
    if arguments[0] == "--version":
        print(f"fl-lightning {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        raise ConfigError("command", f"there is no such command; {suggest(name, COMMANDS)}", name)
    _require_folder()
    command = COMMANDS[name]
    run = pkgutil.resolve_name(command.run)
    code: int = run(rest, main) if command.runs_others else run(rest)
    return code


def _require_folder() -> None:
    """Refuse to work in a folder that somebody has deleted: no path means anything there."""
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError("working directory", f"cannot be used ({error.strerror}); change to one that is") from error


def show_list(argv: Sequence[str]) -> int:
    """The command ``list``.

    Args:
        argv: what follows it.

    Returns:
        0.

    Raises:
        ConfigError: if there is no such list.
    """
    from fl_lightning.report.console import print_list

    kind = argv[0] if argv else ""
    if any(word in ("-h", "--help") for word in argv):
        print(COMMANDS["list"].says)
        return 0
    require(kind in catalog.KINDS, "list", f"say what to list; {suggest(kind, catalog.KINDS)}", kind)
    require(len(argv) == 1, "list", f"takes one word; {kind} is one, and then came", " ".join(argv[1:]))
    print_list([(entry.name, entry.summary, entry.paper) for entry in catalog.entries(kind)])
    return 0
