"""What a method of somebody's own says wrongly is refused in one line, and nothing of it is passed over."""

import re
from functools import partial

import pytest
import torch
from torch import nn

from fl_lightning.core.message import Message
from fl_lightning.core.method import Phase, Predictor
from fl_lightning.core.private_steps import RecordPrivacy
from fl_lightning.core.server import Server
from fl_lightning.core.term import Term
from fl_lightning.errors import ConfigError
from fl_lightning.federation import fit_checks
from fl_lightning.losses.proximal import Proximal
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedprox import FedProx


def own(**says):
    return type("Own", (FedAvg,), says)


def adds(self, step):
    out = step.forward()
    step.descend({**step.values(out), "pull": out.z.square().mean()})


def by_phases(*phases):
    return own(phases=lambda self: list(phases))


def by_ways(**figures):
    return own(
        predictors=lambda self: {
            n: Predictor(lambda seen: seen.logits(self.model), figures=f) for n, f in figures.items()
        }
    )


def by_scores(scores):
    return own(predictors=lambda self: {"": Predictor(lambda seen: scores(self, seen))})


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (by_phases(Phase("all", epochs=-1)), "phase 'all' must have a whole number of epochs, 0 or more, got -1"),
        (by_phases(Phase("all", epochs=1.5)), "phase 'all' must have a whole number of epochs, 0 or more, got 1.5"),
        (by_phases(Phase("all", lr=-0.1)), "phase 'all' must have a learning rate above 0, got -0.1"),
        (
            by_phases(Phase("all", terms=("cross-entropy",))),
            r"phase 'all' \(terms\) names 'cross-entropy', which",
        ),
        (
            by_phases(Phase("all", settings={"al": {"lr": 0.5}})),
            r"phase 'all' has settings of 'al', which is no part of it; did you mean all\?",
        ),
        (
            by_phases(Phase("x", parts={"head": ("model.head",)}, settings={"x": {"lr": 0.5}})),
            "phase 'x' has settings of 'x', which is no part of it",
        ),
        (
            by_phases(Phase("x", trains=("model",), parts={"body": ("model.body",)}, settings={"body": {"lr": 0.5}})),
            r"phase 'x' trains 'model\.head\.\w+', which is in none of its parts: name it in one, or not in trains",
        ),
        (
            by_ways(a=("Local-T",), b=("Local-T",)),
            r"predictors\(\): Local-T must have one predictor, but 'a' and 'b' cl",
        ),
        (
            by_ways(a=("Local-X",)),
            "predictor 'a' gives 'Local-X', which is no headline figure; choose from Local-T, Gl",
        ),
        (
            by_ways(vote=("Local-T",), vote_weighted=()),
            "predictor 'vote_weighted' must have another name: '_weighted' in a column's says something else",
        ),
        (by_ways(now=("Local-T",), as_received=()), "predictor 'as_received' must have another name: '_received' in"),
        (by_ways(fine_tuned=("Local-T",)), "predictor 'fine_tuned' must have another name"),
        (by_ways(**{"a,b": ("Local-T",)}), "predictor 'a,b' must be named by letters, digits and _ . - alone"),
        (
            own(is_shared=lambda self, name, module: self.facts.round % 2 == 0 or "body" in name),
            r"Own\.is_shared\(\) asks for facts\.round, and is asked once, for all rounds and clients: what only",
        ),
        (
            own(shared=property(lambda self: ("model", "model.body")[self.facts.client % 2 :])),
            r"Own\.is_shared\(\) asks for facts\.client, and is asked once",
        ),
        (
            own(is_kept=lambda self, name, module: self.fit.num_steps == 0),
            r"Own\.is_kept\(\) asks for fit\.num_steps, and is asked once",
        ),
        (own(phases=lambda self: Phase("all")), r"Own\.phases\(\) must give a list of Phase, got 'Phase'"),
        (own(phases=lambda self: ["all"]), r"Own\.phases\(\) must give a list of Phase, got 'list'"),
        (
            own(__init__=lambda self, model: nn.Module.__init__(self)),
            r"Own\.__init__\(\) must call super\(\)\.__init__\(model, …\)",
        ),
        (own(losses=lambda self: None), r"Own\.losses\(\) must give each loss of local_step its weight"),
        (own(losses=lambda self: ["pull"]), r"Own\.losses\(\) must give each loss of local_step its weight"),
        (own(losses=lambda self: {"pull": None}), "weighs its loss 'pull' by no number, got None"),
        (own(losses=lambda self: {"pull": -1.0}), "weighs its loss 'pull' by less than 0: negate the loss itself"),
        (by_scores(lambda self, seen: seen.logits(self.model).argmax(1)), r"predictor '' must give .*, got \[1\]"),
        (by_scores(lambda self, seen: seen.logits(self.model)[:, :2]), r"predictor '' must give .*, got \[1, 2\]"),
        (by_scores(lambda self, seen: self.model(seen)), r"Own\.predictors\(\) raises AttributeError: 'Seen' object"),
    ],
)
def test_it_is_refused_before_anything_is_trained(kind, rule, mlp, set_up_federation):
    with pytest.raises(ConfigError, match=rf"^method: Own.*{rule}" if rule[:3] != "Own" else rf"^method: {rule}"):
        set_up_federation(lambda: kind(mlp()))


def test_an_option_that_a_phases_optimizer_does_not_have_is_refused(mlp, set_up_federation):
    """It was added to the optimizer's group, where nothing reads it."""
    kind = by_phases(Phase("all", settings={"all": {"lrr": 0.5}}))
    with pytest.raises(ConfigError, match=r"^method: a phase sets 'lrr', which SGD does not have; did you mean lr\?"):
        set_up_federation(lambda: kind(mlp()))


@pytest.mark.parametrize("share", [lambda round: 0.2 * min(round, 5), lambda round: 1 / round])
def test_a_schedule_over_rounds_begins_with_the_first_one(share, mlp, run_federation):
    """Before training it was asked for a round 0: a warm-up had no learning rate there, and 1/t no value."""
    rates = []

    def phases(self):
        return [Phase("all", lr=0.1 * share(self.facts.round))]

    kind = own(phases=phases, on_fit_end=lambda self: rates.append(self.fit.lr))
    loop = run_federation(lambda: kind(mlp()), rounds=2)
    assert rates == pytest.approx([0.1 * share(1)] * loop.num_clients + [0.1 * share(2)] * loop.num_clients)


def slower(self):
    return [Phase("all", lr=0.1 / self.facts.round)]


@pytest.mark.parametrize(
    ("says", "options"),
    [
        ({"phases": slower}, {"cohort": 4}),
        ({"phases": slower}, {"record_privacy": RecordPrivacy(noise_multiplier=1.0, max_grad_norm=1.0)}),
        ({"losses": lambda self: {"pull": 1 / self.facts.round}, "local_step": adds}, {}),
    ],
)
def test_who_divides_by_the_round_is_asked_for_none_before_the_first(says, options, mlp, run_federation):
    """Once the phases had passed, set-up and cohorts asked for a round 0 after all, and a traceback ended the run."""
    assert run_federation(lambda: own(**says)(mlp()), rounds=1, **options).round == 1


@pytest.mark.parametrize(
    ("later", "rule"),
    [
        (
            Phase("x", trains=("model.haed",)),
            r"phase 'x' \(trains\) names 'model\.haed', which it does not have; did you",
        ),
        (Phase("x", parts={"a": ("model.bdy",)}), r"phase 'x' \(part 'a'\) names 'model\.bdy', which it does not have"),
        (Phase("x", settings={"y": {"lr": 1.0}}), "phase 'x' has settings of 'y', which is no part of it"),
    ],
)
def test_phases_of_later_rounds_are_looked_up_too(later, rule, mlp, set_up_federation):
    """A misspelt submodule trained nothing, in silence."""
    kind = own(phases=lambda self: [Phase("all") if self.facts.round < 2 else later])
    with pytest.raises(ConfigError, match=rf"^method: Own's {rule}"):
        set_up_federation(lambda: kind(mlp()), rounds=2).run()


@pytest.mark.parametrize(
    ("later", "rule"),
    [
        (Phase("x", trains=("model.haed",)), "names 'model.haed', which it does not have"),
        (Phase("x", settings={"x": {"lrr": 0.5}}), "a phase sets 'lrr', which SGD does not have"),
        (Phase("x", lr=-1.0), "a phase's learning rate must be above 0"),
        (Phase("x", optimizer=partial(torch.optim.Adam, betas=(2.0, 0.9))), "Invalid beta parameter"),
    ],
)
def test_what_a_later_round_is_made_of_is_refused_before_the_first(later, rule, mlp, set_up_federation):
    """It ended the run in that round, however many hours after its start."""
    kind = own(phases=lambda self: [Phase("all") if self.facts.round < 3 else later])
    with pytest.raises(ConfigError, match=re.escape(rule)):
        set_up_federation(lambda: kind(mlp()), rounds=3)


def test_a_later_round_may_be_made_of_what_comes_in_before_it(mlp, run_federation):
    """What it says cannot be looked up before training, and is no mistake."""

    def phases(self):
        return [Phase("all", lr=0.1 if self.facts.round == 1 else float(self.heard))]

    def receive(self, message, data):
        self.heard = torch.tensor(0.2)
        FedAvg.receive(self, message, data)

    assert run_federation(lambda: own(phases=phases, receive=receive)(mlp()), rounds=2).round == 2


def test_a_later_round_s_optimizer_may_be_made_of_what_comes_in_before_it(mlp, run_federation):
    def phases(self):
        made = None if self.facts.round == 1 else lambda own: torch.optim.SGD(own, self.heard)
        return [Phase("all", optimizer=made)]

    def receive(self, message, data):
        self.heard = 0.2
        FedAvg.receive(self, message, data)

    assert run_federation(lambda: own(phases=phases, receive=receive)(mlp()), rounds=2).round == 2


def freezes(self):
    """From round 3 on the body stands still."""
    if self.facts.round >= 3:
        self.model.body.requires_grad_(False)
    return FedAvg.phases(self)


def notes(self):
    """The rate falls in the third round that it is asked for."""
    seen = self.seen = {*getattr(self, "seen", ()), self.facts.round}
    return [Phase("all", lr=0.1 if len(seen) <= 2 else 0.001)]


@pytest.mark.parametrize("phases", [freezes, notes])
def test_looking_at_later_rounds_leaves_a_method_in_the_first(phases, mlp, run_federation):
    """Its clients trained as in the last round from the first one on, in silence."""
    short, long = (run_federation(lambda: own(phases=phases)(mlp()), rounds) for rounds in (2, 4))
    assert short.diary.reports[2, 0].losses == long.diary.reports[2, 0].losses


def test_a_rate_for_every_round_is_tried_out_once(mlp, set_up_federation, monkeypatch):
    """Thousands of rounds took a minute before the first."""
    tried = []
    monkeypatch.setattr(fit_checks, "check_optimizer", lambda module, *_: tried.append(module.method.facts.round))

    def phases(self):
        rate = 1 / self.facts.round
        name = f"round {self.facts.round}"
        return [Phase(name, lr=rate, settings={name: {"weight_decay": rate}})]

    set_up_federation(lambda: own(phases=phases)(mlp()), rounds=50)
    assert tried == [1]


def test_predictors_that_come_later_are_refused(mlp, set_up_federation):
    def predictors(self):
        ways = {"": Predictor(lambda seen: seen.logits(self.model))}
        late = {"late": Predictor(lambda seen: seen.logits(self.model), figures=())}
        return ways | (late if self.facts.round > 1 else {})

    said = r"^method: Own\.predictors\(\) must give the same names in every round, and 'late' came or went"
    with pytest.raises(ConfigError, match=said):
        set_up_federation(lambda: own(predictors=predictors)(mlp()), rounds=2).run()


def test_a_loss_that_is_no_tensor_is_named(mlp, set_up_federation):
    def local_step(self, step):
        out = step.forward()
        step.descend({**step.values(out), "pull": 0.5})

    kind = own(local_step=local_step, losses=lambda self: {"pull": 1.0})
    with pytest.raises(ConfigError, match=r"^method: its loss 'pull' must be a scalar tensor, got 0\.5"):
        set_up_federation(lambda: kind(mlp()), rounds=1).run()


def steps(**losses):
    """A local step with losses of its own, some of which are only logged."""

    def local_step(self, step):
        out = step.forward()
        step.descend({**step.values(out), **{name: loss(out) for name, loss in losses.items() if name != "seen"}})
        step.log({name: loss(out).detach() for name, loss in losses.items() if name == "seen"})

    return local_step


def square(out):
    return out.z.square().mean()


@pytest.mark.parametrize("cohort", [None, 4])
def test_a_part_that_no_phase_has_is_said_where_nothing_else_steps(cohort, mlp, run_federation):
    """It trained nothing."""
    kind = own(local_step=lambda self, step: step.descend(step.values(step.forward()), "haed"))
    with pytest.raises(ConfigError, match=r"^method: Own trains nothing: .* descended on for no part of its phases"):
        run_federation(lambda: kind(mlp()), 1, cohort=cohort)


@pytest.mark.parametrize("cohort", [None, 4])
def test_a_value_logged_as_the_loss_is_refused(cohort, mlp, run_federation):
    """It stood in the column of the sum."""
    kind = own(local_step=lambda self, step: step.log({"loss": step.values(step.forward())["cross_entropy"]}))
    with pytest.raises(ConfigError, match=r"^method: Own\.local_step\(\) logs 'loss', which is the sum"):
        run_federation(lambda: kind(mlp()), 1, cohort=cohort)


@pytest.mark.parametrize(("name", "whose"), [("loss", "the sum of all losses"), ("proximal", "one of its terms")])
def test_losses_named_as_others_are_refused(name, whose, mlp, set_up_federation):
    """They took the others' columns, and their gradients."""
    kind = own(local_step=steps(**{name: square}), losses=lambda self: {name: 0.5})
    with pytest.raises(ConfigError, match=rf"^method: Own\.losses\(\) names '{name}', which is {whose}: give it"):
        set_up_federation(lambda: kind(mlp(), extra_terms=[Proximal(0.5)]))


@pytest.mark.parametrize("cohort", [None, 4])
def test_an_extra_term_that_no_step_computes_is_refused(cohort, mlp, run_federation):
    """It did nothing, in silence."""
    kind = own(local_step=lambda self, step: step.descend({"cross_entropy": step.task_loss(step.forward())}))
    rule = r"^method\.extra_terms: Own\.local_step\(\) does not compute Proximal: descend on step\.values\(out\), which"
    with pytest.raises(ConfigError, match=rule):
        run_federation(lambda: kind(mlp(), extra_terms=[Proximal(0.5)]), 1, cohort=cohort)
    run_federation(lambda: kind(mlp(), extra_terms=[Proximal(0.0)]), 1, cohort=cohort)


@pytest.mark.parametrize("cohort", [None, 4])
def test_what_a_step_logs_is_written_whether_it_is_named_or_not(cohort, mlp, run_federation):
    """Of what `losses` did not name nothing was to be seen."""
    kind = own(local_step=steps(seen=square))
    report = run_federation(lambda: kind(mlp()), 1, cohort=cohort).diary.reports[1, 0]
    assert report.logged == {"seen": report.losses["seen"]}
    named = own(local_step=steps(seen=square), losses=lambda self: {"seen": 0.0})
    report = run_federation(lambda: named(mlp()), 1, cohort=cohort).diary.reports[1, 0]
    assert report.logged == {}
    assert "seen" in report.losses


class OfOneElement(Term):
    """A scalar that has kept a dimension."""

    def forward(self, host, out):
        return out.z.square().mean().reshape(1)


@pytest.mark.parametrize("cohort", [None, 4])
def test_losses_of_one_element_are_scalars(cohort, mlp, run_federation):
    """The fit ended in torch's words about stacks."""
    reshaped = own(local_step=steps(push=lambda out: square(out).reshape(1)), losses=lambda self: {"push": 0.5})
    plain = own(local_step=steps(push=square), losses=lambda self: {"push": 0.5})
    one, other = (run_federation(lambda k=k: k(mlp()), 1, cohort=cohort).diary.reports[1, 0] for k in (reshaped, plain))
    assert one.losses == pytest.approx(other.losses, abs=1e-6)
    as_term = run_federation(lambda: FedAvg(mlp(), extra_terms=[OfOneElement(0.5)]), 1, cohort=cohort)
    assert as_term.diary.reports[1, 0].losses["loss"] == pytest.approx(one.losses["loss"], abs=1e-6)


@pytest.mark.parametrize("cohort", [None, 4])
def test_a_vector_that_is_logged_is_named(cohort, mlp, run_federation):
    kind = own(local_step=steps(seen=lambda out: out.z.square().mean(1)))
    with pytest.raises(
        ConfigError, match=r"^method: its loss 'seen' must be a scalar tensor, not one of shape \[\d+\]"
    ):
        run_federation(lambda: kind(mlp()), 1, cohort=cohort)


class Unmade(Term):
    """It forgets its class."""

    def __init__(self):
        self.name_of_it = "unmade"


def test_a_term_that_forgets_its_class_is_refused(mlp):
    with pytest.raises(
        ConfigError, match=r"^method\.extra_terms: Unmade\.__init__\(\) must call super\(\)\.__init__\("
    ):
        FedAvg(mlp(), extra_terms=[Unmade()])


def test_layers_that_have_no_size_after_setup_are_refused(mlp, set_up_federation):
    def setup(self):
        self.side = nn.LazyLinear(3)

    with pytest.raises(
        ConfigError, match=r"^method: Own's side\.weight has no size yet: setup\(\) must give its layers"
    ):
        set_up_federation(lambda: own(setup=setup)(mlp()))


class Anchors(FedAvg):
    """FedProx written anew: where a client begins is in buffers."""

    def setup(self):
        for place, parameter in enumerate(self.model.parameters()):
            self.register_buffer(f"anchor_{place}", parameter.detach().clone(), persistent=False)

    def note(self):
        for place, parameter in enumerate(self.model.parameters()):
            self.get_buffer(f"anchor_{place}").copy_(parameter)

    def losses(self):
        return {"proximal": 0.3}

    def local_step(self, step):
        out = step.forward()
        pairs = ((p, self.get_buffer(f"anchor_{place}")) for place, p in enumerate(self.model.parameters()))
        step.descend({**step.values(out), "proximal": 0.5 * sum((p - q).square().sum() for p, q in pairs)})


class AnchorsInReceive(Anchors):
    def receive(self, message, data):
        super().receive(message, data)
        self.note()


class AnchorsInFit(Anchors):
    def on_fit_start(self):
        self.note()


@pytest.mark.parametrize("cohort", [None, 4])
@pytest.mark.parametrize("kind", [AnchorsInReceive, AnchorsInFit])
def test_a_buffer_that_was_set_from_a_parameter_is_a_constant_of_the_fit(kind, cohort, mlp, run_federation):
    """The gradient went through the buffer, too, and was 0: the run was FedAvg's, and logged a proximal loss."""
    kinds = kind, lambda model: FedProx(model, mu=0.3)
    anchored, proximal = (run_federation(lambda m=m: m(mlp()), 2, cohort=cohort) for m in kinds)
    for name, tensor in proximal.exchange.global_message().weights.items():
        torch.testing.assert_close(anchored.exchange.global_message().weights[name], tensor)


class NewHead(FedAvg):
    def on_fit_start(self):
        self.model.head.weight = torch.nn.Parameter(self.model.head.weight.detach().clone())


class Unnamed(FedAvg):
    def local_step(self, step):
        step.descend(step.values(step.forward())["cross_entropy"])


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (NewHead, r"method: NewHead\.on_fit_start\(\) makes model\.head\.weight anew, which no optimizer has"),
        (Unnamed, r"method: step\.descend\(\) takes losses by name: .*, got 'Tensor'"),
    ],
)
def test_steps_that_train_nothing_are_refused(kind, said, mlp, run_federation):
    """The new parameter stayed as it was, in silence; the tensor was an AttributeError."""
    with pytest.raises(ConfigError, match=said):
        run_federation(lambda: kind(mlp()), rounds=1)


class Drops(Server):
    def close_round(self):
        super().close_round()
        self.message = Message(dict(list(self.message.weights.items())[1:]))


class Cuts(Server):
    def close_round(self):
        super().close_round()
        self.message = Message({name: tensor[:1] for name, tensor in self.message.weights.items()})


class Bare(Server):
    def __init__(self, initial):
        self.message = initial


def test_a_server_of_ones_own_that_leaves_weights_out_is_said_once(mlp, set_up_federation, capsys):
    """Clients started from their first values in every round, in silence."""
    kind = own(make_server=lambda self, initial, facts: Drops(initial))
    set_up_federation(lambda: kind(mlp()), rounds=2).run()
    said = "Drops sends no 'model.body.stages.0.1.weight', which clients share: they start from what it was"
    assert capsys.readouterr().err.count(said) == 1


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (Cuts, r"Cuts must send 'model\.\S+' as \(\d+, \d+\), as clients share it, got \(1, \d+\)"),
        (Bare, r"Bare\.__init__\(\) must call super\(\)\.__init__\(initial, …\)"),
        (
            lambda initial: Server(initial, rules={"bag": lambda: None}),
            r"Server's rule of artifact 'bag' must make an ArtifactRule whenever it is called, got 'NoneType'",
        ),
    ],
)
def test_a_server_that_is_none_or_sends_something_else_is_refused(make, rule, mlp, set_up_federation):
    """They ended in tracebacks."""
    kind = own(make_server=lambda self, initial, facts: make(initial))
    with pytest.raises(ConfigError, match=rf"^method: {rule}"):
        set_up_federation(lambda: kind(mlp()), rounds=2).run()


def test_loss_without_a_weight_is_not_left_out_in_silence(mlp, set_up_federation):
    rule = r"method: Own\.local_step\(\) has a loss 'pull' to which losses\(\) gives no weight"
    with pytest.raises(ConfigError, match=rule):
        set_up_federation(lambda: own(local_step=adds)(mlp())).run()


def test_weight_that_falls_below_zero_ends_the_run(mlp, set_up_federation):
    falls = own(local_step=adds, losses=lambda self: {"pull": 2.5 - self.facts.round})
    with pytest.raises(ConfigError, match=r"weighs its loss 'pull' by less than 0: negate the loss itself, got -0\.5"):
        set_up_federation(lambda: falls(mlp())).run()


def test_weight_may_be_a_tensor(mlp, set_up_federation):
    set_up_federation(
        lambda: own(local_step=adds, losses=lambda self: {"pull": torch.tensor(0.5)})(mlp()), rounds=1
    ).run()
