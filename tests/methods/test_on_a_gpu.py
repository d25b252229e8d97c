"""Every method on an emulated GPU: no tensor is on the wrong device, no step waits, and the bits are the CPU's."""

import pytest
import torch
from every_method import METHODS
from harnesses import harness
from tiny_optimizers import adam
from torch import nn

from fl_lightning.core.moving import moved
from fl_lightning.core.step import Step

emulator = harness("emulated_gpu")


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
        options = {"participation": 0.75, "local_steps": 2, "trainer": {"accelerator": accelerator}}
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
