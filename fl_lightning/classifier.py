"""A run's model on its own: a network from inputs to class scores, as the run's evaluation predicts."""

from __future__ import annotations

import copy
import operator
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.core.client import ClientModule
from fl_lightning.core.facts import Fit
from fl_lightning.core.message import Message
from fl_lightning.core.method import Seen, headline
from fl_lightning.core.steps import HALF
from fl_lightning.data.arrays import DataSpec
from fl_lightning.data.store import TensorStore
from fl_lightning.errors import ConfigError, require
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.federation.reexamination import trained_model
from fl_lightning.rebuilding import rebuilt
from fl_lightning.report.recorded_run import has_ended
from fl_lightning.sealed import read_json
from fl_lightning.seeding import isolated_streams
from fl_lightning.terminal import say
from fl_lightning.trust import Trust
from fl_lightning.undisturbed import undisturbed


class Classifier(nn.Module):
    """A client's model, or the global one, as it predicts when the run is evaluated.

    It takes inputs as local fits see them: images as floats, normalised by `normalise`; tokens int64 [N, L]; features
    as the data set scales them. It is in evaluation mode and on the CPU; parameters take gradients.

    Args:
        method: what was trained, in its last state.
        predictor: the name of the way to predict.
        store: how inputs are normalised, of which type they are and how they lie in memory.
        spec: of the data.
        classes: [C] the data set's names.
        stands_for: [C] the class of unshifted samples that each score is for; `self.classes` are named by it.
        context: the precision of a pass.
        client: whose model it is; None for the global one.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        method: Any,
        predictor: str,
        store: TensorStore,
        spec: DataSpec,
        classes: Sequence[str],
        stands_for: Sequence[int],
        context: Callable[[], AbstractContextManager[None]],
        client: int | None,
    ) -> None:
        super().__init__()
        self.method = method
        self.alone: nn.Module | None = None
        """The one network that stands for the method, in a copy that `in_one` gives."""
        self.predictor = predictor
        self.client = client
        self.stands_for = tuple(stands_for)
        self.classes = tuple(str(classes[label]) for label in self.stands_for)
        self.input_shape = spec.input_shape
        self.num_classes = spec.num_classes
        self.vocabulary_size = spec.vocabulary_size
        self._dtype, self._channels_last = store.dtype, store.channels_last
        self._context = context
        self._autocasts = True
        for name, values in zip(("scale", "shift"), store.scale_and_shift(), strict=True):
            self.register_buffer(name, values.cpu(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores [N, C], the largest of which is the prediction: logits, or what the method predicts by.

        Args:
            x: [N, …] normalised inputs.
        """
        if x.is_floating_point():
            x = x.to(self._dtype)
        if self._channels_last and x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        with self._context(), nullcontext() if self._autocasts else torch.autocast("cpu", enabled=False):
            if self.alone is not None:
                return self.alone(x)
            return self.method.predictors()[self.predictor].scores(Seen(x))

    def widen(self) -> None:
        """Take float32 where the run has half precision: for weights, inputs and passes; wider ones stay."""
        self._autocasts, self._dtype = False, torch.promote_types(self._dtype, torch.float32)
        self._apply(lambda tensor: tensor.float() if tensor.dtype in HALF else tensor)

    def in_one(self) -> Classifier:
        """A copy that holds one network instead of the models whose weights make it; itself where it mixes none.

        The method stays behind, with what other clients have sent.
        """
        merged = self.method.predictors()[self.predictor].merged
        if merged is None:
            return self
        own = copy.copy(self)
        own._modules = {}
        own.method, own.alone = None, merged().eval()
        return own

    def normalise(self, images: Tensor) -> Tensor:
        """Images uint8 [N, C, H, W] as `forward` takes them, normalised as in training; other inputs as they are.

        They are float32, or float64 under ``64-true``, which a file of the model takes; `forward` makes them narrower.
        """
        if images.dtype != torch.uint8:
            return images
        rule = f"must be uint8 images [N, {', '.join(map(str, self.input_shape))}]"
        require(images.shape[1:] == self.input_shape, "images", rule, tuple(images.shape))
        wide = torch.promote_types(self._dtype, torch.float32)
        return images.float().mul_(self.scale).add_(self.shift).to(wide)


def load(run: str | os.PathLike[str], client: int | None = None, trust: Trust | str | Sequence[str] = ()) -> Classifier:
    """A run's model as a module of its own: normalised inputs [N, …] to class scores [N, C].

    The method and the model are built again from the run's configuration, so its data set must be there. Files are
    verified and read as plain tensors; classes come from fl_lightning, Lightning, torch, torchvision and torchmetrics,
    and from nowhere else unless `trust` names the package.

    Args:
        run: a `Run`, or a run's folder.
        client: 0-based, for its own model after its last fit (personalised on its training part where the method
            predicts so); None for the global model.
        trust: packages of your own that the configuration may import.

    Raises:
        ConfigError: if there is no such run, client or model, a file is damaged, or a package is not trusted.
    """
    folder = Path(run)
    require((folder / "config.yaml").is_file(), "run", "there is no run in that folder", str(folder))
    trusted = trust or getattr(run, "trust", ())
    with undisturbed():
        loop = rebuilt(folder, Trust.of(trusted))
        found = classifier_of(loop, folder, client)
    found.method.fit = Fit()  # the configuration's optimizer stays behind
    return found


def classifier_of(loop: FederatedLoop, folder: Path, client: int | None) -> Classifier:
    """A client's model, or the global one, which takes the resident module of its architecture with it.

    Args:
        loop: a run's, as `rebuilt` gives it; of use for one model an architecture.
        folder: the run's.
        client: 0-based, a whole number of any type; None for the global model.

    Raises:
        ConfigError: if there is no such client or model, or its file is damaged.
    """
    client = None if client is None else _number(client, loop.num_clients)
    module, figure = (_global(loop), "Server-T") if client is None else (_own(loop, folder, client), "Local-T")
    way = headline(module.predictors, figure)  # type: ignore[arg-type]
    require(way is not None, "client", f"{type(module.method).__name__} predicts nothing that counts for {figure}")
    module.cpu()
    context = loop.runner.trainer.precision_plugin.forward_context
    data, names = loop.data, loop.data.arrays.classes
    stands_for = _stands_for(loop, client)
    return Classifier(module.method, str(way), data.store, data.spec, names, stands_for, context, client).eval()


def _stands_for(loop: FederatedLoop, client: int | None) -> list[int]:
    """[C] which class of the data set each score is for; a concept shift gives a client other labels than it has."""
    labels = range(loop.data.spec.num_classes) if client is None else labels_of(loop, client)
    return sorted(range(len(labels)), key=labels.__getitem__)


def labels_of(loop: FederatedLoop, client: int) -> Sequence[int]:
    """[C] the label that a client gives to class 0, 1 and so on of the data set: another one under a concept shift."""
    size, shift = loop.data.spec.num_classes, loop.data.shift
    return (None if shift is None else shift.labels(client, size)) or range(size)


def note_shift(loop: FederatedLoop, client: str) -> None:
    """Say in a line where models were trained on other samples or labels than the data set's, which new samples have.

    Args:
        loop: a run's.
        client: a client's number, ``all``, or ``global``.
    """
    shift = loop.data.shift
    if shift is None:
        return
    whose = {"all": "clients were", "global": "the global model was"}.get(client, f"client {client} was")
    said = f"samples are taken as they are, and {whose} trained on what {type(shift).__name__} makes of them"
    if shift.labels(0, loop.data.spec.num_classes) is not None:
        if client != "global":  # its labels are named by `Classifier.classes`
            return
        said = f"classes are named as in the data set, and {whose} trained on labels that differ from client to client"
    say(f"fl-lightning: note: data.shift: {said}")


def _number(client: Any, num_clients: int) -> int:
    """A client's number as Python's own: NumPy's come out of every search for the worst client."""
    try:
        number = -1 if isinstance(client, bool) else operator.index(client)
    except TypeError:
        number = -1
    require(0 <= number < num_clients, "client", f"must be from 0 to {num_clients - 1}", client)
    return number


def _global(loop: FederatedLoop) -> ClientModule:
    message = loop.exchange.global_message()
    none = "this run has no global model; name a client" if loop.round else "this run has no checkpoint; name a client"
    if not loop.examiner.has_global_model or message is None or not loop.round:
        raise ConfigError("client", none)
    return loop.runner.residents.load_global(message, loop.round)


def _own(loop: FederatedLoop, folder: Path, client: int) -> ClientModule:
    file = folder / "models" / f"{client:05d}.pt"
    samples = loop.runner.attackers.samples[client]  # which an attack may change
    if file.is_file():
        module = trained_model(loop, client, file, "client")
    else:
        module = loop.runner.load(client)
        lacks, kept = without_model(loop, folder, client), "this run keeps no models (federation.checkpoint.models)"
        took_part = loop.round == 0 or bool(loop.board.took_part[client])
        why = f"{kept}, is not finished, or was to be longer when that fit ended" if lacks is None else lacks
        require(not took_part, "client", f"there is no file {file}: {why}")
        loop.runner.receive(module, Message(), samples, loop.runner.facts)
    way = headline(module.predictors, "Local-T")
    if way is not None and module.predictors[way].adapts:
        with isolated_streams(loop.seed, "adapt/trained", client=client), loop.runner.evaluator.context():
            module.adapt(samples)
    return module


def without_model(loop: FederatedLoop, folder: Path, client: int) -> str | None:
    """Why a run that keeps its clients' models has none of a client that has taken part; None where it should have one.

    Args:
        loop: the run's, at its end.
        folder: the run's.
        client: 0-based.
    """
    models, summary = folder / "models", folder / "summary.json"
    said = read_json(summary, "client") if summary.is_file() else {}
    over = loop.done or has_ended(said, loop.settings.rounds, loop.round)
    kept = models.is_dir() and over and bool(loop.board.took_part[client])
    if not kept or (models / f"{client:05d}.pt").is_file():
        return None
    last = loop.calendar.last_fit(client, loop.round)
    if last is not None and not loop.calendar.is_last_fit(client, last):
        return f"client {client} was to take part again when the run ended, and models are kept of last fits alone"
    sick = f"client {client} fell sick in its last round, and its model of before was not kept"
    return sick if loop.settings.on_client_error == "skip" else None
