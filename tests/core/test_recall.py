"""What networks at rest make of a client's samples, kept over the epochs of a phase."""

from collections import namedtuple

import lightning as L
import pytest
import torch
from every_method import METHODS
from leaves import flatten
from torch import nn
from torchvision.transforms.v2 import RandomHorizontalFlip

from fl_lightning.core import recall
from fl_lightning.core.facts import Phase
from fl_lightning.core.freezing import frozen_copy
from fl_lightning.core.method import Method
from fl_lightning.core.recall import Memory
from fl_lightning.core.term import Term
from fl_lightning.methods.fedcpd import FedCPD
from fl_lightning.methods.fedrep import FedRep
from fl_lightning.models.split import Body, SplitModel

SAMPLES = torch.rand(12, 3, generator=torch.Generator().manual_seed(0))
EPOCHS = [[[0, 5, 2], [1, 4, 3]], [[4, 0, 1], [2, 3, 5]], [[3, 1, 5], [0, 2, 4]]]


class Counts(nn.Module):
    """A linear layer that counts its passes."""

    def __init__(self, *layers):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 2), *layers)
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        return self.layers(x)


def told(network, memory, between=lambda: None, epochs=EPOCHS):
    """What is recalled of each epoch's mini-batches, and what the network says of them at that moment."""
    found, asked = [], []
    for index, epoch in enumerate(epochs):
        if index:
            memory.begin_epoch()
        for rows in epoch:
            x = SAMPLES[rows]
            found.append(memory.of(network, [network], torch.tensor(rows), lambda x=x: network(x)).detach())
            asked.append(network.layers(x).detach())
            between()
    return found, asked


def agree(found, asked):
    return all(torch.allclose(one, other, rtol=0, atol=1e-6) for one, other in zip(found, asked, strict=True))


TRIALS = 2
"""Passes of the first mini-batch of each later epoch, to see whether the network says the same."""


def test_a_network_at_rest_is_asked_once_a_sample_and_tried_once_an_epoch():
    network = Counts().eval()
    found, asked = told(network, Memory(1 << 20, 6))
    assert network.passes == 2 + TRIALS
    assert agree(found, asked)


def test_a_sample_that_no_epoch_has_had_yet_is_asked_for():
    network = Counts().eval()
    found, asked = told(network, Memory(1 << 20, 6), epochs=[[[0, 1]], [[2, 1], [0, 2]], [[1, 2], [1, 0]]])
    assert network.passes == 2 + 2
    assert agree(found, asked)


def test_what_takes_too_much_is_not_kept():
    network = Counts().eval()
    told(network, Memory(6 * 2 * 4 + 8 * 4 - 1, 6))
    assert network.passes == 6
    told(network, memory := Memory(6 * 2 * 4 + 8 * 4, 6))
    assert network.passes == 6 + 2 + TRIALS
    assert memory.left == 0


def test_networks_share_what_may_be_kept():
    memory, one, other = Memory(2 * (6 * 2 * 4 + 8 * 4) - 1, 6), Counts().eval(), Counts().eval()
    told(one, memory)
    told(other, memory)
    assert (one.passes, other.passes) == (2 + TRIALS, 6)


@pytest.mark.parametrize("write", ["in place", "by data", "another tensor"])
def test_a_teacher_that_follows_its_pupil_is_asked_every_time(write):
    network = Counts().eval()
    weight = network.layers[0].weight

    def follow():
        if write == "in place":
            with torch.no_grad():
                weight.mul_(0.999)
        elif write == "by data":
            weight.data.mul_(0.999)
        else:
            weight.data = weight.data * 0.999

    found, asked = told(network, Memory(1 << 20, 6), follow)
    assert network.passes == 6
    assert agree(found, asked)


def test_a_write_in_the_midst_of_an_epoch_is_seen():
    network, memory = Counts().eval(), Memory(1 << 20, 6)
    told(network, memory, epochs=EPOCHS[:1])
    with torch.no_grad():
        network.layers[0].bias.add_(1)
    found, asked = told(network, memory, epochs=EPOCHS[1:2])
    assert agree(found, asked)


def test_a_teacher_that_begins_to_follow_by_data_in_the_midst_of_an_epoch_is_asked_from_then_on():
    network, memory = Counts().eval(), Memory(1 << 20, 6)
    steps = iter(range(100))

    def follow():
        if next(steps) >= 2:  # after the third mini-batch, the first of the second epoch
            for parameter in network.parameters():
                parameter.data.mul_(0.9)

    found, asked = told(network, memory, follow)
    assert agree(found, asked)


@pytest.mark.parametrize(
    "layer", [nn.Dropout(0.5), nn.Dropout(1e-9), nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False)]
)
def test_what_depends_on_draws_or_on_the_mini_batch_is_not_kept(layer):
    network = Counts(layer).train()
    told(network, Memory(1 << 20, 6))
    assert network.passes >= 6
    assert all(module.training for module in network.modules())


def test_trying_out_whether_a_network_rests_changes_nothing_of_it():
    tried, plain = Counts(nn.BatchNorm1d(2)).train(), Counts(nn.BatchNorm1d(2)).train()
    told(tried, Memory(1 << 20, 6))
    told(plain, Memory(0, 6))
    assert all(torch.equal(tried.state_dict()[name], value) for name, value in plain.state_dict().items())


def test_train_mode_that_makes_no_difference_is_no_obstacle_and_stays():
    network = Counts(nn.BatchNorm1d(2), nn.ReLU()).train()
    network.layers[1].eval()
    told(network, Memory(1 << 20, 6))
    assert network.passes == 3 + TRIALS  # one to see that
    assert [module.training for module in network.layers] == [True, False, True]


def test_statistics_of_the_mini_batch_are_none_of_a_sample_in_eval_mode_either():
    network = Counts(nn.BatchNorm1d(2, track_running_stats=False)).eval()
    told(network, Memory(1 << 20, 6))
    assert network.passes == 6


def test_a_network_that_says_something_else_in_a_later_epoch_is_asked_every_time():
    network, says = Counts().eval(), [0.0]
    network.register_forward_hook(lambda module, args, out: out + says[0])
    memory = Memory(1 << 20, 6)
    for epoch in EPOCHS:
        memory.begin_epoch()
        for rows in epoch:
            x = SAMPLES[rows]
            found = memory.of(network, [network], torch.tensor(rows), lambda x=x: network(x))
            assert torch.allclose(found, network.layers(x) + says[0], rtol=0, atol=1e-6)
        says[0] += 0.1


class Centred(Counts):
    def forward(self, x):
        z = super().forward(x)
        return z - z.mean(0)


def test_a_network_that_mixes_samples_is_asked_every_time():
    network = Centred().eval()
    told(network, Memory(1 << 20, 6))
    assert network.passes == 6


class Doubles(Counts):
    def forward(self, x):
        return super().forward(x.mul_(2))


def test_a_network_that_writes_into_its_inputs_is_asked_every_time():
    network, x, rows = Doubles().train(), SAMPLES[:3].clone(), torch.tensor([0, 1, 2])
    memory = Memory(1 << 20, 6)
    for _ in range(2):
        memory.of(network, [network], rows, lambda: network(x), x)
    assert network.passes == 2
    assert torch.equal(x, SAMPLES[:3] * 4)


Named = namedtuple("Named", "z logits")
ODD = {
    "a named tuple": lambda x: Named(x, x),
    "a scalar": lambda x: (x, x.mean()),
    "a dictionary": lambda x: {"z": x},
    "nothing": lambda x: (x, None),
    "other shapes": lambda x: x[:, : 1 + int(x[0, 0] > 1)],
    "another form": lambda x: (x, x) if x[0, 0] > 1 else (x, [x]),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_odd_is_given_as_it_is(kind):
    memory = Memory(1 << 20, 6)
    for rows, x in (([0, 1], torch.zeros(2, 3)), ([2, 3], torch.full((2, 3), 2.0)), ([0, 1], torch.full((2, 3), 2.0))):
        given, expected = memory.of(kind, [], torch.tensor(rows), lambda x=x: ODD[kind](x)), ODD[kind](x)
        assert type(given) is type(expected)
        assert repr(given) == repr(expected)
        memory.begin_epoch()


def test_nan_is_not_kept():
    network = Counts().train()
    nn.init.constant_(network.layers[0].bias, torch.nan)
    found, _ = told(network, Memory(1 << 20, 6))
    assert all(value.isnan().all() for value in found)


def test_maps_keep_their_nesting_their_layout_and_their_type():
    maps = torch.rand(6, 3, 2, 2).to(memory_format=torch.channels_last)
    memory = Memory(1 << 20, 6)
    for rows in ([0, 1, 2, 3, 4, 5], [5, 0, 3]):
        x = maps[rows]
        make = lambda x=x: ([x, x.contiguous()], x[:, 0, 0].bfloat16())  # noqa: E731
        (last, first), vectors = memory.of("maps", [], torch.tensor(rows), make)
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert first.is_contiguous()
    assert vectors.dtype == torch.bfloat16
    assert torch.equal(last, maps[[5, 0, 3]])
    assert torch.equal(first, last)


def test_what_has_no_row_a_sample_is_not_kept():
    memory = Memory(1 << 20, 6)
    made = [memory.of("mean", [], torch.tensor([0, 1]), lambda n=n: torch.full((1,), n)) for n in (1.0, 2.0)]
    assert [float(each) for each in made] == [1, 2]


# --- in local fits --------------------------------------------------------------------------------------------------

TELLING = {
    "MOON": {"temperature": 0.5},
    "FedNTD": {},
    "FedPHP": {"transfer": "KD"},
    "FedCP": {"noisy": False},
    "FedCPD": {"head_epochs": 2},
    "FedRep": {"head_epochs": 3},
    "FedPAC": {"head_epochs": 3},
}


@pytest.mark.parametrize("name", TELLING)
def test_methods_learn_the_same(run_federation, outcome, mlp, sgd, monkeypatch, name):
    """In float64, where roundings of other mini-batches do not show."""
    take, taken = recall._Kept.take, []
    monkeypatch.setattr(recall._Kept, "take", lambda kept, rows: taken.append(rows) or take(kept, rows))
    options = {"local_epochs": 3, "rounds": 2, "trainer": {"precision": "64-true"}, "optimizer": sgd(0.05)}
    kept, anew = (
        flatten(outcome(run_federation(lambda: METHODS[name](mlp(), **TELLING[name]), recall=most, **options)))
        for most in (256, 0)
    )
    tensors = [key for key, value in anew.items() if torch.is_tensor(value)]
    assert len(tensors) >= 4
    for key in tensors:
        assert torch.allclose(kept[key].double(), anew[key].double(), rtol=0, atol=1e-9), key
    assert taken


class Watched(FedRep):
    """Counts the body's passes of every fit."""

    def setup(self):
        super().setup()
        self.passes = []
        self.model.body.neck.register_forward_hook(lambda *_: self.passes.append(self.model.body.training))


def passes_of(loop):
    return sum(loop.runner.modules[0].method.passes)


OPTIONS = {"evaluate_every": 10, "rounds": 1}


def test_a_frozen_body_is_passed_once_a_sample_and_tried_once_an_epoch(run_federation, make_data, mlp):
    data = make_data(((4, 4, 0, 0),), batch_size=4)
    for most, expected in ((256, 2 + 4 * 1 + 2), (0, 5 * 2 + 2)):
        method = lambda: Watched(mlp(), head_epochs=5)  # noqa: E731
        assert passes_of(run_federation(method, data=data, recall=most, **OPTIONS)) == expected


def test_a_body_with_batch_norm_in_train_mode_moves_its_statistics_in_every_epoch(
    run_federation, outcome, conv_net, assert_identical
):
    kept, anew = (
        outcome(run_federation(lambda: FedRep(conv_net(), head_epochs=3), recall=most, **OPTIONS)) for most in (256, 0)
    )
    assert_identical(kept, anew)


def test_augmented_samples_are_passed_anew(run_federation, make_data, mlp):
    data = make_data(((4, 4, 0, 0),), batch_size=4, augmentation=[RandomHorizontalFlip()])
    method = lambda: Watched(mlp(), head_epochs=5)  # noqa: E731
    assert passes_of(run_federation(method, data=data, **OPTIONS)) == 5 * 2 + 2


class Noisy(Watched):
    """Changes its inputs, one way or another."""

    def __init__(self, model, way, **options):
        super().__init__(model, **options)
        self.way = way

    def local_step(self, step):
        if self.way == "in place":
            step.x.add_(1)
        elif self.way == "another tensor":
            step.x = step.x + 1
        super().local_step(step)


class NoiseOnBatches(L.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        batch[0].add_(1)


@pytest.mark.parametrize("way", ["in place", "another tensor", "callback"])
def test_inputs_that_are_changed_are_passed_anew(run_federation, make_data, mlp, way):
    data = make_data(((4, 4, 0, 0),), batch_size=4)
    trainer = {"callbacks": [NoiseOnBatches()]} if way == "callback" else {}
    loop = run_federation(lambda: Noisy(mlp(), way, head_epochs=5), data=data, trainer=trainer, **OPTIONS)
    assert passes_of(loop) == 5 * 2 + 2


class HeadFirst(Method):
    """The head on a body at rest for three epochs, then all for one."""

    shared = ("model",)

    def phases(self):
        return [Phase("head", trains=("model.head",), epochs=3), Phase("all", epochs=1)]


class OfMaps(Term):
    """Looks at feature maps."""

    reaches = ("model.head",)

    def forward(self, host, out):
        maps = [out.x] + out.features + [out.x][:0]  # noqa: RUF005 (both sides of a sum)
        return (out.logits * maps[-1].flatten(1).mean(1, keepdim=True)).square().mean()


class OtherLabels(HeadFirst):
    def local_step(self, step):
        step.descend(step.values(step.forward(y=3 - step.y)))


class Adversarial(HeadFirst):
    def local_step(self, step):
        step.x.requires_grad_(True)
        slope = torch.autograd.grad(step.task_loss(step.forward()), step.x)[0]
        step.x = step.x.detach() + 0.1 * slope.sign()
        super().local_step(step)


class Taught(Method):
    """Asks one teacher in several ways."""

    shared = ("model",)

    def setup(self):
        self.teacher = frozen_copy(self.model)

    def losses(self):
        return {"taught": 1.0}

    def local_step(self, step):
        out = step.forward()
        said = step.told_by(self.teacher).logits + out.told(self.teacher) + step.told(self.teacher)
        said = said + out.told(lambda x: self.teacher(2 * x), self.teacher) + out.told(self.bias)
        step.descend({**step.values(out), "taught": (out.logits - said).square().mean()})
        step.observe(out)

    def bias(self, x):
        return self.fit.epoch * x.flatten(1)[:, :4]


class InTwoModes(HeadFirst):
    def losses(self):
        return {"apart": 1.0}

    def local_step(self, step):
        told, out = step.told_by(self.model), step.forward()
        step.descend({**step.values(out), "apart": (out.z - told.z).square().mean()})


class Hooked(HeadFirst):
    def setup(self):
        self.model.body.register_forward_hook(lambda module, args, out: 2 * out)


def convolutional(layer):
    stage = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), layer(), nn.ReLU(), nn.AvgPool2d(2))
    body = Body([stage], nn.Sequential(nn.Flatten(), nn.Linear(64, 6)))
    return SplitModel(body, nn.Linear(6, 4), 6, 4, (1, 8, 8))


class MovingNorm(nn.InstanceNorm2d):
    """Its statistics move in training alone; those of torch 2.6's move in eval mode, too, by rounding."""

    def forward(self, x):
        if self.training:
            return super().forward(x)
        kept = self.running_mean.clone(), self.running_var.clone()
        return nn.functional.instance_norm(x, *kept, use_input_stats=False)


def moving_norm():
    return MovingNorm(4, track_running_stats=True)


SITUATIONS = {
    "maps": lambda: HeadFirst(convolutional(nn.Identity), extra_terms=[OfMaps(0.5)]),
    "maps under dropout": lambda: HeadFirst(convolutional(nn.Dropout), extra_terms=[OfMaps(0.5)]),
    "maps under statistics": lambda: HeadFirst(convolutional(moving_norm), extra_terms=[OfMaps(0.5)]),
    "other labels": lambda: OtherLabels(convolutional(nn.Identity)),
    "gradients of inputs": lambda: Adversarial(convolutional(nn.Identity)),
    "several ways to ask": lambda: Taught(convolutional(nn.Identity)),
    "two modes": lambda: InTwoModes(convolutional(nn.Dropout)),
    "a hook on the body": lambda: Hooked(convolutional(nn.Identity)),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_runs_are_the_same_whatever_is_kept(run_federation, outcome, name):
    options = {"local_epochs": 3, "rounds": 2, "trainer": {"precision": "64-true"}}
    kept, anew = (flatten(outcome(run_federation(SITUATIONS[name], recall=most, **options))) for most in (256, 0))
    for key in [key for key, value in anew.items() if torch.is_tensor(value)]:
        assert torch.allclose(kept[key].double(), anew[key].double(), rtol=0, atol=1e-11), key


class StopsAtOnce(L.Callback):
    def on_train_start(self, trainer, module):
        trainer.should_stop = True


def test_a_fit_that_is_stopped_before_its_first_epoch_ends(run_federation, mlp):
    run_federation(lambda: FedRep(mlp()), trainer={"callbacks": [StopsAtOnce()]}, **OPTIONS)


def test_bundles_may_be_gathered_in_inference_mode(data):
    with torch.inference_mode():
        bundle = data.clients[0].bundles(0, 4)[0]
    assert bundle.step_rows() == [None]


class Sick(Taught):
    def local_step(self, step):
        super().local_step(step)
        if self.fit.epoch == 1:
            raise ValueError("sick")


def test_nothing_is_kept_after_a_fit_that_breaks_off(run_federation, mlp):
    loop = run_federation(lambda: Sick(mlp()), local_epochs=3, on_client_error="skip", **OPTIONS)
    assert not loop.runner.modules[0].memory._kept


class Curious(Method):
    """Looks at the maps of a body that rests."""

    shared = ("model.body",)

    def phases(self):
        return [Phase("head", trains=("model.head",), epochs=2)]

    def local_step(self, step):
        out = step.forward()
        expected = self.model.features(step.x)
        assert len(out.features) == len(expected) == 2
        assert all(torch.equal(one, other) for one, other in zip(out.features, expected, strict=True))
        assert torch.equal(out.features[-1:][0], expected[-1])
        super().local_step(step)


def test_maps_of_a_body_at_rest_are_made_on_demand(run_federation, mlp):
    run_federation(lambda: Curious(mlp(hidden=(8, 6, 5))), **OPTIONS)


def test_nothing_is_kept_after_a_fit(run_federation, mlp):
    loop = run_federation(lambda: FedCPD(mlp(), head_epochs=2), local_epochs=2, rounds=2)
    module = loop.runner.modules[0]
    assert not module.memory._kept
    assert module.memory.left == 0
