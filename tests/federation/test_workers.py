"""One run on 1, 2 or 3 processes: the same numbers, bit for bit, whatever the method."""

import platform
import signal
import sys
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from every_method import METHODS
from tiny_optimizers import adam

from fl_lightning import Experiment, experiment
from fl_lightning.core.aggregation import TensorMean
from fl_lightning.core.message import Message
from fl_lightning.core.method import Phase
from fl_lightning.core.server import Server
from fl_lightning.core.weighing import SelfWeighingServer
from fl_lightning.errors import CommonError, ConfigError, require
from fl_lightning.federation import transport
from fl_lightning.federation.attacks import Attack
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.checkpoint import Checkpoints
from fl_lightning.federation.exchange import Star
from fl_lightning.federation.failures import Failures
from fl_lightning.federation.graphs import DirectedGraph, RandomPeers
from fl_lightning.federation.launch import launch
from fl_lightning.federation.peers import Ring
from fl_lightning.federation.policy import EvaluationPolicy
from fl_lightning.federation.segments import load_state
from fl_lightning.federation.team import Team
from fl_lightning.federation.workers import (
    Workers,
    of_one_kind,
    refused_together,
    require_one_folder,
    require_told_alike,
)
from fl_lightning.files import WriteError
from fl_lightning.identity import in_common
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.resuming import LOCK

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the functions below are handed to forked processes"),
    pytest.mark.usefixtures("plain_convolutions"),
]


@pytest.mark.parametrize(("others", "key"), [(("a", "b"), ""), (("a", "c"), "data.partition"), (("d", "b"), "data")])
def test_processes_that_have_drawn_other_data_are_refused(others, key, monkeypatch):
    data, workers = SimpleNamespace(samples_hash="a", partition_hash="b"), Workers(rank=1, size=2, is_main=False)
    monkeypatch.setattr(workers, "everyone_says", lambda own: [others, own])
    with (
        pytest.raises(ConfigError, match=f"^{key}: every process of the run has drawn its own")
        if key
        else nullcontext()
    ):
        of_one_kind(workers, data)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"seed": 1}, "seed: must be the same in every process of the run; process 0 has 0, process 2 has 1"),
        ({"federation": {}}, r"federation\.rounds: .* process 0 has 2, process 2 has none"),
        ({"trainer": {"max_steps": 3}}, r"trainer\.max_steps: .* process 0 has none, process 2 has 3"),
        ({"data": {"dataset": {"class_path": "MNIST", "init_args": {"root": "here"}}, "cache": "here"}}, ""),
        ({"logger": None, "federation": {"rounds": 2, "threads": 1}}, ""),
        ({"output": "elsewhere", "trainer": {"devices": [1], "callbacks": {"folder": "/here"}}}, r""),
        ({"trainer": {"callbacks": {"folder": "here"}}}, r"trainer\.callbacks\.folder: .* process 2 has 'here'"),
    ],
)
def test_processes_that_were_told_otherwise_are_refused(other, said, monkeypatch):
    """They trained together, each by what it was told."""
    usual = {"seed": 0, "federation": {"rounds": 2}, "logger": [{"class_path": "Console"}]}
    usual["data"] = {"dataset": {"class_path": "MNIST", "init_args": {"root": "there"}}}
    workers = Workers(rank=2, size=3, is_main=False)
    monkeypatch.setattr(workers, "everyone_says", lambda own: [first, first, own])
    first = {key: repr(value) for key, value in in_common(usual).items()}
    with pytest.raises(ConfigError, match=f"^{said}$") if said else nullcontext():
        require_told_alike(workers, in_common(usual | other))


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_process_met_alone_is_refused_by_all(rank, monkeypatch):
    """The first one said that the other was gone, and ended with exit code 1."""
    workers = Workers(rank, 2, is_main=rank == 0)
    lacks = "data.dataset.path", "there is no such file, got 't.csv'"
    others = [("one", None), ("two", lacks)]
    monkeypatch.setattr(workers, "everyone_says", lambda own: [*others[:rank], own, *others[rank + 1 :]])
    monkeypatch.setattr(platform, "node", lambda: others[rank][0])
    line = r"^data\.dataset\.path: there is no such file, got 't\.csv' \(process 1 on two\)$"
    with pytest.raises(CommonError, match=line), refused_together(workers):
        require(rank == 0, "data.dataset.path", "there is no such file", "t.csv")
    alone = Workers()
    with pytest.raises(ConfigError, match=r"^data: no$"), refused_together(alone):
        raise ConfigError("data", "no")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (WriteError(Path("runs/a"), OSError(28, "No space left on device")), "output: cannot write runs/a: No space"),
        (PermissionError(13, "Permission denied", "t.csv"), "t.csv: Permission denied"),
        (OSError(5, "Input/output error"), "OSError: Input/output error"),
    ],
)
def test_what_the_system_refuses_one_process_is_refused_by_all(error, line, monkeypatch):
    """The others said that it was gone, and how to go on, and ended with exit code 1."""
    first, second, said = Workers(0, 2), Workers(1, 2, is_main=False), []
    monkeypatch.setattr(first, "everyone_says", lambda own: said.append(own) or [own, ("two", None)])
    monkeypatch.setattr(second, "everyone_says", lambda own: [*said, own])
    with pytest.raises(CommonError, match=f"^{line}"), refused_together(first):
        raise error
    with pytest.raises(CommonError, match=f"^{line}"), refused_together(second):
        pass
    with pytest.raises(type(error)) as alone, refused_together(Workers()):
        raise error
    assert alone.value is error


def test_folder_in_which_the_main_process_can_write_nothing_is_refused_by_all(monkeypatch, tmp_path):
    """The others waited for its word, and said that it was gone."""
    told = []
    main, other = Workers(0, 2), Workers(1, 2, is_main=False)
    monkeypatch.setattr(main, "main_says", lambda own: told.append(own) or own)
    monkeypatch.setattr(other, "main_says", lambda _: told[0])
    for each in (main, other):
        with pytest.raises(CommonError, match=r"^output: cannot write .*nowhere: No such file or directory$"):
            require_one_folder(each, tmp_path / "nowhere")


def test_code_of_this_package_is_told_where_machines_may_have_others(monkeypatch, tmp_path):
    """Two checkouts of one version trained together, each by its own code."""
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "step.py").write_text("x = 1\n")
    monkeypatch.setattr(experiment, "__file__", str(tmp_path / "experiment.py"))
    built = experiment.BuiltExperiment(Experiment("quickstart", trainer__accelerator="cpu").config)
    told = []

    def tell(workers, own):
        told.append(own.get("code of fl_lightning"))
        raise CommonError("code", "must be the same")

    monkeypatch.setattr(experiment, "require_told_alike", tell)
    for size, text in ((1, "x = 1\n"), (2, "x = 1\n"), (2, "x = 1\n"), (2, "x = 2\n")):
        (tmp_path / "core" / "step.py").write_text(text)
        monkeypatch.setattr(experiment, "started_outside", lambda size=size: (size, size))
        with pytest.raises(CommonError):
            built.setup()
    alone, one, same, other = told
    assert alone is None
    assert one == same != other


@pytest.mark.parametrize("is_shared", [True, False])
def test_folder_that_one_machine_has_of_its_own_is_refused_by_all(is_shared, monkeypatch, tmp_path):
    """A run was once in a folder of the same name there: half of the clients' models went to it, and nobody heard."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / LOCK).touch()
    main, other = Workers(0, 2), Workers(1, 2, is_main=False)
    told, seen = [], []
    monkeypatch.setattr(other, "main_says", lambda _: told[0])
    monkeypatch.setattr(other, "everyone_says", lambda own: seen.append(own) or [("one", True), own])

    def as_the_other_sees_it(own):
        with nullcontext() if is_shared else pytest.raises(ConfigError):
            require_one_folder(other, here if is_shared else there)
        return [own, *seen]

    monkeypatch.setattr(main, "main_says", lambda own: told.append(own) or own)
    monkeypatch.setattr(main, "everyone_says", as_the_other_sees_it)
    rule = r"^output: .*here must lie in a folder that all machines of the run see; process 1 on .* does not$"
    with nullcontext() if is_shared else pytest.raises(CommonError, match=rule):
        require_one_folder(main, here)
    assert [path.name for path in here.iterdir()] == [LOCK]


class Keeps(Server):
    """A server that must see every client's message itself: it averages those of even clients only."""

    sees_messages = True

    def open_round(self):
        super().open_round()
        self.order = []

    def see(self, client, message):
        self.order.append(client)
        assert self.order == sorted(self.order)
        return message if client % 2 == 0 else None


class Picky(FedAvg):
    def make_server(self, initial, facts):
        return Keeps(initial)


class Falls(FedRep):
    """Client 1 falls sick in every round, once it has trained."""

    def send(self, data):
        if data.client == 1:
            raise ValueError("went wrong")
        return super().send(data)


class Begins(FedAvg):
    """Its phases rest on the round, which a worker without a client has not heard of."""

    def phases(self):
        return [Phase("all", epochs=None if self.facts.round else 0)]


class StopsAfter(FederationCallback):
    def __init__(self, round):
        self.round = round

    def on_round_end(self, loop, row):
        if row["round"] == self.round:
            loop.stop(signal.SIGINT)


OPTIONS = {
    "a method": (FedRep, {}),
    "half of the clients": (FedRep, {"participation": 0.5}),
    "states on disk": (FedRep, {"participation": 0.5, "pool": "disk"}),
    "a server that sees all": (Picky, {}),
    "no evaluation": (FedAvg, {"evaluate_every": 2}),
    "a ring in turn": (FedRep, {"exchange": Ring("sequential")}),
    "half of a ring": (FedRep, {"exchange": Ring(), "participation": 0.5}),
    "half of a directed graph": (FedRep, {"exchange": DirectedGraph(2), "participation": 0.5}),
    "a sick client": (Falls, {"on_client_error": "skip"}),
    "a sick peer": (Falls, {"on_client_error": "skip", "exchange": DirectedGraph(2)}),
    "random peers": (FedRep, {"exchange": RandomPeers(2), "failures": Failures(0.3)}),
    "phases by the round": (
        Begins,
        {"failures": Failures(schedule={"1": [1, 2, 3]}), "evaluate": EvaluationPolicy(trained=False)},
    ),
    "an attack": (FedRep, {"attack": Attack(share=0.5, kind="noise")}),
    "attackers that collude": (FedRep, {"attack": Attack(share=0.5, kind="inner_product")}),
}
CASES = {name: (kind, {}) for name, kind in sorted(METHODS.items())} | OPTIONS


@pytest.fixture(scope="module")
def set_up_case(set_up_federation, conv_net, make_data):
    """A case's loop, in a folder: `set_up(name, folder)`."""
    data = make_data(batch_size=6)

    def set_up(name, folder, callbacks=()):
        kind, options = CASES[name]
        method = lambda: kind(conv_net())  # noqa: E731
        if name in METHODS:  # what is evaluated on whom is asked of the options' cases
            tests = EvaluationPolicy(globally=False, loss=False, balanced_accuracy=False)
            options = {"evaluate": tests, "local_steps": 2}
        options = {"data": data, "callbacks": callbacks, **options}
        return set_up_federation(method, rounds=2, optimizer=adam, folder=folder, **options)

    return set_up


@pytest.fixture(scope="module")
def run_cases(set_up_case, make_folder):
    """Run cases, one after another, on so many processes; returns the folder that holds a folder a case.

    `before` is a folder of runs that were stopped after round 1, to be resumed.
    """

    def run_all(folder, names, before, stop):
        for name in names:
            loop = set_up_case(name, folder / name, [StopsAfter(1)] if stop else [])
            if before is not None:
                checkpoints = Checkpoints(before / name / "checkpoints")
                loop.load_state_dict(checkpoints.load(checkpoints.find("auto")))
            final = loop.run()
            if loop.workers.is_main:
                torch.save({"final": final, "rows": loop.diary.rows}, folder / f"{name}.pt")
        return 0

    def run(size, names=tuple(CASES), before=None, stop=False):
        folder = make_folder(f"workers-{size}")
        if before is not None:  # a run goes on in its own folder: its clients' states are there
            for name in names:
                (before / name).rename(folder / name)
            before = folder
        if size == 1:
            run_all(folder, names, before, stop)
        else:
            assert launch(run_all, Team(size, threads=1), folder, names, before, stop) == 0
        return folder

    return run


@pytest.fixture(scope="module")
def runs(run_cases, plain_convolutions):
    """Folders of the same runs on 1 process, and begun on 3 and ended on 2; some on 2, and on 1 and 3."""
    return {
        "1": run_cases(1),
        "2": run_cases(2, OPTIONS),
        "3, then 2": run_cases(2, before=run_cases(3, stop=True)),
        "1, then 3": run_cases(3, OPTIONS, before=run_cases(1, OPTIONS, stop=True)),
    }


@lru_cache(maxsize=8)
def read(folder, name):
    """All that a run leaves behind: rows, final scores, checkpoint, private states, models."""
    checkpoints = Checkpoints(folder / name / "checkpoints")
    state = checkpoints.load(checkpoints.find("auto"))
    records = state.pop("clients")
    state.pop("seconds")
    state.pop("holders")  # which differ with the number of workers
    state["board"] |= {name: state["board"][name].nan_to_num(-1.0) for name in ("losses", "last_trained", "alone")}
    state["board"]["scores"] = {name: value.nan_to_num(-1.0) for name, value in state["board"]["scores"].items()}
    clients = {client: load_state(checkpoints.clients, client, record) for client, record in records.items()}
    models = {path.name: torch.load(path) for path in sorted((folder / name / "models").glob("*.pt"))}
    left = torch.load(folder / f"{name}.pt")
    rows = {row["round"]: {k: v for k, v in row.items() if not k.startswith("seconds")} for row in left["rows"]}
    return {"rows": rows, "final": left["final"], "state": state, "clients": clients, "models": models}


@pytest.mark.parametrize(
    ("name", "workers"),
    [(name, "3, then 2") for name in CASES] + [(name, workers) for name in OPTIONS for workers in ("2", "1, then 3")],
)
def test_result_does_not_depend_on_the_number_of_workers(runs, name, workers, assert_identical):
    alone, together = read(runs["1"], name), read(runs[workers], name)
    if "then" in workers:
        alone = {**alone, "rows": {2: alone["rows"][2]}}
    assert_identical(together, alone)


def test_all_states_are_in_the_checkpoint(runs):
    assert sorted(read(runs["2"], "a method")["clients"]) == [0, 1, 2, 3]


class Odd(FedAvg):
    """Steps of one of its clients ask for what only its own worker knows: who it is."""

    odd = 0

    def on_fit_start(self):
        super().on_fit_start()
        self.is_odd = self.facts.client == self.odd

    def local_step(self, step):
        out = step.forward()
        step.descend({name: (2 if self.is_odd else 1) * value for name, value in step.values(out).items()})


@pytest.mark.parametrize("odd", range(4))
def test_what_one_worker_finds_against_stacking_holds_for_all_and_in_a_resumed_run(
    odd, set_up_federation, mlp, tmp_path, assert_identical
):
    """A resumed run's workers all went by what the main one had found."""

    def run(folder, stops):
        kind = type("Odd", (Odd,), {"odd": odd})
        own = [StopsAfter(1)] if stops else []
        loop = set_up_federation(lambda: kind(mlp()), rounds=3, optimizer=adam, folder=folder, cohort=4, callbacks=own)
        if loop.checkpoints.find("auto") is not None:
            loop.load_state_dict(loop.checkpoints.load(loop.checkpoints.find("auto")))
        loop.run()
        torch.save(loop.cohort.reason, folder / f"{loop.workers.rank}.pt")
        return 0

    whole, halved = tmp_path / "whole", tmp_path / "halved"
    for folder, stops in ((whole, False), (halved, True), (halved, False)):
        folder.mkdir(exist_ok=True)
        assert launch(run, Team(2, threads=1), folder, stops) == 0
        assert {torch.load(folder / f"{rank}.pt") for rank in range(2)} == {"its clients differ in Odd.is_odd"}
    states = []
    for folder in (whole, halved):
        checkpoints = Checkpoints(folder / "checkpoints")
        state = checkpoints.load(checkpoints.find("auto"))
        assert state["holders"]["workers"] == 2
        states.append({name: state[name] for name in ("exchange", "board", "holders", "cohort")})
    assert_identical(*states)


# --- what a process tells the others --------------------------------------------------------------------------------


def share(rank_of_costs, size=2, holders=None):
    return Workers(0, size).share_out(dict(enumerate(rank_of_costs)), holders or {})


def test_clients_are_shared_out_by_cost():
    assert share([5.0, 4.0, 3.0, 3.0, 3.0]) == {0: 0, 1: 1, 2: 1, 3: 0, 4: 1}


def test_client_stays_where_its_state_is_if_that_costs_nothing():
    assert share([1.0, 1.0], holders={0: 1, 1: 0}) == {0: 1, 1: 0}


def test_more_workers_than_clients_leave_some_without():
    assert share([1.0, 2.0], size=4) == {0: 1, 1: 0}


def test_one_process_shares_nothing_out():
    assert Workers().share_out({0: 1.0, 7: 3.0}, {}) == {0: 0, 7: 0}


def test_packed_state_comes_back(assert_identical):
    state = {
        "a": torch.arange(3),
        "b": [torch.tensor(1.5, dtype=torch.float64), None, "x"],
        "c": {7: torch.ones(2, 2, dtype=torch.bfloat16).T, "d": torch.zeros(0), "e": torch.tensor([True])},
    }
    skeleton, tensors, size = transport.pack(state)
    again = transport.unpack(skeleton, transport._buffer(tensors, torch.device("cpu")))
    assert size == 3 * 8 + 8 + 4 * 2 + 1
    assert again["b"][1:] == [None, "x"]
    assert_identical({**again, "b": again["b"][0]}, {**state, "b": state["b"][0]})


def test_tensor_without_values_travels_as_its_shape():
    skeleton, tensors, size = transport.pack({"t": torch.empty(1000, device="meta", dtype=torch.float16)})
    assert (tensors, size) == ([], 0)
    there = transport.unpack(skeleton, torch.empty(0, dtype=torch.uint8))["t"]
    assert (there.shape, there.dtype, there.is_meta) == ((1000,), torch.float16, True)


# --- sums in parts --------------------------------------------------------------------------------------------------


def test_means_in_parts_equal_the_mean(assert_identical):
    """Three servers fold in one message each; merged in another order they give what one gives."""
    generator = torch.Generator().manual_seed(0)
    messages = {
        client: Message(
            {"w": torch.randn(50, generator=generator) * 10.0**client, "steps": torch.tensor(client)},
            {"t": torch.randn(4, generator=generator)},
            num_samples=3 + 7 * client,
        )
        for client in range(3)
    }
    whole = Server(Message()).aggregate(messages)
    parts = [Server(Message()) for _ in messages]
    for client in (2, 0, 1):
        parts[client].collect(client, messages[client])
    parts[1].merge(parts[2].partial())
    parts[1].merge(parts[0].partial())
    parts[1].close_round()
    assert_identical(parts[1].message.state_dict(), whole.state_dict())


def test_server_of_its_own_kind_does_not_work_in_parts():
    assert Server(Message()).works_in_parts
    assert not Keeps(Message()).works_in_parts

    class Weighs(Server):
        """By what only the main process knows, as far as anybody can tell."""

        def weight_of(self, message):
            return 1.0 + len(self.message.weights)

    class Alone(Weighs):
        in_parts = True

    assert not Weighs(Message()).works_in_parts
    assert Alone(Message()).works_in_parts
    assert SelfWeighingServer(Message(), "trace").works_in_parts


def test_star_that_looks_at_messages_hears_those_of_all_workers(set_up_federation, mlp):
    class Looks(Star):
        def post(self, client, message):
            super().post(client, message)

    for kind in (Star, Looks):
        loop = set_up_federation(lambda: FedAvg(mlp()), exchange=kind())
        assert loop.exchange.works_in_parts is (kind is Star)


def test_rule_with_an_add_of_its_own_works_in_parts_if_it_says_so():
    """What the other workers' clients had sent was missing from what such a rule made, in silence."""

    class Largest(TensorMean):
        largest = None

        def add(self, value, num_samples):
            self.largest = value if self.largest is None else torch.maximum(self.largest, value)

        def result(self, previous):
            return self.largest

    class Roots(TensorMean):
        in_parts = hears_mean = True

        def add(self, value, num_samples):
            super().add(value, num_samples**0.5)

    assert not Largest.hears_mean
    assert not Server(Message(), {"t": Largest}).works_in_parts
    assert Roots.hears_mean
    assert Server(Message(), {"t": Roots}).works_in_parts


def test_rule_that_needs_every_value_keeps_a_server_from_working_in_parts():
    class Last(TensorMean):
        in_parts = False
        merge = TensorMean.__mro__[1].merge  # the base's: refuses

    assert Server(Message(), {"t": TensorMean}).works_in_parts
    assert not Server(Message(), {"t": Last}).works_in_parts
    with pytest.raises(NotImplementedError, match="Last"):
        Last().merge({})
