"""What a run does that its user may not have meant, and that is no mistake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from fl_lightning.core.freezing import training
from fl_lightning.core.host import Parts
from fl_lightning.federation import fairness
from fl_lightning.federation.callbacks import never_called
from fl_lightning.federation.filters import Quantize
from fl_lightning.federation.privacy import ClipAndNoise
from fl_lightning.federation.selection import Cyclic
from fl_lightning.models.split import SplitModel
from fl_lightning.seeding import isolated_streams
from fl_lightning.trust import is_known

if TYPE_CHECKING:
    from fl_lightning.federation.loop import FederatedLoop


@runtime_checkable
class Remarking(Protocol):
    """A method that has something to say of a precision."""

    def remark(self, precision: str) -> str:
        """What a user should know of the method under a precision (``bf16-true``), in one line; empty if nothing."""


def remarks(loop: FederatedLoop) -> Iterator[str]:
    """A line for each, once the loop is set up."""
    yield from _of_data(loop)
    yield from _of_evaluation(loop)
    yield from _of_privacy(loop)
    yield from _without_effect(loop)
    yield from (f"federation.callbacks: {said}" for said in never_called(loop.callbacks))
    if views := loop.runner.residents.views:
        yield f"federation.channels_last: off, for view of {views} cannot flatten such maps: reshape can, and is faster"
    method, chosen = loop.runner.modules[0].method, loop.settings.exchange
    wire, steps = loop.settings.wire or (), loop.settings.server_optimizer is not None
    rounds = [own for own in wire if isinstance(own, Quantize) and own.ways != "down" and not own.updates]
    if steps and any(not own.error_feedback for own in rounds):
        yield "federation.wire: Quantize rounds all alike, which a server optimizer adds up; say error_feedback: true"
    noisy = any(isinstance(own, ClipAndNoise) for own in wire)
    moved = [name for name in loop.runner.modules[0].division.shared if name.endswith("running_var")]
    if noisy and moved:
        yield f"federation.wire: noise may make {moved[0]} negative, whose model gives nan; say share_buffers: false"
    if method.model.own.has_loss and (method.terms.has_instead or isinstance(method.network(), Parts)):
        yield f"model: {type(method).__name__} has a loss of its own, where what training_step returns does not count"
    if isinstance(method, Remarking) and (said := method.remark(str(loop.runner.trainer.precision))):
        yield f"method: {type(method).__name__}: {said}"
    some = torch.arange(len(loop.data.store.x))[:1]
    if len(some):
        x = loop.data.store.gather(some)[0]
        yield from filter(None, (_two_networks(module.method.model, x) for module in loop.runner.modules))
    if chosen is not None and type(chosen).__name__ != method.exchange:
        own, name = method.exchange, type(method).__name__
        yield f"federation.exchange: {type(chosen).__name__}, where {name} is defined on {own}"


def _of_data(loop: FederatedLoop) -> Iterator[str]:
    largest, size, data = int(loop.num_train.max()), loop.data.batch_size, loop.data
    if size > largest and loop.num_clients > 0:
        yield f"data.batch_size: {size} is more than any client has ({largest} at most), so an epoch is one step"
    if data.split != "holdout" and data.test_fraction != type(data).test_fraction:
        said = f"has no effect under data.split {data.split}, which cuts no test samples out of clients' own"
        yield f"data.test_fraction: {data.test_fraction} {said}"
    if data.left_out:
        yield f"data: {data.left_out} of {len(data.arrays.y)} samples are left out: nobody holds them"
    if data.only_tested:
        few = ", ".join(map(repr, data.only_tested[:3])) + (", …" if len(data.only_tested) > 3 else "")
        yield f"data: the official test part has classes that the training part has no sample of: {few}"
    if not loop.num_test.any() and not len(data.server_test):
        yield "data: nobody has a test sample, so that no accuracy is measured"
    if len(data.arrays.classes) == 1:
        yield f"data.dataset: all samples are of one class ({data.arrays.classes[0]!r}), so that nothing is learned"


def _of_evaluation(loop: FederatedLoop) -> Iterator[str]:
    settings, policy, calendar = loop.settings, loop.settings.evaluate, loop.calendar
    known = loop.data, loop.board.alone, loop.identity
    if policy.reference is not None and (said := fairness.remarks_on(policy.reference, *known)):
        yield f"{fairness.KEY}: {said}"
    if not (loop.examiner.columns or loop.examiner.tests_server):
        why = "there is no global model for server" if policy.server else "so is server"
        yield f"federation.evaluate: no accuracy is measured: trained and received are off, and {why}"
    if settings.early_stopping is None:
        return
    of_clients = not loop.patience.monitor.rpartition("/")[2].startswith("Server")
    if policy.clients == "participants" and settings.participation < 1 and of_clients:
        said = "participants are other clients in every round, whose figures early stopping compares"
        yield f"federation.evaluate.clients: {said}"
    rounds, patience = sum(map(calendar.is_evaluated, range(1, settings.rounds + 1))), settings.early_stopping.patience
    if patience >= rounds:
        yield f"federation.early_stopping.patience: {patience} ends nothing: {rounds} rounds are evaluated"


def _of_privacy(loop: FederatedLoop) -> Iterator[str]:
    """A δ at which publishing one client, or one sample, whole would be private."""
    account, records = loop.account, loop.settings.record_privacy
    if account is not None and account.settings.delta * loop.num_clients >= 1:
        said = f"{account.settings.delta:g} is not below 1 / {loop.num_clients} clients, so that ε promises little"
        yield f"federation.wire: ClipAndNoise: delta: {said}"
    if records is not None and records.delta * (most := int(loop.num_train.max())) >= 1:
        said = f"{records.delta:g} is not below 1 / {most}, the samples of a client, so that ε promises little"
        yield f"federation.record_privacy.delta: {said}"


def _without_effect(loop: FederatedLoop) -> Iterator[str]:
    """What is configured and changes nothing."""
    settings, module, flags = loop.settings, loop.runner.modules[0], loop.runner.flags
    name = type(module.method).__name__
    if not module.method.interface():
        idle = [key for key in ("wire", "attack", "aggregator", "server_optimizer") if getattr(settings, key)]
        yield from (f"federation.{key}: reaches nobody: with {name} nothing travels" for key in idle)
    joining = settings.newcomers
    if joining.after and not joining.clients:
        yield f"federation.newcomers.after: {joining.after} has no effect without federation.newcomers.clients"
    everybody = settings.participation == 1 and settings.selection is None  # others are tested as they begin
    alike = everybody and not module.division.kept and not loop.exchange.between_clients
    if settings.init == "own" and alike:
        yield f"federation.init: own has no effect: {name} shares all weights, which the first receive replaces"
    groups, own = loop.num_clients, settings.selection
    if isinstance(own, Cyclic) and own.groups > groups:
        yield f"federation.selection: Cyclic: {own.groups} groups of {groups} clients, so that some rounds have nobody"
    if "gradient_clip_algorithm" in flags and "gradient_clip_val" not in flags:
        yield "trainer.gradient_clip_algorithm: has no effect without trainer.gradient_clip_val"
    if flags.get("min_steps") and not flags.get("callbacks"):
        yield "trainer.min_steps: has no effect: federation.local_epochs and local_steps say how long a fit is"


@torch.no_grad()
def _two_networks(model: SplitModel, x: Tensor) -> str:
    """How a model of one's own trains another network than is tested; empty if it does not."""
    kind, asked = type(model), (type(model), type(model.body))
    if all(is_known(own.__module__) for own in asked) or model.own.has_loss:
        return ""

    def made(ask: Callable[[], Tensor]) -> Tensor:
        with training(model, False), isolated_streams(0, "inputs"):
            return ask()

    z, seen = made(lambda: model.embed(x)), made(lambda: model.forward_features(x)[1])
    if not _alike(z, seen):
        of = f"{kind.__name__}.embed(), which tests call, gives another embedding than forward_features(), which trains"
        return f"model: {of}; override both, or the stages of the body"
    if kind.forward is not SplitModel.forward and not _alike(made(lambda: model(x)), made(lambda: model.head(z))):
        of = f"{kind.__name__}.forward() gives other logits than head(embed(x)), which is what is trained and tested"
        return f"model: {of}"
    return ""


def _alike(one: Tensor, other: Tensor) -> bool:
    same = isinstance(one, Tensor) and one.shape == other.shape
    return same and torch.allclose(one, other, rtol=1e-3, atol=1e-5, equal_nan=True)
