"""The client: a LightningModule with its method's composite loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import lightning as L
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_lightning.core.devices import SharedFit
from fl_lightning.core.message import Artifact, Message
from fl_lightning.core.mixing import MeanMixer, Mixer, forget
from fl_lightning.core.server import RuleFactory, Server
from fl_lightning.core.steps import CarefulSteps
from fl_lightning.core.term import CrossEntropy, Forward, Term, term_sum
from fl_lightning.errors import require

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fl_lightning.data.store import Bundle
    from fl_lightning.data.store import ClientData as LocalData
    from fl_lightning.models.split import SplitModel
else:
    LocalData = Any

OptimizerFactory = Callable[[Iterable[nn.Parameter]], "Optimizer"]
Scope = Literal["local", "global"]


@dataclass(frozen=True)
class Phase:
    """One stretch of a local fit, in which some of the parameters are trained and the others frozen.

    Args:
        name: how the phase is called in errors.
        trains: submodules (dotted names) whose parameters are trained; ``""`` is the whole module. The others are
            frozen: not given to the optimizer, and without a gradient.
        epochs: epochs of the phase; None takes `federation.local_epochs`, 0 leaves the phase out.
        terms: names of the terms that count in this phase; None takes all.
    """

    name: str
    trains: tuple[str, ...] = ("",)
    epochs: int | None = None
    terms: tuple[str, ...] | None = None


@dataclass(frozen=True)
class FitSettings:
    """What the experiment, not the method, decides about a local fit.

    Args:
        optimizer: makes an optimizer for some parameters; called anew for every phase of every fit.
        local_epochs: epochs of a phase that names none.
        clip_value: largest gradient norm (or value); None does not clip.
        clip_algorithm: ``norm`` or ``value``.
        accumulate: local mini-batches an optimizer step.
    """

    optimizer: OptimizerFactory
    local_epochs: int = 1
    clip_value: float | None = None
    clip_algorithm: str = "norm"
    accumulate: int = 1


class Collected(NamedTuple):
    """The client's training part seen by its model in eval mode: z [N, D], logits [N, C], y [N]."""

    z: Tensor
    logits: Tensor
    y: Tensor


class ClientModule(L.LightningModule):
    """One participant: its model, its composite loss, and what it exchanges.

    A method subclasses this and says what is shared, which phases a local fit has, which terms stand beside the
    cross-entropy and what leaves the client. One resident module serves all clients of an architecture: their private
    states are swapped in and out, so everything that a client must keep lives in parameters or persistent buffers.

    Args:
        model: body and head.
        terms: the method's terms beside the cross-entropy.
        extra_terms: terms that the configuration adds to the method.
    """

    shared: ClassVar[tuple[str, ...]] = ("model",)
    paper: ClassVar[str] = ""
    keeps_float32: ClassVar[bool] = True
    """The client's own tensors are statistics, no layers (core/precision.py)."""
    exchange: ClassVar[str] = "Star"
    """How the method's messages travel where the configuration does not say."""
    takes_newcomers: ClassVar[bool] = True
    """Whether a client may join after the first rounds, from what others have sent."""

    def __init__(
        self, model: SplitModel, terms: Sequence[Term] = (), extra_terms: Sequence[Term] | None = None
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = model
        self.terms = nn.ModuleList([CrossEntropy(), *terms, *(extra_terms or ())])
        names = [term.name for term in self.all_terms]
        for name in names:
            require(names.count(name) == 1, "method.extra_terms", "each term may occur once only", name)
        for term in self.all_terms:
            term.setup(self)
        self.settings: FitSettings | None = None
        self.lr_factor = 1.0
        self.round = 0
        """The present round, 1-based; set by the runner."""
        self.share_buffers = True
        """Whether batch norm's running statistics travel with their layers; set by the runner."""
        self._devices: SharedFit | None = None
        self._losses: dict[str, list[tuple[Tensor, int]]] = {}
        self._num_steps = 0
        self._collected: Collected | None = None
        self._plan: list[_Planned] = []

    # --- what the method says ---------------------------------------------------------------------------------------

    @property
    def all_terms(self) -> list[Term]:
        """The terms of the composite loss, cross-entropy first."""
        return [term for term in self.terms if isinstance(term, Term)]

    @property
    def exchanging_terms(self) -> list[Term]:
        """The terms that receive and send."""
        return [term for term in self.all_terms if term.exchanges]

    def is_shared(self, name: str, module: nn.Module) -> bool:
        """Whether an entry of the state dict is exchanged.

        Args:
            name: the entry's name, e.g. ``model.body.stages.0.weight``.
            module: the module that owns it, for methods that share by layer type.
        """
        of_terms = (
            f"terms.{index}.{part}"
            for index, term in enumerate(self.all_terms)
            if term.exchanges
            for part in term.shared
        )
        return _matches(name, (*self.shared, *of_terms))

    def is_private(self, name: str, module: nn.Module) -> bool:
        """Whether an entry is kept between rounds. Default: what is not overwritten by the next receive."""
        return not self.is_shared(name, module)

    def phases(self) -> list[Phase]:
        """The phases of a local fit. Default: one, all parameters."""
        return [Phase("all")]

    def term_weights(self) -> dict[str, float]:
        """Each term's factor in the present round's loss, by its name, the cross-entropy's among them."""
        return {term.name: term.weight_at(self.round) for term in self.all_terms}

    def receive(self, message: Message, data: LocalData) -> None:
        """Take what came in; the client's own last private state is already loaded."""
        self.load_weights(message.weights)
        for term in self.exchanging_terms:
            term.receive(self, message)

    def send(self, data: LocalData) -> Message:
        """What goes out after the fit: the shared weights, and each term's artifacts from the client's own data."""
        artifacts: dict[str, Artifact] = {}
        with self._collecting():
            for term in self.exchanging_terms:
                artifacts.update(term.send(self, data))
        return Message(self.shared_weights(), artifacts, data.num_train)

    def adapt(self, data: LocalData) -> None:
        """Personalise before an evaluation; runs on a throw-away copy of the state. Default: nothing."""

    def predict(self, x: Tensor) -> Tensor:
        """Class scores [B, C] of inputs [B, …]: what evaluation uses."""
        return self.model(x)

    def predictions(self, x: Tensor) -> dict[str, Tensor]:
        """All the ways in which the method predicts, by name, each [B, C]. Default: the one, without a name."""
        return {"": self.predict(x)}

    def headline(self, scope: Scope) -> str:
        """Which of `predictions` is the method's accuracy on the own (local) or on all test splits (global)."""
        return next(iter(self.prediction_names))

    @property
    def prediction_names(self) -> tuple[str, ...]:
        """The keys of `predictions`."""
        return ("",)

    @property
    def loss_names(self) -> tuple[str, ...]:
        """Names of the losses that `log_losses` is given: the sum, and each term that counts."""
        return ("loss", *(term.name for term in self.all_terms if term.weight > 0))

    @property
    def has_global_model(self) -> bool:
        """Whether the exchanged weights are a complete model, so that there is a Server-T."""
        names = [name for name in self.entries if name.startswith("model.")]
        return bool(names) and set(names) <= set(self.shared_names)

    @property
    def received_is_global(self) -> bool:
        """Whether a client that has just received predicts as the global model does."""
        own = type(self)
        plain = ("receive", "adapt", "predict", "predictions")
        return self.has_global_model and all(getattr(own, name) is getattr(ClientModule, name) for name in plain)

    def make_server(self, initial: Message) -> Server:
        """The method's server. Default: weighted mean of weights, artifacts by the rules of their terms."""
        return Server(initial, self.artifact_rules())

    def make_mixer(self) -> Mixer | None:
        """The method's rule without a server. Default: mean with the neighbours, artifacts by the rules of the server.

        Returns:
            None for a method whose server does more than to average, or remembers: it cannot do without.
        """
        server = self.make_server(self.initial_message())
        return MeanMixer(server.rules) if type(server) is Server and forget(server.rules) else None

    def artifact_rules(self) -> dict[str, RuleFactory]:
        """How a server merges the terms' artifacts."""
        return {name: rule for term in self.exchanging_terms for name, rule in term.rules().items()}

    def interface(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all that is exchanged; clients whose models differ must agree on them."""
        entries = self.entries
        artifacts = {n: shape for term in self.exchanging_terms for n, shape in term.interface(self).items()}
        return {**{name: tuple(entries[name].shape) for name in self.shared_names}, **artifacts}

    def parameter_counts(self) -> tuple[int, int]:
        """Trainable parameters that stay with a client, and those that travel. Default: by what is shared of the state.

        A method whose parameters travel as artifacts overrides this.
        """
        shared = set(self.shared_names)
        sizes = {name: p.numel() for name, p in self.named_parameters() if p.requires_grad}
        travels = sum(size for name, size in sizes.items() if name in shared)
        return sum(sizes.values()) - travels, travels

    # --- state ------------------------------------------------------------------------------------------------------

    @property
    def entries(self) -> dict[str, Tensor]:
        """The state dict, without copies."""
        return self.state_dict()

    def _select(self, rule: Callable[[str, nn.Module], bool]) -> tuple[str, ...]:
        owners = {}
        for prefix, module in self.named_modules():
            for name in (*module._parameters, *module._buffers):
                owners[f"{prefix}.{name}" if prefix else name] = module
        return tuple(name for name in self.state_dict() if rule(name, owners.get(name, self)))

    @property
    def shared_names(self) -> tuple[str, ...]:
        """Names of the state dict's entries that are exchanged."""
        if "_shared_names" not in self.__dict__:
            self.__dict__["_shared_names"] = self._select(self._travels)
        return self.__dict__["_shared_names"]

    @property
    def private_names(self) -> tuple[str, ...]:
        """Names of the state dict's entries that are kept between rounds."""
        if "_private_names" not in self.__dict__:
            self.__dict__["_private_names"] = self._select(self._stays)
        return self.__dict__["_private_names"]

    def _travels(self, name: str, module: nn.Module) -> bool:
        return self.is_shared(name, module) and not self._is_kept_statistic(name, module)

    def _stays(self, name: str, module: nn.Module) -> bool:
        return self.is_private(name, module) or self._is_kept_statistic(name, module)

    def _is_kept_statistic(self, name: str, module: nn.Module) -> bool:
        return not self.share_buffers and isinstance(module, _BatchNorm) and name.rpartition(".")[2] in module._buffers

    def shared_weights(self) -> dict[str, Tensor]:
        """Copies of the entries that are exchanged."""
        entries = self.entries
        return {name: entries[name].detach().clone() for name in self.shared_names}

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy entries of the state dict into the module.

        Raises:
            ValueError: naming the first entry that this module lacks or whose shape differs.
        """
        entries = self.entries
        for name, tensor in weights.items():
            own = entries.get(name)
            if own is None or own.shape != tensor.shape:
                has = "does not have it" if own is None else f"has {tuple(own.shape)}"
                raise ValueError(f"received {name!r} of shape {tuple(tensor.shape)}, but this client {has}")
            own.copy_(tensor)

    def initial_message(self) -> Message:
        """What every client receives first: the common initial weights."""
        return Message(self.shared_weights())

    # --- the local fit ----------------------------------------------------------------------------------------------

    def plan(self) -> list[_Planned]:
        """The phases with their parameters and epochs; those without either are left out."""
        assert self.settings is not None, "`settings` is set by the runner"
        planned = []
        for phase in self.phases():
            epochs = self.settings.local_epochs if phase.epochs is None else phase.epochs
            parameters = [p for name, p in self.named_parameters() if _matches(name, phase.trains) and p.requires_grad]
            if epochs > 0 and parameters:
                planned.append(_Planned(phase, epochs, parameters))
        return planned

    @property
    def fit_epochs(self) -> int:
        """Epochs of one local fit, all phases together."""
        return sum(planned.epochs for planned in self.plan())

    def configure_optimizers(self) -> list[Optimizer]:  # type: ignore[override]
        """One fresh optimizer a phase: neither momentum nor Adam's moments cross a round."""
        self._plan = self.plan()
        return [self.make_optimizer(planned.parameters) for planned in self._plan]

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """A fresh optimizer of the configuration, at the present round's learning rate."""
        assert self.settings is not None
        optimizer = self.settings.optimizer(parameters)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.lr_factor if self.lr_factor != 1 else group["lr"]
        return optimizer

    def on_train_start(self) -> None:
        """Prepare one fit: meters, optimizers, batch-norm layers."""
        self.forget_losses()
        optimizers = self.optimizers()
        self._phase_optimizers = list(optimizers) if isinstance(optimizers, list) else [optimizers]
        self._trainable = [p for p in self.parameters() if p.requires_grad]
        self._observers = [term for term in self.exchanging_terms if type(term).observe is not Term.observe]
        self._term_weights = self.term_weights()
        self._waiting = 0
        several = self.trainer.world_size > 1
        self._devices = SharedFit(self.trainer.global_rank, self.trainer.world_size) if several else None
        plugin = self.trainer.precision_plugin
        self._autocasts = isinstance(plugin, MixedPrecision)
        self._careful = plugin if isinstance(plugin, CarefulSteps) else None
        if self._careful is not None:
            self._careful.start_fit(self)

    def on_train_epoch_start(self) -> None:
        """Enter the phase that this epoch belongs to."""
        epoch, index = self.current_epoch, 0
        while epoch >= self._plan[index].epochs:
            epoch -= self._plan[index].epochs
            index += 1
        planned = self._plan[index]
        self.phase = planned.phase
        trained = {id(p) for p in planned.parameters}
        for parameter in self._trainable:
            parameter.requires_grad_(id(parameter) in trained)
        self.optimizer = self._phase_optimizers[index]
        self._active = [term for term in self.all_terms if self._counts(term, planned.phase)]
        self.last_epoch = self.current_epoch == sum(p.epochs for p in self._plan) - 1

    def _counts(self, term: Term, phase: Phase) -> bool:
        """Whether a term has a weight and, in this phase, something to train."""
        own = any(p.requires_grad for p in term.parameters())
        reached = any(_overlap(part, trained) for part in term.reaches for trained in phase.trains)
        wanted = phase.terms is None or term.name in phase.terms
        return self._term_weights[term.name] > 0 and wanted and (reached or own)

    def on_train_epoch_end(self) -> None:
        """Hand the mean losses to the trainer, for callbacks that watch `callback_metrics`; it takes milliseconds."""
        if not self.trainer.callbacks:  # type: ignore[attr-defined]
            return
        self.log_dict({name if name == "loss" else f"loss/{name}": v for name, v in self.mean_losses().items()})

    def on_train_end(self) -> None:
        """Thaw what the last phase froze."""
        if self._devices is not None:
            self._devices.agree(self)
        if self._careful is not None:
            self._careful.end_fit(self)
        for parameter in self._trainable:
            parameter.requires_grad_(True)
            parameter.grad = None
        for term in self.exchanging_terms:
            term.after_fit(self)

    def transfer_batch_to_device(self, batch: Bundle, device: torch.device, dataloader_idx: int) -> Bundle:
        """Bundles are gathered on the training device already."""
        return batch

    def training_step(self, batch: Bundle, batch_idx: int) -> None:
        """Several consecutive local steps: one mini-batch, one optimizer step each."""
        steps = list(batch.steps())
        assert self.settings is not None
        for index, (x, y) in enumerate(steps):
            self._waiting += 1
            last = index == len(steps) - 1 and self.trainer.is_last_batch
            self._steps_now = last or self._waiting >= self.settings.accumulate
            self.local_step(*((x, y) if self._devices is None else self._devices.part(x, y)))
            if self._steps_now:
                self._waiting = 0
                if self._careful is not None:
                    self._careful.end_batch()

    def local_step(self, x: Tensor, y: Tensor) -> None:
        """One mini-batch: forward, composite loss, backward, step."""
        with self._single_sample(len(y)):
            out = self.forward_pass(x, y)
        self.optimize(self.composite_loss(out), self.optimizer)
        self.observe(out)

    def observe(self, out: Forward) -> None:
        """Show a forward pass to the terms that average artifacts while training runs; call it after the step."""
        for term in self._observers if self._devices is None or self._devices.counts else ():
            term.observe(self, out)

    def forward_pass(self, x: Tensor, y: Tensor) -> Forward:
        """The forward pass that all terms share."""
        features, z = self.model.forward_features(x)
        return Forward(x, y, features, z, self.model.head(z))

    def composite_loss(self, out: Forward) -> Tensor:
        """Σ weight · term over the phase's terms; each value is logged by its term's name."""
        values = self.term_values(out, self._active)
        total = term_sum(values, self._term_weights)
        self.log_losses({"loss": total, **values}, len(out.y))
        return total

    def term_values(self, out: Forward, terms: Iterable[Term]) -> dict[str, Tensor]:
        """Each term's unweighted value, by its name."""
        return {term.name: term(self, out) for term in terms}

    def log_losses(self, values: Mapping[str, Tensor], batch_size: int) -> None:
        """Remember a step's losses; means over samples are read once, after the fit."""
        counted = batch_size if self._devices is None or self._devices.counts else 0
        for name, value in values.items():
            self._losses.setdefault(name, []).append((value.detach(), counted))
        self._num_steps += 1

    def forget_losses(self) -> None:
        """Start a fit's losses anew."""
        self._losses, self._num_steps = {}, 0

    def mean_losses(self) -> dict[str, float]:
        """Mean over the samples of the last fit, by name."""
        means = {}
        for name, pairs in self._losses.items():
            values = torch.stack([value for value, _ in pairs]).cpu().double()
            sizes = torch.tensor([size for _, size in pairs], dtype=torch.float64)
            sums = torch.stack([(values * sizes).sum(), sizes.sum()])
            sums = sums if self._devices is None else self._devices.total(sums)
            means[name] = float(sums[0] / sums[1])
        return means

    @property
    def num_steps(self) -> int:
        """Local mini-batches of the last fit."""
        return self._num_steps

    def optimize(self, loss: Tensor, *optimizers: Any, only: bool = False) -> None:
        """Backward and step, with the trainer's precision, clipping and accumulation.

        Args:
            loss: what is minimised.
            optimizers: those that step.
            only: give a gradient to the parameters of these optimizers alone, where the loss reaches others, too.
        """
        assert self.settings is not None
        share = (1.0 if self._devices is None else self._devices.factor) / self.settings.accumulate
        own = {"inputs": _parameters(optimizers)} if only else {}
        # The trainer's autocast is for forward passes: in here it would narrow what a loss computes in float32.
        with torch.autocast(self.device.type, enabled=False) if self._autocasts else nullcontext():
            self.manual_backward(loss if share == 1 else loss * share, **own)
        if self._steps_now:
            self.step(*optimizers)

    def step(self, *optimizers: Any) -> None:
        """Step on the gradients there are, with the trainer's precision and clipping, and clear them."""
        assert self.settings is not None
        if self._devices is not None:
            self._devices.average_gradients(_parameters(optimizers))
        for optimizer in optimizers:
            if self._careful is not None:
                self._careful.prepare_step(optimizer.optimizer)
            if self.settings.clip_value is not None:
                self._clip(optimizer)
            optimizer.step()
            optimizer.zero_grad()

    def _clip(self, optimizer: Any) -> None:
        assert self.settings is not None
        assert self.settings.clip_value is not None
        parameters = _parameters([optimizer])
        if self.settings.clip_algorithm == "value":
            nn.utils.clip_grad_value_(parameters, self.settings.clip_value)
        else:
            nn.utils.clip_grad_norm_(parameters, self.settings.clip_value)

    @contextmanager
    def frozen(self, part: nn.Module) -> Iterator[None]:
        """Build no graph for a part's parameters."""
        trained = [p for p in part.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
        for parameter in trained:
            parameter.requires_grad_(True)

    @contextmanager
    def only(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Build a graph for some parameters alone."""
        kept = {id(p) for p in parameters}
        others = [p for p in self.parameters() if p.requires_grad and id(p) not in kept]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)

    def gradients(self, loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
        """∇ loss with respect to some parameters, for steps of a method's own; zeros where the loss does not reach.

        Nothing is left in `.grad`. Like `optimize`, it runs outside the trainer's autocast; under float16 the loss is
        scaled on the way.
        """
        kind = self.device.type
        narrow = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
        scale = 1024.0 if narrow else 1.0
        with torch.enable_grad(), torch.autocast(kind, enabled=False):
            found = torch.autograd.grad(loss * scale if narrow else loss, parameters, allow_unused=True)
        given = [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)]
        return [g / scale for g in given] if narrow else given

    @property
    def _batch_norms(self) -> list[nn.Module]:
        if "_found_batch_norms" not in self.__dict__:
            self.__dict__["_found_batch_norms"] = [m for m in self.modules() if isinstance(m, _BatchNorm)]
        return self.__dict__["_found_batch_norms"]

    @contextmanager
    def keeping_statistics(self) -> Iterator[None]:
        """Put batch norm's running statistics back afterwards."""
        moving = [layer for layer in self._batch_norms if layer.training]
        statistics = [buffer for layer in moving for buffer in layer.buffers(recurse=False)]
        before = [buffer.clone() for buffer in statistics]
        yield
        for buffer, value in zip(statistics, before, strict=True):
            buffer.copy_(value)

    @contextmanager
    def _single_sample(self, batch_size: int) -> Iterator[None]:
        """Batch norm cannot normalise a batch of one: it uses its running statistics there."""
        layers = [m for m in self._batch_norms if m.training] if batch_size == 1 else []
        for layer in layers:
            layer.eval()
        yield
        for layer in layers:
            layer.train()

    # --- the client's own data --------------------------------------------------------------------------------------

    def own_batches(self, data: LocalData, share: float = 1.0) -> Sequence[Bundle]:
        """Mini-batches of one shuffled pass over the training part, for steps of a method's own outside the fit.

        Drawn from the global stream, which the runner seeds for every receive, fit and adaptation. The sequence may be
        gone through again: it stays the same.

        Args:
            data: the client's data.
            share: take only so much of the training part, in (0, 1], drawn at random.
        """
        seed = int(torch.randint(2**62, ()))
        single = bool(self._batch_norms)
        return data.bundles(seed, data.batch_size, drop_single=single, share=share)

    def collect(self, data: LocalData) -> Collected:
        """The whole training part through the model in eval mode, without gradients; once for all terms of a send."""
        if self._collected is None:
            was_training = self.training
            self.eval()
            with torch.no_grad():
                rows = [(self.model.embed(x), y) for x, y in data.batches("train")]
                z = torch.cat([z for z, _ in rows])
                collected = Collected(z, self.model.head(z), torch.cat([y for _, y in rows]))
            self.train(was_training)
            if not self._keep_collected:
                return collected
            self._collected = collected
        return self._collected

    _keep_collected = False

    @contextmanager
    def _collecting(self) -> Iterator[None]:
        """Keep what `collect` gives until the outermost such block ends."""
        outermost, self._keep_collected = not self._keep_collected, True
        try:
            yield
        finally:
            if outermost:
                self._keep_collected, self._collected = False, None


class _Planned(NamedTuple):
    phase: Phase
    epochs: int
    parameters: list[nn.Parameter]


def _parameters(optimizers: Sequence[Any]) -> list[Tensor]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def _overlap(one: str, other: str) -> bool:
    """Whether one dotted name is the other or lies inside it."""
    return _matches(one, (other,)) or _matches(other, (one,))


def _matches(name: str, prefixes: Sequence[str]) -> bool:
    return any(prefix == "" or name == prefix or name.startswith(prefix + ".") for prefix in prefixes)
