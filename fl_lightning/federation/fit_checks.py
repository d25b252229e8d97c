"""What is refused of models, optimizers and fits before the first of them."""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.core.client import ClientModule
from fl_lightning.core.facts import Phase
from fl_lightning.core.finetuning import NAME
from fl_lightning.core.freezing import training
from fl_lightning.core.message import version_of
from fl_lightning.core.method import Method, Seen
from fl_lightning.core.nobody import AsksWho, TimelessFacts, as_nobody
from fl_lightning.core.planning import plan_of
from fl_lightning.core.workload import Workload
from fl_lightning.errors import ConfigError, own_code, require
from fl_lightning.federation.flags import limits
from fl_lightning.federation.settings import Federation
from fl_lightning.federation.trainers import most_batches, tries_out
from fl_lightning.federation.workloads import Draw, cuts_epochs, workload_of
from fl_lightning.models.own_training import trained_by
from fl_lightning.models.split import SplitModel
from fl_lightning.report.columns import SPREADS
from fl_lightning.seeding import isolated_streams

if TYPE_CHECKING:
    import lightning as L

    from fl_lightning.data.module import FederatedData

_OF_OTHERS = re.compile(rf"_received|(?:{'|'.join(SPREADS)})$|^{NAME}$")
"""What of a way's name would be read as what a column is of."""


def check_interfaces(modules: Sequence[ClientModule], architecture: np.ndarray) -> None:
    """Clients may have different models, but what they exchange must have the same shapes."""
    first = modules[0].method.interface()
    for index, module in enumerate(modules[1:], start=1):
        own = module.method.interface()
        for name in [*first, *own]:
            if first.get(name) != own.get(name):
                shapes = ["absent" if name not in found else str(found[name]) for found in (first, own)]
                clients = int((architecture == 0).argmax()), int((architecture == index).argmax())
                where = f"{shapes[0]} at client {clients[0]} and {shapes[1]} at client {clients[1]}"
                who = f"{type(module.method).__name__} exchanges {name!r}"
                raise ConfigError("model", f"{who}, which must have one shape everywhere, but is {where}")


def check_ways(modules: Sequence[ClientModule]) -> None:
    """Refuse ways to predict whose columns would bear the names of others.

    ``Local-T/vote_weighted`` is the mean of `vote`'s figures weighed by samples, ``Local-T/fine_tuned`` fine-tuning's.
    """
    for module in modules:
        for name in module.method.predictors():
            who = f"{type(module.method).__name__}'s predictor {name!r}"
            plain = isinstance(name, str) and re.fullmatch(r"[\w.-]*", name) is not None
            require(plain, "method", f"{who} must be named by letters, digits and _ . - alone, as its columns are")
            taken = _OF_OTHERS.search(name)
            rule = f"{who} must have another name: {taken and taken[0]!r} in a column's says something else"
            require(taken is None, "method", rule)


def check_workload(settings: Federation, flags: Mapping[str, Any]) -> None:
    """Fits are cut short by one key alone."""
    cut = limits(flags) - {"max_time"}
    if cut and cuts_epochs(settings.local_epochs, settings.local_steps):
        key = f"federation.local_{'epochs' if settings.local_steps is None else 'steps'}"
        raise ConfigError(key, f"trainer.{min(cut)} counts the mini-batches of a fit, too; leave one out")


def check_whole_epochs(modules: Sequence[ClientModule], settings: Federation) -> None:
    """Refuse to cut the last epoch of a fit where a term averages over all of it."""
    if cuts_epochs(settings.local_epochs, settings.local_steps):
        key = f"federation.local_{'epochs' if settings.local_steps is None else 'steps'}"
        for term in (term for module in modules for term in module.method.terms if term.needs_whole_epochs):
            rule = f"{type(term).__name__} averages over a fit's last epoch, which must be whole; use whole epochs"
            raise ConfigError(key, rule)


def check_inputs(modules: Sequence[ClientModule], x: Tensor) -> None:
    """Predict one of the data set's samples by every model, so that one that cannot take them is refused at once.

    So is one whose embedding or logits have other sizes than it says, with which classes would be missing, one that
    changes what it is given, and one that a prediction changes: testing it would train it.

    Args:
        modules: a client of each architecture.
        x: [1, …] a sample, as the models get it.
    """
    for index, module in enumerate(modules):
        key = "model" if len(modules) == 1 else f"model.{index}"
        before, given = _states(module.method.model), version_of(x)
        with isolated_streams(0, "inputs"), torch.no_grad(), training(module.method, False):
            try:
                made = {name: way.scores(Seen(x)) for name, way in module.predictors.items()}
            except Exception:  # whatever the method raises; whether it is the model's doing is seen by itself
                _try_model(module.method.model, x, key)
                with own_code("method", module.method, "predictors()"):
                    raise
            _try_model(module.method.model, x, key)
            for name, scores in made.items():
                _check_scores(module.method, name, scores, len(x))
        what = "changes its inputs in place, which others read after it; begin with a copy"
        require(version_of(x) == given, key, f"{type(module.method.model).__name__} {what}")
        after = _tensors(module.method.model)
        moved = next((name for name, now in after.items() if name not in before or before[name].moved(now)), None)
        what = "changes in eval mode, so that every test would train it (as an embedding's max_norm does)"
        require(moved is None, key, f"{type(module.method.model).__name__}'s {moved} {what}")


class _State(NamedTuple):
    """Which tensor stands under a name, how often it has been written to, and what it held."""

    tensor: Tensor
    version: int
    values: Tensor

    def moved(self, now: Tensor) -> bool:
        """Whether another one stands there, or other values: torch 2.6 writes an InstanceNorm's back as they are."""
        if now is not self.tensor or version_of(now) == self.version:
            return now is not self.tensor
        if not now.is_floating_point():
            return not torch.equal(now, self.values)
        return not torch.allclose(now, self.values, rtol=1e-5, atol=0.0, equal_nan=True)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict((*model.named_parameters(), *model.named_buffers()))


def _states(model: nn.Module) -> dict[str, _State]:
    return {name: _State(own, version_of(own), own.detach().clone()) for name, own in _tensors(model).items()}


def _check_scores(method: Method, name: str, scores: Any, size: int) -> None:
    wanted = (size, method.model.num_classes)
    rule = (
        f"{type(method).__name__}'s predictor {name!r} must give scores of every class, {list(wanted)} of {size} sample"
    )
    made = tuple(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
    require(made == wanted, "method", rule, list(made) if isinstance(made, tuple) else made)


def _try_model(model: SplitModel, x: Tensor, key: str) -> None:
    try:
        z = model.embed(x)
        made = [tuple(z.shape), tuple(model.head(z).shape)]
    except Exception as error:  # whatever a layer says of another type or shape
        kind = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape[1:])}"
        tokens = "" if x.dtype != torch.int64 else "; whole numbers are tokens, features must be numbers with a point"
        rule = f"{type(model).__name__} fails on a sample of the data set, {kind} ({error}){tokens}"
        raise ConfigError(key, rule) from error
    said = [(len(x), model.embedding_size), (len(x), model.num_classes)]
    rule = (
        f"{type(model).__name__} must make what it says of {len(x)} sample, an embedding {said[0]} and logits {said[1]}"
    )
    require(made == said, key, rule, " and ".join(map(str, made)))


def fewest_batches(data: FederatedData, of: np.ndarray | slice = slice(None)) -> int:
    """Mini-batches of the shortest epoch of some clients, or of all."""
    fewest = int(data.num_train[of].min())
    return max(1, fewest // data.batch_size if data.drop_last else math.ceil(fewest / data.batch_size))


def check_fits(
    module: ClientModule, trainer: L.Trainer, settings: Federation, data: FederatedData, of: np.ndarray
) -> None:
    """Try the optimizers out of every round whose phases are of their own, later ones on a copy of the module.

    It is then as before the shortest fit that some clients have in the first round, which is tried out next.

    Args:
        module: theirs.
        trainer: of the fits.
        settings: say how long they are.
        data: the clients'.
        of: [N] bool; nobody stands for everybody.

    Raises:
        ConfigError: if an optimizer cannot be made, cannot step, or the trainer's `max_steps` would keep some of the
            phases from training.
    """
    mine = np.flatnonzero(of) if of.any() else np.arange(len(of))
    client = int(mine[data.num_train[mine].argmin()])
    batches, largest = fewest_batches(data, mine), int(data.num_train[mine].max()) / data.batch_size
    module.own.steps, module.own.most_steps = most_batches(trainer, batches), trainer.max_steps
    facts = module.method.facts

    def check(own: ClientModule, round: int) -> None:
        own.method.facts = replace(facts, round=round)
        lengths = settings.local_epochs, settings.local_steps
        workload = workload_of(*lengths, facts.seed, round, client, batches)
        own.workload = workload._replace(tries=tries_out(trainer))
        _check_limit(own, trainer.max_steps, settings, largest)
        check_optimizer(own, facts.device, trainer.max_steps)

    check(module, 1)
    if _goes_by_the_round(module.method):
        _check_later(module, settings.rounds, check)


def _goes_by_the_round(method: Method) -> bool:
    """Whether what a method trains may be otherwise in another round."""
    try:
        with as_nobody(method, TimelessFacts):
            method.phases()
    except AsksWho:
        return True
    return False


def _check_later(module: ClientModule, rounds: int, check: Callable[[ClientModule, int], None]) -> None:
    """Check the rounds after the first from which on a method trains otherwise than in any before.

    Args:
        module: is copied: asked for a later round, a method may freeze what it trains until then, or note the round.
        rounds: of the run.
        check: of a module in a round.

    Raises:
        ConfigError: naming what is wrong in one of them.
    """
    try:
        own = copy.deepcopy(module)
    except Exception:  # somebody's own holds what cannot be copied
        return
    facts, seen = module.method.facts, set[Any]()
    for round in range(1, rounds + 1):
        own.method.facts = replace(facts, round=round)
        try:
            outline = tuple(map(_outline, own.method.phases()))
            if outline not in seen and round > 1:
                check(own, round)
            seen.add(outline)
        except ConfigError:
            raise
        except Exception:  # a later one may need what comes in before it
            continue


def _outline(phase: Phase) -> Any:
    """What tells phases apart; of what is made anew for every round, and of rates, that it is there and above 0."""
    named: dict[Any, Any] = {own.name: getattr(phase, own.name) for own in fields(phase) if own.name != "name"}
    named["lr"] = _sign(phase.lr)
    for part, options in (named.pop("settings") or {}).items():
        whose = part if phase.parts else part == phase.name
        named["settings", whose] = {option: _sign(value) for option, value in sorted(options.items())}
    return repr({name: callable(own) or own for name, own in named.items()})


def _sign(value: Any) -> Any:
    return value > 0 if isinstance(value, (int, float)) else value


def _check_limit(module: ClientModule, max_steps: int, settings: Federation, batches: float) -> None:
    """Refuse a number of steps that would end fits before some of a method's phases, where the longest has more.

    Args:
        module: of some clients.
        max_steps: the trainer's.
        settings: say how long fits are.
        batches: of the largest client's epoch.
    """
    later, most = [planned.phase.name for planned in module.plan()][1:], math.ceil(batches)
    drawn = settings.local_epochs, settings.local_steps
    epochs, steps = (max(own.values) if isinstance(own, Draw) else own for own in drawn)
    longest = plan_of(module.method, Workload(epochs or 1, None if steps is None else int(steps), most))
    later = [] if max_steps >= longest.passes(most) * most else later
    rule = f"would end fits before later phases of {type(module.method).__name__} ({', '.join(later)}) have their steps"
    rule += "; use federation.local_steps, which counts mini-batches by the phase"
    require(max_steps == -1 or not later, "trainer.max_steps", rule, max_steps)


def check_optimizer(module: ClientModule, device: torch.device, max_steps: int | None = -1) -> None:
    """Make the optimizers once, so that a bad hyperparameter is refused before any training starts.

    Args:
        module: whose they are.
        device: that it will be trained on.
        max_steps: the trainer's.
    """
    rule = "must be left out: the module steps by itself (manual optimization)"
    require(not module.own.steps_itself or max_steps in (-1, None), "trainer.max_steps", rule, max_steps)
    must_call = module.settings is not None and not module.settings.clips_itself
    try:
        found = module.configure_optimizers()
        for optimizer in found if module.own.has_optimizer and not module.own.steps_itself else ():
            closure = inspect.signature(optimizer.step).parameters.get("closure")
            rule = f"{type(optimizer).__name__} cannot step in a fit: its step needs a closure, which a fit has none of"
            require(closure is None or closure.default is not inspect.Parameter.empty, "model.module", rule)
            if not _is_torchs(optimizer):
                _try_own_step(optimizer, must_call)
        if module.settings is not None and not module.own.has_optimizer:
            made = [(torch.zeros(2, 2, device=device), is_sparse) for is_sparse in _kinds_of_gradients(module)]
            parameters = [nn.Parameter(value) for value, _ in made]
            optimizer = module.settings.optimizer(parameters)
            for parameter, (value, is_sparse) in zip(parameters, made, strict=True):
                parameter.grad = value.to_sparse() if is_sparse else torch.zeros_like(value)
            _try_step(optimizer, must_call)
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError("optimizer", str(error)) from error


def _kinds_of_gradients(module: ClientModule) -> list[bool]:
    """Whether gradients are sparse, as of embeddings that were asked for them; both where there are both."""
    embeddings = [layer for layer in module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)]
    sparse = {id(layer.weight) for layer in embeddings if layer.sparse}
    return sorted({id(parameter) in sparse for parameter in module.parameters() if parameter.requires_grad}) or [False]


def _is_torchs(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def _try_step(optimizer: Optimizer, must_call: bool) -> None:
    """Step once as a fit does; what an optimizer refuses only then would end every fit."""
    own = not _is_torchs(optimizer)
    try:
        closure = _stepped(optimizer)
    except Exception as error:  # an assertion, a missing argument, a runtime error
        said = f"{error}" if str(error) else type(error).__name__
        needs = "; it must define step(closure=None)" if own else ""
        raise ConfigError("optimizer", f"{type(optimizer).__name__} cannot step in a fit: {said}{needs}") from error
    closure.check("optimizer", own and must_call)


def _try_own_step(optimizer: Optimizer, must_call: bool) -> None:
    """Step an optimizer of a module's own once, on gradients of zeros, and put its parameters back."""
    parameters = trained_by(optimizer)
    before = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    try:
        with isolated_streams(0, "inputs"):
            closure = _stepped(optimizer)
    except Exception:  # a fit says it, with the step at which it happens
        return
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)
                parameter.grad = None
    closure.check("model.module", must_call)


def _stepped(optimizer: Optimizer) -> _WatchedClosure:
    """Step once, without the hooks that count steps, and say what became of the closure."""
    for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
        hooks.clear()
    closure = _WatchedClosure(optimizer)
    if _is_torchs(optimizer):
        optimizer.step()
    else:
        optimizer.step(closure=closure)  # type: ignore[arg-type]
    return closure


class _WatchedClosure:
    """What an optimizer's step is given in place of a second pass, which a fit has none of.

    To call it once, first of all, as torch's optimizers do, changes nothing.

    Args:
        optimizer: that steps.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.name = type(optimizer).__name__
        self.parameters = trained_by(optimizer)
        self.versions = [parameter._version for parameter in self.parameters]
        self.calls = 0
        self.late = False

    def __call__(self) -> None:
        self.calls += 1
        for parameter, version in zip(self.parameters, self.versions, strict=True):
            self.late = self.late or parameter._version != version or parameter.grad is None

    def check(self, key: str, must_call: bool = False) -> None:
        """Refuse an optimizer whose step needs gradients that are computed anew.

        Args:
            key: whose it is.
            must_call: whether the closure is where gradients are shown to callbacks, and clipped after that.

        Raises:
            ConfigError: naming it.
        """
        rule = f"{self.name} must call its step's closure: callbacks look at gradients there, which are clipped then"
        require(self.calls > 0 or not must_call, key, rule)
        rule = (
            f"{self.name} cannot step in a fit: its step asks for gradients anew (a closure), which a fit has none of"
        )
        require(self.calls <= 1 and not self.late, key, rule)
