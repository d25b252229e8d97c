"""Every method on an emulated GPU: no tensor is on the wrong device, no step waits, and the bits are the CPU's."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from every_method import METHODS
from harnesses import harness
from tiny_optimizers import adam
from torch import nn
from torch.overrides import TorchFunctionMode

from fl_lightning.core.client import ClientModule
from fl_lightning.core.message import ClassMeans, Message, packed
from fl_lightning.core.moving import moved
from fl_lightning.core.step import Step
from fl_lightning.federation.policy import EvaluationPolicy
from fl_lightning.methods.fedcvae import FedCVAE

emulator, draws = harness("emulated_gpu"), harness("same_draws")


@pytest.fixture
def gpu():
    with emulator.emulated_gpu() as found:
        yield found


# --- the emulation itself ---------------------------------------------------------------------------------------------


def test_tensors_here_and_there_do_not_mix(gpu):
    there = torch.ones(2, device="cuda")
    assert there.device == torch.device("cuda", 0)
    assert (there * torch.tensor(2.0)).is_cuda  # a number on the CPU may go along
    with pytest.raises(RuntimeError, match=r"add: .* but \[2\] is on the CPU"):
        there + torch.ones(2)
    with pytest.raises(RuntimeError, match="stack"):
        torch.stack([there.sum(), torch.tensor(0.0)])
    for mixes in (
        lambda: torch.tensor(0.0).add_(there.sum()),
        lambda: torch._utils._flatten_dense_tensors([there, torch.tensor(0.0)]),
        lambda: torch.maximum(there.sum(), torch.tensor(0.0), out=torch.tensor(0.0)),
    ):
        with pytest.raises(RuntimeError, match="on the CPU"):
            mixes()
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    assert not there.cpu().is_cuda


def test_what_waits_is_counted(gpu):
    there, network = torch.ones(2, device="cuda"), nn.Linear(2, 1).to("cuda")
    assert all(parameter.is_cuda for parameter in network.parameters())
    gpu.waits.clear()
    network(there).sum().backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    torch.arange(2).to("cuda", non_blocking=True)
    assert network.weight.grad.is_cuda
    assert not gpu.waits
    float(there.sum()), there[there > 0], there.cpu(), torch.tensor([1.0], device="cuda")
    assert sum(gpu.waits.values()) == 4


def test_outside_there_is_none():
    with emulator.emulated_gpu():
        assert torch.cuda.is_available()
    assert torch.ones(1).device.type == "cpu"
    assert torch.cuda.is_available.__module__ == "torch.cuda"


# --- methods ----------------------------------------------------------------------------------------------------------


def learnt(loop):
    """All that a federation has learnt: what its first client hears, and what clients keep."""
    found = {f"shared {name}": value.cpu() for name, value in loop.exchange.inbox(0).weights.items()}
    for client in range(loop.num_clients):
        found |= {f"{client} {name}": value for name, value in (loop.runner.pool.get(client) or {}).items()}
    return found


@pytest.fixture
def waiting(monkeypatch, gpu):
    """Steps behind the first of their epoch in which something waits."""
    found, take = [], Step.take

    def watched(step):
        before = dict(gpu.waits)
        take(step)
        if not step.is_first and gpu.waits != before:
            found.append({name: count for name, count in gpu.waits.items() if count != before.get(name)})

    monkeypatch.setattr(Step, "take", watched)
    return found


@pytest.fixture(scope="module")
def on(run_federation, make_data, conv_net):
    """Two rounds of three of the four clients, with tests."""

    def run(accelerator, name):
        make, data = lambda: METHODS[name](conv_net()), make_data(batch_size=6)
        tests = EvaluationPolicy(globally=False, balanced_accuracy=False)
        options = {"participation": 0.75, "local_steps": 2, "evaluate": tests, "trainer": {"accelerator": accelerator}}
        return run_federation(make, rounds=2, data=data, optimizer=adam, **options)

    return run


@pytest.fixture(scope="module", params=sorted(METHODS))
def on_the_cpu(request, on):
    """A method's name, and what it learns."""
    return request.param, learnt(on("cpu", request.param))


def test_method_learns_the_same_and_does_not_wait(on_the_cpu, on, waiting):
    name, expected = on_the_cpu
    found = on("gpu", name)
    assert found.runner.device.type == "cuda"
    found = learnt(found)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert waiting == []


# --- between steps ----------------------------------------------------------------------------------------------------


def test_class_means_are_waited_for_once(gpu):
    y = torch.tensor([0, 2, 2]).to("cuda", non_blocking=True)
    means = ClassMeans.from_samples(torch.ones(3, 2, device="cuda"), y, num_classes=3)
    message = Message(artifacts={"prototypes": means})
    assert not gpu.waits
    sizes = [message.size, message.size]
    assert means.counts == [1, 0, 2]
    assert gpu.waits == {"tolist": 1}
    assert sizes == [(2 * 2 + 2, 4 * 4 + 2 * 8)] * 2
    means.count.zero_()
    assert message.size == (0, 0)  # what was changed is read anew
    assert set(packed(means)) == {"kind", *(field.name for field in dataclasses.fields(means))}


def test_rows_of_an_epoch_go_there_without_a_wait(gpu, make_data):
    client = make_data(batch_size=6).clients[0]
    client.store.to(torch.device("cuda", 0))
    gpu.waits.clear()
    for epoch in (client.bundles(0, 6), client.poisson_bundles(0, 6)):
        assert all(x.is_cuda for x, *_ in epoch)
    assert not gpu.waits


def test_fedcvae_takes_its_moments_without_a_wait(gpu, make_data, mlp, monkeypatch):
    method, data = FedCVAE(mlp(), latent_size=3, width=4).to("cuda"), make_data(counts=((8, 8, 0, 4),)).clients[0]
    data.store.to(torch.device("cuda", 0))
    client = ClientModule(method)
    bound = client.bound(data)
    monkeypatch.setattr(type(bound), "are_floats", False)  # whose range would be read
    gpu.waits.clear()
    method.know_classes(bound)
    assert not gpu.waits
    assert method.drawn_classes.tolist() == [0, 1, 3]


# --- the same random numbers ------------------------------------------------------------------------------------------


class Drawing(TorchFunctionMode):
    """Remembers what draws random numbers, and whether on the GPU."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        names = draws._MADE | draws._LIKE | draws._FILLED | draws._WHOLE | draws._CHANGING
        kwargs, tensors = kwargs or {}, [own for own in args if isinstance(own, torch.Tensor)]
        if func.__name__ in names:
            there = str(kwargs.get("device", "cpu")).startswith("cuda") or any(map(emulator.is_there, tensors))
            self.seen[func.__name__] = self.seen.get(func.__name__, False) or there
        return func(*args, **kwargs)


def drawn(device):
    """Some of everything, from global streams and a generator."""
    torch.manual_seed(3)
    own = torch.Generator(device).manual_seed(5)
    start = torch.linspace(0.1, 0.9, 20, device=device).requires_grad_()
    grid = torch.empty(4, 5, device=device).t()
    found = [
        torch.rand(3, device=device),
        torch.randn((2, 2), device=device, generator=own),
        torch.randn(2, device=device, generator=own),
        torch.randint(9, (5,), device=device),
        torch.randperm(7, device=device),
        torch.rand_like(start),
        torch.normal(start.detach(), 1.0),
        torch.bernoulli(start.detach()),
        torch.multinomial(start.detach(), 3),
        grid.normal_(generator=own),
        torch.empty(4, device=device).exponential_(),
        nn.init.kaiming_uniform_(torch.empty(3, 2, device=device)),
        F.dropout(start, 0.5),
        F.dropout(start + 0, 0.5, inplace=True),
        F.gumbel_softmax(start),
        torch.distributions.Normal(start.detach(), 1.0).rsample(),
    ]
    assert all(own.device.type == device for own in found)
    assert grid.stride() == (1, 5)
    torch.stack([found[12].sum(), found[14][0]]).sum().backward()
    return [own.detach().cpu() for own in [*found, start.grad]]


def test_draws_are_the_cpus_and_made_on_it(gpu):
    with draws.SameDraws():
        here = drawn("cpu")
    with Drawing() as seen, draws.SameDraws():
        there = drawn("cuda")
    assert len(seen.seen) == 13
    assert not any(seen.seen.values())
    assert all(map(torch.equal, here, there))


# --- moving many tensors ----------------------------------------------------------------------------------------------


def test_many_tensors_move_in_one_transfer_a_type(gpu):
    own = {"w": torch.randn(2, 3), "b": torch.randn(3), "n": torch.tensor(7), "none": torch.zeros(0)}
    there = moved(own, torch.device("cuda", 0))
    assert all(tensor.is_cuda for tensor in there.values())
    assert not gpu.waits
    back = moved(there, torch.device("cpu"))
    assert gpu.waits == {"to the CPU": 2}  # of two types
    assert list(back) == list(own)
    assert all(torch.equal(back[name], tensor) for name, tensor in own.items())
    assert moved(own, torch.device("cpu"))["w"] is own["w"]
