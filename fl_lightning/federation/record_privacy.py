"""Record-level privacy of a federation: what allows it, the private fits, and what all of them have spent."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import ModelSummary, ProgressBar, Timer
from torch import Tensor, nn

from fl_lightning.core.client import ClientModule
from fl_lightning.core.descent import Machine
from fl_lightning.core.devices import Part
from fl_lightning.core.freezing import only, training
from fl_lightning.core.method import Method
from fl_lightning.core.planning import Planned
from fl_lightning.core.private_steps import KEY, PrivateDescent, PrivateFit, PrivateStep, RecordPrivacy, opacus
from fl_lightning.core.step import Bench
from fl_lightning.core.term import Term
from fl_lightning.errors import ConfigError, require
from fl_lightning.federation.accounting import Mechanism, epsilon
from fl_lightning.federation.reports import ClientReport
from fl_lightning.federation.team import num_devices
from fl_lightning.seeding import derive_seed, isolated_streams

if TYPE_CHECKING:
    from fl_lightning.data.store import ClientData, TensorStore

PROBED = 3
"""Random samples on which per-sample gradients are compared with those of the samples alone."""


class PrivateFits:
    """Makes the private fits of a federation.

    Args:
        settings: clipping and noise.
        modules: the resident clients.
        flags: of Lightning's Trainer.
        store: the data, on the training device.
        batch_size: samples in a mini-batch, in the mean.
        seed: the run's.

    Raises:
        ConfigError: saying in one line why there can be no such privacy.
    """

    def __init__(
        self,
        settings: RecordPrivacy,
        modules: Sequence[ClientModule],
        flags: Mapping[str, Any],
        store: TensorStore,
        batch_size: int,
        seed: int,
    ) -> None:
        self.settings = settings
        self.batch_size = batch_size
        self.seed = seed
        opacus()
        warnings.filterwarnings("ignore", message="Full backward hook is firing")  # of a first layer: Opacus knows
        _check_flags(flags)
        for module in modules:
            tuned = f"must be null under {KEY}: it trains on samples without noise"
            require(module.fine_tune is None, "federation.evaluate.fine_tune", tuned)
            _check_method(module.method)
            _check_plan(module)
            _check_layers(module)
            with isolated_streams(seed, "record/probe"):
                _check_gradients(module, settings, store)

    def of(self, module: ClientModule, data: ClientData, round: int) -> PrivateFit:
        """One client's fit of one round."""
        seed = derive_seed(self.seed, "record/noise", round, data.client)
        generator = torch.Generator(module.device).manual_seed(seed)
        expected = min(self.batch_size, data.num_train)
        return PrivateFit(self.settings, expected, generator, _losses_of_weights(module.method))


class RecordAccount:
    """What every client's fits have spent so far.

    Args:
        settings: noise and δ.
        num_train: [N] each client's training samples.
        batch_size: samples in a mini-batch, in the mean.
    """

    def __init__(self, settings: RecordPrivacy, num_train: Iterable[int], batch_size: int) -> None:
        self.settings = settings
        self.rates = [min(1.0, batch_size / max(int(own), 1)) for own in num_train]
        self.steps = [0] * len(self.rates)

    def enter(self, reports: Iterable[ClientReport]) -> None:
        """Add the steps of a round's fits."""
        for report in reports:
            self.steps[report.client] += report.num_steps

    def of(self, client: int) -> float:
        """ε of a client's samples, at the settings' δ."""
        mechanism = Mechanism(self.settings.noise_multiplier, self.rates[client], self.steps[client])
        return epsilon(mechanism, self.settings.delta)

    def worst(self) -> int:
        """The client whose ε is the largest; the first of them."""
        latest = {own: client for client, own in reversed(list(enumerate(zip(self.rates, self.steps, strict=True))))}
        return max(sorted(latest.values()), key=self.of)

    def summary(self) -> dict[str, Any]:
        """What `summary.json` says of it."""
        worst, own = self.worst(), self.settings
        spent = self.of(worst)
        return {
            "epsilon": spent if spent != float("inf") else None,
            "delta": own.delta,
            "neighbours": "one training sample more or less of one client",
            "noise_multiplier": own.noise_multiplier,
            "max_grad_norm": own.max_grad_norm,
            "client": worst,
            "sampling_rate": self.rates[worst],
            "steps": self.steps[worst],
            "accountant": "rdp",
            "noise": "drawn from the run's seed: for experiments",
        }


_WATCHES = (ModelSummary, ProgressBar, Timer)
"""Lightning's callbacks that change nothing, or by the clock alone."""

# --- what allows it ---------------------------------------------------------------------------------------------------


def _check_flags(flags: Mapping[str, Any]) -> None:
    clip, many = flags.get("gradient_clip_val"), flags.get("accumulate_grad_batches") or 1
    require(clip is None, "trainer.gradient_clip_val", f"must be null under {KEY}, which clips each sample's", clip)
    require(many == 1, "trainer.accumulate_grad_batches", f"must be 1 under {KEY}: each mini-batch is noised", many)
    again = flags.get("overfit_batches") or 0
    require(not again, "trainer.overfit_batches", f"must be 0 under {KEY}, which draws each mini-batch anew", again)
    require(num_devices(flags) == 1, "trainer.devices", f"must be 1 under {KEY}", flags.get("devices"))
    precision = str(flags.get("precision") or "32-true")
    wide = precision in ("32", "64", "32-true", "64-true")
    require(wide, "trainer.precision", f"must be 32-true or 64-true under {KEY}: norms are to be exact", precision)
    for callback in flags.get("callbacks") or ():
        what = "sees samples or losses, which may decide how long a fit trains"
        rule = f"must name none under {KEY} but those that only watch: {type(callback).__name__} {what}"
        require(isinstance(callback, _WATCHES), "trainer.callbacks", rule)


def _check_method(method: Method) -> None:
    name = type(method).__name__
    own = "allows no DP-SGD: its training_step may mix samples; take WrappedModel"
    require(not method.model.own.has_loss, KEY, f"{type(method.model).__name__} {own}")
    for term in method.terms:
        if term.weight > 0:
            why = _refused(term)
            require(not why, KEY, f"{name} with {type(term).__name__} allows no DP-SGD: the term {why}")
    for hook in ("receive", "local_step", "send"):
        own = getattr(type(method), hook)
        safe = own is getattr(Method, hook) or hasattr(own, "record_safe")
        why = "makes steps of its own" if hook == "local_step" else "may read training samples outside private steps"
        require(safe, KEY, f"{name} allows no DP-SGD: its {hook} {why}")
    if any(way.adapts for way in method.predictors().values()):
        raise ConfigError(KEY, f"{name} allows no DP-SGD: before it predicts it adapts to samples without noise")
    unknown = sorted(method.losses().keys() - _losses_of_weights(method))
    require(not unknown, KEY, f"{name} allows no DP-SGD: its loss {', '.join(unknown)} is no mean over samples")


def _refused(term: Term) -> str:
    """Why a term allows no private steps; empty if it does."""
    kind = type(term)
    if kind.send is not Term.send or kind.observe is not Term.observe:
        return "sends what it computes of training samples without noise"
    return "" if term.sees != "batch" else "is no mean over samples"


def _losses_of_weights(method: Method) -> frozenset[str]:
    terms = {term.name for term in method.terms if term.sees == "weights"}
    return frozenset(terms | getattr(type(method).local_step, "record_safe", frozenset()))


def _check_plan(module: ClientModule) -> None:
    for planned in module.plan():
        several = f"{type(module.method).__name__} allows no DP-SGD: several optimizers share a step's samples"
        require(len(planned.parts) == 1, KEY, several)


def _check_layers(module: ClientModule) -> None:
    with training(module):
        wrong = opacus().ModuleValidator.validate(module.method)
    if wrong:
        said = " ".join(str(wrong[0]).split()).split(". ")[0].split(" because")[0]
        raise ConfigError(
            KEY, f"{type(module.method.model).__name__} allows no DP-SGD: {said[:160]}; choose another model"
        )


# --- what is measured -------------------------------------------------------------------------------------------------


class _Caught(Exception):
    """The loss of samples, in the place of a step."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class _Catching(PrivateDescent):
    """Hands the loss out in place of a step."""

    def descend_privately(self, samples: Tensor, weights: Tensor, factor: float) -> None:
        """Raise the loss of samples."""
        raise _Caught(samples)


def _check_gradients(module: ClientModule, settings: RecordPrivacy, store: TensorStore) -> None:
    """Each sample's gradient in a mini-batch must be that of the sample alone: on random samples, before any training.

    That finds losses and layers that look across a mini-batch, and weights that are used outside their layer's call.
    """
    method = module.method
    x, y = _random_samples(module, store)
    private = PrivateFit(settings, PROBED, torch.Generator(module.device), _losses_of_weights(method))
    method.receive(module.initial_message(), module.bound(_Nothing()))
    dropouts = [part for part in method.modules() if isinstance(part, nn.modules.dropout._DropoutNd)]
    for planned in module.plan():
        with training(module), only(method, planned.parameters):
            for part in dropouts:
                part.eval()
            where = _compare(module, planned, private, x, y)
            private.leave()
        if where is not None:
            rule = f"a sample's gradient of {where} is another one alone than in a mini-batch"
            who = f"{type(method).__name__} on {type(method.model).__name__}"
            raise ConfigError(KEY, f"{who} allows no DP-SGD: {rule}")


def _compare(module: ClientModule, planned: Planned, private: PrivateFit, x: Tensor, y: Tensor) -> str | None:
    """The first parameter whose gradients differ, None if there is none."""
    method = module.method
    machine, descent = Machine(module.device.type), partial(_Catching, private)
    assert module.settings is not None
    catching = descent(machine, {}, module.settings)
    bench = Bench.of(method, machine, [], planned.phase, method.term_weights(), catching)
    buffers = dict(method.named_buffers())
    travelling = {name: buffers[name].clone() for name in module.division.shared if name in buffers}
    try:
        private.enter(method)
        _loss(bench, x, y).backward()
        found = [getattr(parameter, "grad_sample", None) for parameter in planned.parameters]
    except (RuntimeError, ValueError, NotImplementedError, AttributeError) as error:
        said = " ".join(str(error).split())[:120]
        raise ConfigError(KEY, f"{type(method.model).__name__} allows no DP-SGD: Opacus says {said}") from error
    finally:
        private.leave()
        method.zero_grad()
    buffers = dict(method.named_buffers())  # once more: a pass may have put others in their place
    for name, before in travelling.items():
        who = f"{type(method.model).__name__} allows no DP-SGD"
        rule = f"a pass over samples changes {name}, which travels without noise; choose another model"
        require(torch.equal(buffers[name], before), KEY, f"{who}: {rule}")
    names = {id(parameter): name for name, parameter in method.named_parameters()}
    for index in range(PROBED):
        loss = _loss(bench, x[index : index + 1], y[index : index + 1])
        alone = torch.autograd.grad(loss, planned.parameters, allow_unused=True)
        for parameter, own, each in zip(planned.parameters, alone, found, strict=True):
            expected = torch.zeros_like(parameter) if own is None else own
            if each is None or not torch.allclose(each[index], expected, 1e-3, 1e-5 + 1e-4 * float(expected.norm())):
                return names[id(parameter)]
    return None


def _loss(bench: Bench, x: Tensor, y: Tensor) -> Tensor:
    try:
        bench.method.local_step(PrivateStep(bench, Part.whole(x, y)))
    except _Caught as caught:
        return caught.loss
    raise TypeError(f"{type(bench.method).__name__}.local_step does not descend")


class _Nothing:
    """A client without samples."""

    client, num_train, batch_size = -1, 0, 1
    class_counts = held_classes = torch.zeros(0)


def _random_samples(module: ClientModule, store: TensorStore) -> tuple[Tensor, Tensor]:
    like, _ = store.gather(torch.zeros(PROBED, dtype=torch.int64))  # for its shape alone
    y = torch.arange(PROBED, device=like.device) % module.method.model.num_classes
    if like.is_floating_point():
        return torch.randn_like(like), y
    tables = [part.num_embeddings for part in module.method.modules() if isinstance(part, nn.Embedding)]
    return torch.randint(min(tables, default=1), like.shape, device=like.device), y
