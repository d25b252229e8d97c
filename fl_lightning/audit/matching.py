"""Gradient matching: images whose local step would have sent what was really sent.

Zhu, Liu, Han, "Deep Leakage from Gradients", NeurIPS 2019 (squared distance, L-BFGS); Geiping, Bauermeister, Dröge,
Moeller, "Inverting Gradients - How easy is it to break privacy in federated learning?", NeurIPS 2020 (cosine, total
variation, Adam on signs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fl_lightning.core.client import ClientModule
from fl_lightning.core.devices import Part
from fl_lightning.core.facts import Fit
from fl_lightning.core.handover import begin_fit
from fl_lightning.core.step import Bench, Step
from fl_lightning.errors import ConfigError

Objective = Literal["cosine", "dlg"]


@dataclass(frozen=True)
class Attack:
    """How images are sought.

    Args:
        steps: of the search.
        objective: ``cosine`` (Geiping et al.) or ``dlg`` (Zhu et al.).
        lr: of the search; null takes 0.1 for ``cosine`` and 1 for ``dlg``.
        variation: factor of the images' total variation.
    """

    steps: int = 200
    objective: Objective = "cosine"
    lr: float | None = None
    variation: float = 1e-4


@dataclass(frozen=True)
class Target:
    """What the attacker has: what was sent, and the model that it was sent from.

    Args:
        module: a client as the attacker believes it to have been before its fit.
        gradients: of named parameters, read off the message.
        means: [C, D] class means of embeddings that were sent, and which classes they are of; None if none were.
        y: [B] the images' classes, which the attacker is taken to know.
        bounds: the least and the largest value that an input can have, [1, C, 1, 1] each.
        shape: of the inputs, [B, …].
    """

    module: ClientModule
    gradients: Mapping[str, Tensor]
    means: tuple[Tensor, Tensor] | None
    y: Tensor
    bounds: tuple[Tensor, Tensor]
    shape: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """Whether nothing was sent that depends on images in a way that can be followed."""
        return not self.gradients and self.means is None


class _Watch:
    """Takes a descent's place in a step: nothing steps, and the gradients keep their graph."""

    def __init__(self, parts: Mapping[str, Sequence[Tensor]], wanted: Mapping[int, str]) -> None:
        self.parts = parts
        self.wanted = wanted
        self.found: dict[str, Tensor] = {}

    def descend(self, loss: Tensor, factor: float, parts: Sequence[str], steps_now: bool) -> None:
        """Note ∇ loss for the parameters that would step."""
        names = [name for name in parts if name in self.parts] or ([] if parts else list(self.parts))
        stepping = {id(p): p for name in names for p in self.parts[name] if id(p) in self.wanted}
        if not stepping:
            return
        gradients = torch.autograd.grad(loss, list(stepping.values()), create_graph=True, allow_unused=True)
        for key, gradient in zip(stepping, gradients, strict=True):
            if gradient is not None:
                name = self.wanted[key]
                self.found[name] = self.found[name] + gradient if name in self.found else gradient

    def follow(self, *_: Any) -> None:
        """Gradients that a method found by hand have no graph."""
        raise ConfigError("audit", "this method steps on gradients of its own, which cannot be followed back to images")


def simulated(module: ClientModule, x: Tensor, y: Tensor, wanted: Mapping[int, str]) -> dict[str, Tensor]:
    """∇ of one local step on some images, by parameter, differentiable in the images.

    Every phase's step is taken at the weights before the fit; of a step's several losses each counts for what it
    steps on.

    Args:
        module: the client.
        x: [B, …] inputs, with a gradient.
        y: [B] classes.
        wanted: id of a parameter -> its name.
    """
    found: dict[str, Tensor] = {}
    method, weights = module.method, module.method.term_weights()
    for planned in module.plan():
        watch = _Watch(planned.parts, wanted)
        bench = Bench.of(method, module._machine, module._layers, planned.phase, weights, watch)  # type: ignore[arg-type]
        Step(bench, Part.whole(x, y), is_first=True, is_last=True).take()
        for name, gradient in watch.found.items():
            found[name] = found[name] + gradient if name in found else gradient
    return found


@contextmanager
def as_in_a_fit(module: ClientModule) -> Iterator[None]:
    """A block in which the method may do local steps."""
    assert module.settings is not None
    module.train()
    module.method.fit = Fit(module.settings.optimizer, 1, 1.0, 1)
    begin_fit(module.method)
    yield


def search(target: Target, attack: Attack, seed: int, truth: Tensor, report: Callable[[int], None]) -> Found:
    """Look for the images.

    Args:
        target: what the attacker has.
        attack: how it looks.
        seed: of its first guess, and of what the simulated steps draw.
        truth: [B, …] the real images in [0, 1], to measure by; the search does not see them.
        report: told of every step that was done.
    """
    low, high = target.bounds
    gpus = [low.device] if low.device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        torch.manual_seed(seed)
        guess = low + (high - low) * torch.rand(target.shape, dtype=low.dtype).to(low.device)
        x = guess.clone().requires_grad_(True)
        optimizer, curves = _optimizer(attack, x), []
        at = [attack.steps * eighths // 8 for eighths in (3, 5, 7)]  # Geiping et al.'s schedule
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, at, gamma=0.1 if attack.objective == "cosine" else 1)
        with as_in_a_fit(target.module):
            for step in range(attack.steps):
                draws = torch.random.get_rng_state(), [torch.cuda.get_rng_state(gpu) for gpu in gpus]

                def closure(draws: tuple[Tensor, list[Tensor]] = draws) -> Tensor:
                    torch.random.set_rng_state(draws[0])  # what a step draws stays the same: so there is a minimum
                    for gpu, state in zip(gpus, draws[1], strict=True):
                        torch.cuda.set_rng_state(state, gpu)
                    optimizer.zero_grad()
                    distance = _distance(target, attack, x)
                    (gradient,) = torch.autograd.grad(distance, [x], allow_unused=True)
                    gradient = torch.zeros_like(x) if gradient is None else gradient
                    x.grad = gradient.sign() if attack.objective == "cosine" else gradient
                    return distance.detach()

                optimizer.step(closure)  # type: ignore[arg-type]
                schedule.step()
                with torch.no_grad():
                    x.copy_(torch.where(x.isfinite(), x, guess).clamp(low, high))
                curves.append(psnr(_shown(x.detach(), target), truth, target.y))
                report(step)
    images = _shown(x.detach(), target)
    return Found(images[best_order(images, truth, target.y)].cpu(), torch.stack(curves).cpu())


@dataclass(frozen=True)
class Found:
    """What a search found.

    Args:
        images: [B, …] in [0, 1], in the order of the real ones, on the CPU.
        curves: [steps, B] the peak signal-to-noise ratio after every step, in dB, on the CPU.
    """

    images: Tensor
    curves: Tensor


def _optimizer(attack: Attack, x: Tensor) -> torch.optim.Optimizer:
    if attack.objective == "dlg":
        return torch.optim.LBFGS([x], lr=1.0 if attack.lr is None else attack.lr, max_iter=20)
    return torch.optim.Adam([x], lr=0.1 if attack.lr is None else attack.lr)


def _distance(target: Target, attack: Attack, x: Tensor) -> Tensor:
    """How far the simulated step is from what was sent, and how rough the images are."""
    names = {name: p for name, p in target.module.method.named_parameters() if name in target.gradients}
    total = attack.variation * total_variation(x)
    x = x.to(next(target.module.method.parameters()).dtype)  # the search itself is in float32
    if names:
        found = simulated(target.module, x, target.y, {id(p): name for name, p in names.items()})
        pairs = [(found[name].flatten(), target.gradients[name].flatten()) for name in names if name in found]
        if pairs:
            total = total + _apart(attack, *(torch.cat(side) for side in zip(*pairs, strict=True)))
    if target.means is not None:
        rows, classes = target.means
        model = target.module.method.model
        z = model.embed(x)
        own = torch.stack([z[target.y == c].mean(0) for c in classes.tolist()])
        total = total + _apart(attack, own.flatten(), rows.flatten())
    return total


def _apart(attack: Attack, a: Tensor, b: Tensor) -> Tensor:
    if attack.objective == "dlg":
        return (a - b).square().sum() / b.square().sum().clamp(min=1e-12)
    return 1 - torch.nn.functional.cosine_similarity(a, b, dim=0)


def total_variation(x: Tensor) -> Tensor:
    """Mean absolute difference of neighbouring pixels [B, C, H, W]; 0 for what is no image."""
    if x.ndim != 4:
        return x.new_zeros(())
    return x.diff(dim=2).abs().mean() + x.diff(dim=3).abs().mean()


def _shown(x: Tensor, target: Target) -> Tensor:
    """Inputs as images in [0, 1]."""
    low, high = target.bounds
    return ((x - low) / (high - low)).clamp(0, 1)


def psnr(images: Tensor, truth: Tensor, y: Tensor) -> Tensor:
    """[B] 10 log₁₀(1 / MSE) in dB of each real image against its best match of the same class.

    Args:
        images: [B, …] in [0, 1], in any order within a class.
        truth: [B, …] the real ones.
        y: [B] classes of both.

    >>> psnr(torch.full((1, 1, 2, 2), 0.6), torch.full((1, 1, 2, 2), 0.5), torch.tensor([3])).tolist()
    [20.0]
    """
    errors = (images[best_order(images, truth, y)] - truth).flatten(1).square().mean(1)
    return (-10 * torch.log10(errors.clamp(min=1e-10))).round(decimals=4)


def best_order(images: Tensor, truth: Tensor, y: Tensor) -> Tensor:
    """[B] which of the images stands for each real one: the least squared error in all, within classes."""
    errors = (images.flatten(1)[None] - truth.flatten(1)[:, None]).square().mean(2)
    errors = errors + 1e6 * (y[:, None] != y[None]).to(errors)
    return torch.as_tensor(linear_sum_assignment(errors.cpu().numpy())[1])
