"""Images read off what a client of a run really sends after one local step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.audit.matching import Attack, Found, Target, search
from fl_lightning.core.client import ClientModule, FitSettings
from fl_lightning.core.message import ClassMeans, Message
from fl_lightning.core.private_mean import CLIPPED, Clipped
from fl_lightning.data.store import ClientData
from fl_lightning.errors import require
from fl_lightning.experiment import BuiltExperiment
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.federation.privacy import ClipAndNoise
from fl_lightning.seeding import seed_global_streams, torch_generator

STEP = 1e-3
"""Learning rate of the one step of plain SGD that the client makes, where its message passes no filter."""
FIRST = 1
"""The round that is attacked: the first, in which all that a client is made of is known."""


@dataclass(frozen=True)
class Inversion:
    """One attack on one message.

    Args:
        label: the run's, and what was done to its message.
        blurred: whether noise was put on it.
        found: images and curves; None where nothing was sent that could be attacked.
        sent: what was attacked: parameters and class means, in values.
        message: all values of the message.
        step: learning rate of the client's step; under filters the run's own, for they change small updates more.
    """

    label: str
    blurred: bool
    found: Found | None
    sent: int
    message: int
    step: float


@dataclass(frozen=True)
class Victim:
    """The client whose message is attacked.

    Args:
        client: 0-based.
        x: [B, …] the images as its model sees them.
        y: [B] their classes.
        images: [B, …] the same in [0, 1].
        bounds: the least and the largest value that an input can have.
        data: these images as a client's samples.
    """

    client: int
    x: Tensor
    y: Tensor
    images: Tensor
    bounds: tuple[Tensor, Tensor]
    data: ClientData


def make_one_step(experiment: BuiltExperiment, number: int) -> None:
    """Let clients of a run make one step a fit, on all of so many samples; before the run is set up."""
    experiment.loop.settings = replace(experiment.loop.settings, local_epochs=1, local_steps=None)
    experiment.data.batch_size, experiment.data.drop_last = number, False


def choose_victim(loop: FederatedLoop, number: int) -> Victim:
    """The first client with enough images, and of these one a class as far as there are classes.

    Raises:
        ConfigError: if no client has so many, or samples are no images.
    """
    there, most = np.flatnonzero(loop.data.num_train >= number), int(loop.data.num_train.max())
    require(len(there) > 0, "audit --images", f"must be <= {most}, the training part of the largest client", number)
    own = loop.data.clients[int(there[0])]
    y = own.store.y.cpu()[own.train]
    by_class = [own.train[y == c] for c in y.unique()]
    rounds = max(len(rows) for rows in by_class)
    in_turn = [int(rows[i]) for i in range(rounds) for rows in by_class if i < len(rows)]
    chosen = torch.tensor(in_turn[:number])
    nothing = torch.zeros(0, dtype=torch.long).numpy()
    data = ClientData(own.client, own.store, own.num_classes, chosen.numpy(), nothing, nothing, number)
    x, y = own.store.gather(chosen)
    require(x.ndim == 4 and x.is_floating_point(), "audit", "only images can be read off gradients: say --images 0")
    x = x.contiguous()
    bounds = own.store.bounds()
    return Victim(own.client, x, y, (x - bounds[0]) / (bounds[1] - bounds[0]), bounds, data)


def invert(
    experiment: BuiltExperiment, victim: Victim, attack: Attack, noise: float, report: Callable[[int], None]
) -> Any:
    """Attack what the victim sends under a run's configuration, as it is and with noise.

    The client receives what it receives in round 1, makes one step of plain SGD on its images (a phase that has epochs
    of its own makes as many), and sends; its message passes the run's wire. The attacker knows the weights before, the
    classes, and the method; not what it draws.

    Args:
        experiment: the run, set up after `make_one_step`.
        victim: whose message.
        attack: how images are sought.
        noise: the standard deviation of Gaussian noise on a second copy of the message, in units of the update's root
            mean square; 0 for no such copy.
        report: told of every step.

    Returns:
        A list of `Inversion`, the message as it is sent first.
    """
    loop, seed = experiment.loop, experiment.seed
    step = _rate(loop) if loop.settings.wire else STEP
    believed, before, message = _one_step(loop, victim, step)
    gradients = _gradients(believed, before, message, step)
    means = _class_means(believed, message, victim)
    target = Target(believed, gradients, means, victim.y, victim.bounds, tuple(victim.x.shape))
    name, method = experiment.name, experiment.method_name
    label = method if name == method else f"{method} ({name})"
    about = message.num_params, step
    found = [Inversion(label, False, *_attacked(target, attack, seed, victim, report), *about)]
    if noise > 0 and not target.is_empty:
        rows = None if means is None else (_blurred({"means": means[0]}, noise, seed)["means"], means[1])
        blurred = replace(target, gradients=_blurred(gradients, noise, seed), means=rows)
        own = _attacked(blurred, attack, seed, victim, report)
        found.append(Inversion(f"{label} + noise {noise:g}", True, *own, *about))
    return found


def _attacked(
    target: Target, attack: Attack, seed: int, victim: Victim, report: Callable[[int], None]
) -> tuple[Found | None, int]:
    sent = sum(g.numel() for g in target.gradients.values())
    sent += 0 if target.means is None else target.means[0].numel()
    return None if target.is_empty else search(target, attack, seed, victim.images, report), sent


def _rate(loop: FederatedLoop) -> float:
    """The learning rate of the run's optimizer."""
    settings = loop.runner.modules[0].settings
    assert settings is not None, "`settings` is set by the runner"
    return float(settings.optimizer([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]["lr"])


def _one_step(loop: FederatedLoop, victim: Victim, step: float) -> tuple[ClientModule, dict[str, Tensor], Message]:
    """The client before its step, its parameters then, and what is heard of it after."""
    runner, client = loop.runner, victim.client
    loop.exchange.open(FIRST, [client])
    module = runner.load(client)
    facts = replace(runner.facts, round=FIRST, participants=(client,))
    received = loop.wire.down(loop.exchange.inbox(client), FIRST)
    runner.receive(module, received, victim.data, facts)
    believed = copy.deepcopy(module)
    settings = FitSettings(lambda parameters: torch.optim.SGD(parameters, lr=step), local_epochs=1)
    module.settings, believed.settings, kept = settings, settings, module.settings
    before = {name: tensor.detach().clone() for name, tensor in module.method.state_dict().items()}
    runner.fit(module, victim.data, FIRST)
    seed_global_streams(loop.seed, "send", FIRST, client)
    message = loop.wire.up(module.send(victim.data), received, {})
    module.settings = kept
    return believed, before, _heard(loop, message, before)


def _heard(loop: FederatedLoop, message: Message, before: dict[str, Tensor]) -> Message:
    """What an attacker hears of a message that is clipped for a private mean: the sum, less all others' messages."""
    packed = message.artifacts.get(CLIPPED)
    private = [own for own in loop.settings.wire or () if isinstance(own, ClipAndNoise)]
    return private[0].alone(packed, before, loop.seed) if isinstance(packed, Clipped) else message


def _gradients(believed: ClientModule, before: dict[str, Tensor], message: Message, step: float) -> dict[str, Tensor]:
    """What the update says of each parameter's gradient; of artifacts those that are parameters."""
    sent = dict(message.weights)
    for name in before:
        short = name.rpartition(".")[2]
        value = message.artifacts.get(short)
        if isinstance(value, Tensor) and value.shape == before[name].shape:
            sent[name] = value
    trained = {name for name, _ in believed.method.named_parameters()}
    moved = {name: (before[name] - t.to(before[name])) / step for name, t in sent.items() if name in trained}
    return {name: gradient for name, gradient in moved.items() if gradient.abs().max() > 0}


def _class_means(believed: ClientModule, message: Message, victim: Victim) -> tuple[Tensor, Tensor] | None:
    """Class means of embeddings, where they were sent."""
    held = victim.y.unique()
    for value in message.artifacts.values():
        if isinstance(value, ClassMeans) and value.mean.shape[1:] == (believed.method.model.embedding_size,):
            classes = held[value.valid[held]]
            if len(classes):
                return value.mean[classes].detach(), classes
    return None


def _blurred(gradients: dict[str, Tensor], noise: float, seed: int) -> dict[str, Tensor]:
    """The same under Gaussian noise of so many times their root mean square."""
    everything = torch.cat([gradient.flatten() for gradient in gradients.values()] or [torch.zeros(1)])
    deviation = noise * float(everything.square().mean().sqrt())
    stream = torch_generator(seed, "audit/noise")
    return {name: g + deviation * torch.randn(g.shape, generator=stream).to(g) for name, g in gradients.items()}
