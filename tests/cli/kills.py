"""A run that is killed before its n-th file operation, and resumed: the cases, and what became of each."""

from typing import NamedTuple

from cli.fatal import operations
from cli.run_files import read_run

CHANGES = {"data": {"num_clients": 4}, "federation": {"rounds": 3}}
FIT = ("fit", "--config", "exp.yaml", "--quiet")


class Kill(NamedTuple):
    """Who is killed, before which of its operations, and whether in the middle of it, which is a write."""

    who: str
    number: int
    torn: bool
    what: str


class Undisturbed:
    """A run that nobody kills, and all moments at which one like it could be.

    Args:
        place: the workplace that it runs in; it gets draws and configuration.
        options: words for the command line of this run and those that are killed.
    """

    def __init__(self, place, *options) -> None:
        self.options = options
        prepare(place)
        log = place.path / "operations.txt"
        code, _, err = place.call(*FIT, *options, fatal={"folder": str(place.path / "runs"), "log": str(log)})
        assert code == 0, err
        self.content = read_run(place.run)
        self.kills = []
        for who, done in sorted(operations(log).items()):
            for number, what in enumerate(done, start=1):
                self.kills.append(Kill(who, number, torn=False, what=what))
                if what.startswith("write "):
                    self.kills.append(Kill(who, number, torn=True, what=what))

    def outcome(self, place, kill, again=None) -> str:
        """Kill a run, resume it (and kill it again), let it finish; returns what is wrong with it, empty if nothing is.

        Args:
            place: an empty workplace.
            kill: when to kill it.
            again: when to kill it after its first resume; None for not again.
        """
        prepare(place)
        folder = str(place.path / "runs")
        for moment in (kill, again):
            if moment is not None:
                die = (moment.who, moment.number, moment.torn)
                code, _, err = place.call(*FIT, "--resume", "auto", *self.options, fatal={"folder": folder, "die": die})
                hit = code in (-9, 1) and "Traceback" not in err
                if not hit and not (moment is again and code == 0):  # what is left may be less than that
                    return f"exit code {code} where it should have been killed: {err}"
        code, _, err = place.call(*FIT, "--resume", "auto", *self.options)
        if code != 0:
            return f"exit code {code} when resumed: {err}"
        found = read_run(place.run)
        different = [name for name in self.content if found[name] != self.content[name]]
        left = [path.name for path in place.run.rglob("*.tmp")]
        return f"different: {', '.join(different)}" if different else f"left behind: {left}" if left else ""


def prepare(place) -> None:
    """Write the small configuration into an empty workplace."""
    place.draws = False
    place.change(**CHANGES)
