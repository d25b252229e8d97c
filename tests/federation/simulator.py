"""Federations without training: the real loop, exchanges, pool, checkpoints, messages around a fit that is arithmetic.

A schedule follows from its seed alone (`schedule.py`): who is there, joins, fails, falls sick or attacks, how messages
travel and what becomes of them, when the run is stopped or killed, what befalls its files, and on how many workers it
goes on (`team.py`).
"""

import copy
import os
import shutil
import signal
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from federation import auditor as auditors
from federation.schedule import Schedule
from federation.team import TRANSPORT, Killed, Team, packed, present, unpacked

from fl_lightning import files, run_folder
from fl_lightning.core.facts import Fit
from fl_lightning.core.message import ClassMeans
from fl_lightning.core.meter import LossMeter
from fl_lightning.errors import ConfigError
from fl_lightning.federation import agreement, guarding, recorder, residents, sickness, transport
from fl_lightning.federation import loop as loops
from fl_lightning.federation import runner as runners
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.recorder import Recorder
from fl_lightning.federation.sickness import RoundError
from fl_lightning.federation.workers import Workers
from fl_lightning.methods.dfedpgp import DFedPGP
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedper import FedPer
from fl_lightning.methods.local import Local
from fl_lightning.methods.scaffold import SCAFFOLD
from fl_lightning.models.mlp import MLP
from fl_lightning.report.record import read_rows
from fl_lightning.run_folder import RunFolder
from fl_lightning.seeding import seed_global_streams

__all__ = ["Refused", "Schedule", "check", "play"]

MEMORY = Path("/dev/shm")
RENAMES = 24  # of files in a part, about; before one of them it may be killed


class Refused(Exception):
    """The project refuses a schedule's settings: nothing was played."""


# --- a federation that does not train -------------------------------------------------------------------------------


class Means(FedPer):
    """FedPer whose clients also send class means, and take the federation's up."""

    def __init__(self, model) -> None:
        super().__init__(model)
        self.register_buffer("heard", torch.zeros(2, 2), persistent=False)

    def receive(self, message, data) -> None:
        super().receive(message, data)
        means = message.artifacts.get("means")
        self.heard.copy_(means.mean) if isinstance(means, ClassMeans) else self.heard.zero_()

    def send(self, data):
        message = super().send(data)
        count = data.class_counts * torch.tensor([1, data.client % 2])  # every second client holds one class alone
        mean = self.model.head.weight.detach() * (count > 0).unsqueeze(1)
        message.artifacts["means"] = ClassMeans(mean.clone(), count)
        return message


METHODS = {
    "FedAvg": FedAvg, "FedPer": FedPer, "DFedPGP": DFedPGP, "Means": Means, "SCAFFOLD": SCAFFOLD, "Local": Local
}  # fmt: skip


class Arithmetic(runners.Runner):
    """A runner whose fit is a little arithmetic on all weights, with a draw from the streams of the fit."""

    def fit(self, module, data, round) -> None:
        seed_global_streams(self.seed, "fit", round, data.client)
        sick = self.residents.make_method.sick.get((round, data.client))
        if sick == "raises":
            raise RuntimeError("the client is sick")
        fit = module.method.fit = Fit(None, 1)
        fit.num_steps, fit.lr = 1 + data.client % 2, 0.5
        heard = float(module.method.heard.mean()) / 8 if hasattr(module.method, "heard") else 0.0
        own = SHELF.parameters[id(module)]
        step = (5 * round + int(data.class_counts[0]) * data.client) % 16 / 16
        steps = [step + heard + float(torch.rand(())) / 8 + place / 16 for place in range(len(own))]
        with torch.no_grad():
            torch._foreach_mul_(own, 0.75)
            torch._foreach_add_(own, steps)
            if sick in ("nan", "huge"):
                own[-1].fill_(torch.nan if sick == "nan" else 1e30)
            loss = torch.tensor(torch.inf) if sick == "loss" else own[-1].sum()
        module.meter = LossMeter()
        module.meter.add({"loss": loss}, data.num_train)


class OffTheShelf(residents.Residents):
    """Resident modules that were made before."""

    def make(self, architecture, fit_settings, client=-1):
        """One that is as good as new."""
        own = SHELF.take(self.make_method.name, client == -1, lambda: super(OffTheShelf, self).make(0, None))
        seed_global_streams(self.facts.seed, "init", 0, client)
        with torch.no_grad():
            for parameter in SHELF.parameters[id(own)]:
                parameter.uniform_(-0.5, 0.5)
        own.method.facts, own.settings = self.facts, fit_settings
        return own


class Shelf:
    """Modules that are used again, because it takes longer to make one than to play a round with it.

    As they are taken all attributes, parameters' flags and buffers are what they were when they were made.
    """

    def __init__(self) -> None:
        self.free, self.used = {}, []
        self.parameters = {}  # id of a module -> its parameters, which take long to find

    def take(self, method, resident, make):
        """A module of a method. One that is not resident is done with at once."""
        free = self.free.setdefault((method, resident), [])
        module, attributes, buffers = made = free.pop() if free else self._made(make())
        for part, own in attributes:
            part.__dict__.clear()
            part.__dict__.update({name: copy.copy(value) if name in DICTS else value for name, value in own.items()})
        for buffer, value in buffers:
            buffer.copy_(value)
        for parameter in self.parameters[id(module)]:
            parameter.requires_grad_(True)
            parameter.grad = None
        self.used.append((free, made)) if resident else free.append(made)
        return module

    def _made(self, module):
        self.parameters[id(module)] = list(module.parameters())
        attributes = [
            (part, {name: copy.copy(value) if name in DICTS else value for name, value in part.__dict__.items()})
            for part in module.modules()
        ]
        return module, attributes, [(buffer, buffer.clone()) for buffer in module.buffers()]

    def clear_up(self) -> None:
        """Nobody uses them any more."""
        for free, made in self.used:
            free.append(made)
        self.used.clear()


DICTS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
SHELF = Shelf()


class Own:
    """A client's data, of which there are only numbers."""

    num_classes = 2
    held_classes = torch.tensor([True, True])
    test = validation = torch.zeros(0, dtype=torch.long)

    def num_steps(self, batch_size: int, *_) -> int:
        return -(-self.num_train // batch_size)

    def __init__(self, client: int) -> None:
        self.client, self.num_train, self.num_test = client, 5 + 3 * client, 0
        self.class_counts = torch.tensor([3, 2 + 3 * client])


class Numbers:
    """A federation's data, of which there are only numbers."""

    drop_last = local_test = overlaps = False
    batch_size = 4
    partition_hash = former_hash = content_hash = samples_hash = "none"
    evaluate_on = "test"
    server_test = torch.zeros(0, dtype=torch.long)
    arrays = SimpleNamespace(classes=("a", "b"))

    def __init__(self, num_clients: int) -> None:
        self.clients = [Own(client) for client in range(num_clients)]
        self.num_train = np.array([own.num_train for own in self.clients])
        self.num_test = self.num_validation = np.zeros(num_clients, dtype=int)
        self.store = SimpleNamespace(serve=lambda device: None, x=torch.zeros(0, 1), y=torch.tensor([0, 1]))

    def class_counts(self):
        return np.stack([own.class_counts.numpy() for own in self.clients])


def set_up(schedule, callbacks, folder=None, sick=None):
    """A loop on the present team of workers."""

    def make(_):
        return METHODS[schedule.method](MLP((1, 1, 2), 2, (2,)))

    make.name, make.sick = schedule.method, schedule.sick if sick is None else sick
    federation = loops.FederatedLoop(schedule.settings(callbacks, folder is not None))
    data = Numbers(schedule.clients)
    federation.setup(make, data, lambda own: torch.optim.SGD(own, lr=0.1), schedule.seed, folder=folder)
    return federation


TRAINERS: list = []
ORIGINAL = SimpleNamespace(make_trainer=runners.make_trainer, save=torch.save, load=torch.load, replace=os.replace)


def one_trainer(flags):
    """One Trainer for all runs; nothing is fitted with it."""
    if not TRAINERS:
        TRAINERS.append(ORIGINAL.make_trainer({"accelerator": "cpu"}))
    return TRAINERS[0]


def replace(source, target):
    Team.here()[0].rename()
    ORIGINAL.replace(source, target)


@contextmanager
def simulated(real_files):
    """Let loops run on `Team` and do arithmetic, for the length of a block.

    Args:
        real_files: whether tensors are written and read by torch.
    """
    clock = SimpleNamespace(monotonic=lambda: next(Team.here()[0].clock) + 1000 * Team.here()[1])
    places = [(transport, name, own) for name, own in TRANSPORT.items()]
    places += [(module, "say", lambda text: None) for module in (guarding, recorder, run_folder, sickness)]
    places += [(Workers, "present", present), (loops, "Runner", Arithmetic), (runners, "make_trainer", one_trainer)]
    places += [(runners, "Residents", OffTheShelf)]
    places += [(agreement, "time", clock), (os, "replace", replace)]
    places += [(files.os, "fsync", lambda file: None)]
    if not real_files:
        places += [(torch, "save", lambda state, file: file.write(packed(state)))]
        places += [(torch, "load", lambda file, map_location, weights_only: unpacked(file))]
    before = [(module, name, module.__dict__[name]) for module, name, _ in places]
    for module, name, own in places:
        setattr(module, name, own)
    try:
        yield
    finally:
        for module, name, own in before:
            setattr(module, name, own)
        SHELF.clear_up()


# --- a run that is disturbed ----------------------------------------------------------------------------------------


class Ends(FederationCallback):
    """Stops a run after a round, or kills it in the middle of it."""

    def __init__(self, part) -> None:
        self.part = part

    def on_round_start(self, loop, round, participants) -> None:
        self.left = int(self.part.share * (len(participants) + 1))
        if self.part.how == "kill" and round == self.part.last and self.left == 0:
            raise Killed

    def on_client_fit_end(self, loop, report) -> None:
        self.left -= 1
        if self.part.how == "kill" and loop.round + 1 == self.part.last and self.left == 0:
            raise Killed

    def on_round_end(self, loop, row) -> None:
        if self.part.how == "kill" and row["round"] == self.part.last:
            raise Killed
        if self.part.how != "end" and row["round"] >= self.part.last:
            loop.stop(signal.SIGINT)


def prepare(federation, folder, part) -> None:
    """Go on with what the folder holds, as `Experiment` does."""
    workers, own = federation.workers, RunFolder(folder)
    resume = _older(own.checkpoints, part.share) if workers.is_main and part.older else "auto"
    chosen = workers.main_says(own.choose(resume) if workers.is_main else None)
    if chosen is not None:
        federation.load_state_dict(own.checkpoints.load(chosen.path))
        workers.main_says(None)
    if workers.is_main:
        own.leave_only(chosen, federation.settings.checkpoint, federation.calendar.participants)
        own.clean(overwrite=False)


def _older(checkpoints, share) -> str:
    """Any checkpoint that is whole, as it is named on the command line."""
    there = checkpoints.all()
    path = there[int(share * len(there))] if there else None
    try:
        checkpoints.check(path) if path else None
    except ConfigError:
        return "auto"
    return str(path or "auto")


def damage(folder, what, share) -> None:
    """Spoil a file, where there is enough left to go on from."""
    kept = RunFolder(folder).checkpoints.all()
    if what in ("newest", "state") and len(kept) > 1:
        newest = kept[-1].stem.removeprefix("round-")
        states = sorted(kept[-1].parent.glob(f"clients/r{newest}-w*.states"))
        for path in [kept[-1]] if what == "newest" else states[:1]:
            content = bytearray(path.read_bytes())
            content[int(share * len(content))] ^= 1
            path.write_bytes(content)
    elif what == "journal" and kept:
        _cut(kept[-1].parent / "journal.txt", share)
    elif what == "tables":
        for name in ("metrics.csv", "clients.csv", "topology.csv"):
            _cut(folder / name, share)


def _cut(path, share) -> None:
    if path.is_file():
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def disturbed(schedule, folder):
    """The same federation, stopped and killed, on other numbers of workers; the loops of its last part."""
    federations = []
    for part in schedule.parts:
        damage(folder, part.damage, part.share)
        sick = dict(schedule.sick)
        if part.how == "error":
            sick[part.last, int(part.share * schedule.clients)] = "raises"

        def work(rank, part=part, sick=sick):
            own = Recorder(folder, {})
            federation = set_up(schedule, [own, Ends(part)], folder, sick)
            prepare(federation, folder, part)
            federation.run()
            if rank == 0 and federation.round < schedule.rounds:
                own.stop(federation)
            return federation

        renames = 1 + int(part.share * RENAMES) if part.how == "file" else 0
        try:
            federations = Team(part.workers, renames=renames).run(work)
        except Killed:
            continue
        except RoundError:
            if part.how != "error":
                raise
    return federations


# --- what must hold -------------------------------------------------------------------------------------------------


def check(seed: int) -> list[str]:
    """Play one schedule undisturbed and disturbed; returns what is wrong, nothing if nothing is.

    Args:
        seed: the schedule's.
    """
    try:
        return play(Schedule(seed))
    except Refused:
        return []


def play(schedule) -> list[str]:
    """As `check`.

    Raises:
        Refused: if the project refuses the settings.
    """
    folder = Path(tempfile.mkdtemp(prefix="schedule-", dir=MEMORY if MEMORY.is_dir() else None))
    try:
        with simulated(schedule.real_files):
            return _play(schedule, folder)
    except Refused:
        raise
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _play(schedule, folder) -> list[str]:
    auditor = auditors.Auditor()

    def whole(rank):
        federation = set_up(schedule, [auditor])
        auditor.watch(federation)
        federation.run()
        return federation

    try:
        straight = leaves(outcome(Team(1).run(whole)))
    except ConfigError as error:  # the method cannot do without its server, or a client hears too little
        raise Refused(str(error)) from error
    federations = disturbed(schedule, folder)
    auditor.compare_tables(schedule, {path.name: read_rows(path) for path in folder.glob("*.csv")})
    here = leaves(outcome(federations))
    different = [name for name in here.keys() | straight.keys() if here.get(name) != straight.get(name)]
    auditor.expect(not different, f"another state: {', '.join(sorted(different)[:3])}")
    return auditor.wrong


def outcome(federations) -> dict:
    """All that a run leaves behind, from the loops of its workers."""
    main = federations[0]
    states = {}
    for rank, own in enumerate(federations):
        holders = own.holders.of(range(own.num_clients))
        states |= {client: own.runner.pool.get(client) for client in holders if holders[client] == rank}
    return {
        "exchange": main.exchange.state_dict(),
        "clients": {c: dict(state or {}) for c, state in states.items()},
        "traffic": dict(main.traffic),
        "board": main.board.state_dict(),
    }


def leaves(state, prefix=""):
    """Path -> value; tensors as their bits."""
    if isinstance(state, dict):
        return {n: v for key, value in state.items() for n, v in leaves(value, f"{prefix}/{key}").items()}
    if isinstance(state, torch.Tensor):
        return {prefix: (str(state.dtype), tuple(state.shape), state.contiguous().numpy().tobytes())}
    return {prefix: repr(state)}
