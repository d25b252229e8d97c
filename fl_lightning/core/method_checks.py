"""What a method may not be: a client refuses it in one line, when it is made or after its first fit."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from fl_lightning.core.division import division_of, matches
from fl_lightning.core.meter import LossMeter
from fl_lightning.core.method import Method
from fl_lightning.core.naming import check_names
from fl_lightning.core.term import counts
from fl_lightning.errors import own_code, require, suggest


def check_method(method: Method) -> None:
    """Refuse what cannot learn, or not be tested, before anything is trained.

    Raises:
        ConfigError: naming the method, and what of it.
    """
    check_names(method)
    _check_losses(method)
    _check_phases(method)
    _check_extra_terms(method)
    _check_own_steps(method)
    _check_statistics(method)


def checked_weights(method: Method) -> dict[str, float]:
    """The factors of a method's losses in the present round, as numbers where they do not learn.

    Raises:
        ConfigError: for one below 0, which would count as 0, or one that is no number.
    """
    weights = method.term_weights()
    who = type(method).__name__
    for name, weight in weights.items():
        require(isinstance(weight, (Real, Tensor)), "method", f"{who} weighs its loss {name!r} by no number", weight)
        rule = f"{who} weighs its loss {name!r} by less than 0: negate the loss itself"
        require(weight >= 0, "method", rule, weight.item() if isinstance(weight, Tensor) else float(weight))
    return {name: own if learns(own) else float(own) for name, own in weights.items()}


def learns(weight: float | Tensor) -> bool:
    """Whether a loss is weighed by what has a gradient."""
    return isinstance(weight, Tensor) and weight.requires_grad


def check_fit(method: Method, meter: LossMeter, skips: bool = False) -> None:
    """Refuse a fit in which mini-batches passed and nothing stepped, or entries came or went.

    Args:
        method: the client's, after its fit.
        meter: what its steps took down.
        skips: whether a gradient scaler may have passed over every step.

    Raises:
        ConfigError: naming the method, or the parameter or buffer that has come or gone.
    """
    division_of(method).check_whole()
    fit, who, own = method.fit, type(method).__name__, method.model.own
    idle = fit.num_batches > 0 and fit.num_steps == 0 and not own.steps_itself
    if idle and meter.num_steps == 0:
        require(own.has_loss, "method", f"{who}.local_step() trains nothing: no step.descend() in a whole fit")
    elif idle and fit.descends and not skips:
        names = ", ".join(sorted(meter.names - {"loss"}))
        rule = f"{who} trains nothing: in a whole fit its losses ({names}) reach no parameter that learns"
        require(False, "method", f"{rule}, weigh nothing, or are descended on for no part of its phases")
    if method.terms.extra and meter.num_steps:
        _check_computed(method, meter)


def _check_computed(method: Method, meter: LossMeter) -> None:
    """Refuse terms that the configuration adds and no step of a fit has computed.

    Of the first phase: one that is cut short may not come to the others.
    """
    weights, first = method.term_weights(), next(phase for phase in method.phases() if phase.epochs != 0)
    for term in method.terms.extra:
        waits = counts(term, first, weights[term.name])
        rule = f"{type(method).__name__}.local_step() does not compute {type(term).__name__}"
        known = not waits or term.name in meter.names
        require(known, "method.extra_terms", f"{rule}: descend on step.values(out), which has it")


def _check_losses(method: Method) -> None:
    """Refuse losses without weights."""
    who = type(method).__name__
    with own_code("method", method, "losses()"):
        said = method.losses()
    rule = f"{who}.losses() must give each loss of local_step its weight, as in {{'pull': 0.5}}"
    require(isinstance(said, Mapping), "method", rule, said)
    terms = {term.name for term in method.terms if term is not method.terms.cross_entropy}
    taken = next((name for name in said if name == "loss" or name in terms), None)
    whose = "the sum of all losses" if taken == "loss" else "one of its terms"
    require(taken is None, "method", f"{who}.losses() names {taken!r}, which is {whose}: give it another name")
    checked_weights(method)


def _check_phases(method: Method) -> None:
    """Refuse phases of which none has anything to train: a body without parameters, a model that is frozen."""
    terms = {term.name for term in method.terms}
    for phase in method.phases():
        where = f"{type(method).__name__}'s phase {phase.name!r}"
        whole = phase.epochs is None or (isinstance(phase.epochs, int) and phase.epochs >= 0)
        require(whole, "method", f"{where} must have a whole number of epochs, 0 or more", phase.epochs)
        require(phase.lr is None or phase.lr > 0, "method", f"{where} must have a learning rate above 0", phase.lr)
        unknown = next((name for name in phase.terms or () if name not in terms), None)
        rule = f"{where} (terms) names {unknown!r}, which is none of its terms; {suggest(str(unknown), terms)}"
        require(unknown is None, "method", rule)
    phases = [phase for phase in method.phases() if phase.epochs != 0]
    names = tuple(name for phase in phases for own in phase.by_part.values() for name in own)
    learns = any(p.requires_grad and matches(name, names) for name, p in method.named_parameters())
    named = " and ".join(dict.fromkeys(name or "everything" for name in names))
    rule = f"{type(method).__name__} trains {named}, where no parameter learns: unfreeze it, or take another model"
    require(learns or not names, "method", rule)


def _check_own_steps(method: Method) -> None:
    """Refuse parts and losses that a model cannot heed which trains, or even steps, by itself."""
    rule = f"{type(method).__name__} puts a head or body of its own in the model's place, which no training_step uses"
    require(method.model.trains_its_parts, "model", rule)
    if not method.model.own.steps_itself:
        return
    losses = [term.name for term in method.terms if term.weight and term.sees != "weights"][1:]
    name = next(iter([*losses, *method.losses()]), None)
    rule = f"{type(method).__name__}'s loss {name} needs automatic optimization, but the module steps by itself"
    require(name is None, "model", rule)


def _check_extra_terms(method: Method) -> None:
    """Refuse a term that the configuration adds where it would train nothing."""
    phases = [phase for phase in method.phases() if phase.epochs != 0]
    for term in method.terms.extra:
        trains = not term.weight or any(counts(term, phase, term.weight) for phase in phases)
        reached = " and ".join(term.reaches) or "its own parameters"
        rule = f"{type(term).__name__} trains {reached}, which no phase of {type(method).__name__} does: leave it out"
        require(trains, "method.extra_terms", rule)


def _check_statistics(method: Method) -> None:
    """Refuse batch norm that predicts a sample by those that happen to be tested with it."""
    for name, layer in method.named_modules():
        rule = f"{name} ({type(layer).__name__}) has no running statistics, and predicts each sample by the others of a"
        rule += " batch; let it keep some (track_running_stats=True) or take GroupNorm"
        require(not isinstance(layer, _BatchNorm) or layer.running_mean is not None, "model", rule)
