"""What the user did wrong, said in one line."""

from __future__ import annotations

import difflib
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, get_args

from fl_lightning.terminal import printable

_PYTHONS = tuple(Path(str(sysconfig.get_path(name))).resolve() for name in ("stdlib", "platstdlib"))
_PACKAGES = frozenset({"site-packages", "dist-packages"})  # this environment's, the user's, the system's
TRACEBACK = "FL_LIGHTNING_TRACEBACK"
"""The variable of the environment that asks for errors of clients and servers as they were raised."""
GRACE = 5.0
"""Seconds in which whoever knows better why a run ends may say so first."""
LONGEST = 270
"""Characters of a message; with the program's name before it, a line stays below 300."""


class ConfigError(ValueError):
    """A bad value in a configuration, a data set or a run's folder.

    The command line prints the message as one line and exits with code 2, before anything is written.

    Args:
        key: the dotted configuration key (or file) that is at fault, e.g. ``data.partition.beta``.
        value: the offending value, shown as given and shortened; leave it out where there is none.
        allowed: what is allowed, or what to do instead.
    """

    def __init__(self, key: str, allowed: str, value: object = ...) -> None:
        said = shortened(key, 110)
        got = "" if value is ... else f", got {shortened(_shown(value), 70)}"
        self.told = f"{shortened(allowed, LONGEST - len(said) - len(got) - 2)}{got}"
        """The message behind the key."""
        super().__init__(f"{said}: {self.told}")
        self.key = key
        self.allowed = allowed
        self.value = value

    def at(self, key: str) -> ConfigError:
        """The same about another key."""
        return ConfigError(key, self.allowed, self.value)

    def __reduce__(self) -> tuple[Any, ...]:
        return ConfigError, (self.key, self.allowed, self.value)


class CommonError(ConfigError):
    """Bad input of which all processes of a run learn together, so that the first one says it for all."""


@contextmanager
def renamed(key: str, here: str) -> Iterator[None]:
    """Say by a key that the user has given what errors inside say of another.

    Args:
        key: theirs.
        here: that key.
    """
    try:
        yield
    except ConfigError as error:
        if error.key != key:
            raise
        raise error.at(here) from error


def shortened(text: str, limit: int) -> str:
    """A text in one line of at most `limit` printable characters; what is too long loses its middle."""
    text = text if len(text) <= 20 * limit else f"{text[: 10 * limit]}…{text[-10 * limit :]}"
    text = printable(" ".join(text.split()))
    if len(text) <= limit:
        return text
    tail = limit // 3
    return f"{text[: limit - tail - 1]}…{text[-tail:]}"


def _shown(value: object) -> str:
    """How a value is written; of a long one the beginning, so that a list of a million entries costs nothing."""
    if isinstance(value, (list, tuple)) and len(value) > 50:
        return f"{repr(list(value[:50]))[:-1]}, …]"
    try:
        return repr(value)
    except (ValueError, RecursionError):  # a whole number of thousands of digits; a list that holds itself
        return f"a {type(value).__name__} that is too long to show"


def listed_names(text: str | None, known: Collection[str]) -> tuple[str, ...]:
    """The names in a list with commas, where a name may have commas itself.

    >>> listed_names("FedAvg, MNIST, 2 classes,", ["FedAvg", "MNIST, 2 classes"])
    ('FedAvg', 'MNIST, 2 classes')
    """
    parts = [part.strip() for part in (text or "").split(",")]
    spaced = {", ".join(part.strip() for part in name.split(",")): name for name in known}
    names = []
    while parts:
        ends = (end for end in range(len(parts), 1, -1) if ", ".join(parts[:end]) in spaced)
        end = next(ends, 1)
        name = ", ".join(parts[:end])
        names.append(spaced.get(name, name))
        parts = parts[end:]
    return tuple(filter(None, names))


def chosen_names(option: str, text: str | None, known: Collection[str]) -> tuple[str, ...]:
    """The same of an option that chooses among them; empty only where it is not given, which means all.

    Raises:
        ConfigError: for one that names nothing, as where a script's variable is not set.
    """
    names = listed_names(text, known)
    require(bool(names) or text is None, option, "names nothing; leave it out for all", text)
    return names


def suggest(name: str, choices: Iterable[str], command: str = "") -> str:
    """Say which of `choices` is nearest to `name`, and list them: ``did you mean FedRep? (choose from …)``.

    Where they are too many for one line, the nearest are listed.

    Args:
        name: what was given.
        choices: what there is.
        command: what lists them all.
    """
    choices = sorted(map(str, choices))
    if not choices:
        return "there is none to choose from"
    by_lower = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(name.lower()[:100], by_lower, n=len(choices), cutoff=0.0)
    close = near[:1] if is_near(name.lower()[:100], near[0]) else []
    hint = f"did you mean {by_lower[close[0]]}? " if close else ""
    if sum(len(choice) + 2 for choice in choices) <= 150:
        return f"{hint}(choose from {', '.join(choices)})"
    listed: list[str] = []
    for choice in near:
        if sum(len(each) + 2 for each in listed) + len(choice) > 110:
            break
        listed.append(by_lower[choice])
    return f"{hint}(choose from {', '.join(listed)}, …; {len(choices)} in all{f': {command}' if command else ''})"


@contextmanager
def importing(package: str, key: str, absent: str, value: object = ...) -> Iterator[None]:
    """Say in one line that a package of an extra's is not installed, or why one that is cannot be imported.

    Args:
        package: its name in an import.
        key: the configuration key that needs it.
        absent: what is said where it is not installed.
        value: that key's value; leave it out where there is none.

    Raises:
        ConfigError: whatever is raised inside: what was built for another NumPy raises no `ImportError` alone.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == package:
            raise ConfigError(key, absent, value) from error
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        said = shortened(" ".join(str(first).split()) or type(first).__name__, 120)
        rule = f"{package} is installed, but cannot be imported ({said}): versions that do not go together?"
        raise ConfigError(key, rule, value) from error


def is_near(name: str, other: str) -> bool:
    """Whether a name may be meant for another: one is a part of the other, they begin alike, or a third is mistyped."""
    alike = name[:1] == other[:1] and difflib.SequenceMatcher(None, name, other).ratio() >= 0.5
    if alike or (len(name) >= 3 and (name in other or other in name)):
        return True
    rows = [list(range(len(other) + 1))]  # edit distance with neighbours swapped
    for i, letter in enumerate(name, 1):
        row = [i]
        for j, wanted in enumerate(other, 1):
            cost = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and name[i - 2] == wanted:
                cost = min(cost, rows[-2][j - 2] + 1)
            row.append(cost)
        rows.append(row)
    return rows[-1][-1] <= max(1, len(name) // 3)


def require(condition: bool, key: str, allowed: str, value: object = ...) -> None:
    """Raise `ConfigError` unless `condition` holds."""
    if not condition:
        raise ConfigError(key, allowed, value)


@contextmanager
def own_code(key: str, owner: object, what: str = "") -> Iterator[None]:
    """Whatever a class of the user's own raises inside becomes one line; of one of ours it goes on as it is.

    Args:
        key: the configuration key that names the class.
        owner: the object of that class.
        what: of it was being done, e.g. ``arrays()``.

    Raises:
        ConfigError: naming the key, the class and the error.
    """
    kind = type(owner)
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if kind.__module__.startswith("fl_lightning.") or TRACEBACK in os.environ:
            raise
        who = f"{kind.__name__}.{what}" if what else kind.__name__
        raise ConfigError(key, f"{who} raises {type(error).__name__}: {error}{place_of(error)}") from error


def place_of(error: BaseException) -> str:
    """Where in a file of the user's own an error was raised, `` (mymethod.py:52)``; empty where it was in none."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    return f" ({printable(Path(own[-1].filename).name)}:{own[-1].lineno})" if own else ""


def line_of(error: BaseException) -> str:
    """What to say of an error that came out of a file of the user's own; empty for others, and with `TRACEBACK`."""
    where = place_of(error) or place_of(error.__cause__ or error)
    if not where or TRACEBACK in os.environ:
        return ""
    told = str(error) if where in str(error) else f"{type(error).__name__}: {error}{where}"
    return f"fl-lightning: error: {shortened(told, 200)}; {TRACEBACK}=1 shows the error as it was raised"


def is_installed(file: Path) -> bool:
    """Whether a file of code is Python's, or of an installed package, and so nobody's own."""
    return not _PACKAGES.isdisjoint(file.parts) or any(file.is_relative_to(own) for own in _PYTHONS)


def is_own(kind: type) -> bool:
    """Whether a class is somebody's own: of a notebook, or of a file that belongs to no package that is installed."""
    name = kind.__module__.partition(".")[0]
    if name in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is None or _is_own(file)


@lru_cache(512)
def _is_own(file: str) -> bool:
    path = Path(file)
    return path.is_absolute() and not path.is_relative_to(Path(__file__).parent) and not is_installed(path.resolve())


def require_positive(owner: str, **options: float) -> None:
    """Raise `ConfigError` for the first option that is not > 0.

    Args:
        owner: key that the options belong to: ``method``, or a term's class.
        options: each option's value.
    """
    for name, value in options.items():
        require(value > 0, f"{owner}.{name}", "must be > 0", value)


def require_at_least(owner: str, least: int, **options: float) -> None:
    """Raise `ConfigError` for the first option that is below `least`; the rest as `require_positive`."""
    for name, value in options.items():
        require(value >= least, f"{owner}.{name}", f"must be >= {least}", value)


def require_choices(owner: str, **options: tuple[object, Any]) -> None:
    """Raise `ConfigError` for the first option whose value its type does not allow.

    Args:
        owner: key that the options belong to: ``method``, or a term's class.
        options: each option's value and the `Literal` of what is allowed.
    """
    for name, (value, literal) in options.items():
        allowed = get_args(literal)
        require(value in allowed, f"{owner}.{name}", f"must be one of {', '.join(allowed)}", value)


def refuse(message: str) -> NoReturn:
    """Say what is wrong and exit with code 2.

    Of the processes that torchrun or SLURM started the first one says it for all. The others leave it the time to, and
    their launcher to end them; one that is left then says it, too: it may be its own mistake alone.
    """
    who = ""
    if not is_first_process():
        time.sleep(GRACE)
        who = f" (process {_rank()})"
    if sys.stderr is not None:
        line = f"fl-lightning: error: {shortened(message, 278 - len(who))}{who}\n"
        sys.stderr.write(line.encode("utf-8", "backslashreplace").decode())
    sys.exit(2)


def is_first_process() -> bool:
    """Whether this process speaks for all that torchrun or SLURM started."""
    return _rank() == "0"


def _rank() -> str:
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
