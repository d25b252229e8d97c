"""A run's model as TorchScript or ONNX, checked against the module that it was made of."""

from __future__ import annotations

import io
import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch.core.module import _jit_is_scripting
from torch import Tensor

from fl_lightning.classifier import Classifier, classifier_of, note_shift, rebuilt
from fl_lightning.core.steps import HALF
from fl_lightning.data.module import FederatedData
from fl_lightning.data.normalising import mean_and_deviation
from fl_lightning.data.unlabelled import says_how_it_scales, unscaled
from fl_lightning.errors import ConfigError, importing, require
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.files import write_atomically
from fl_lightning.models.encoders import attention_step_by_step
from fl_lightning.terminal import say
from fl_lightning.trust import Trust
from fl_lightning.undisturbed import undisturbed

CLOSE = 1e-4
"""Largest difference of a score, absolute or relative, between the model and what was written of it."""
SAMPLES = 17

Scores = Callable[[Tensor], Tensor]
Maker = Callable[[Classifier, Tensor, dict[str, str]], tuple[bytes, "Scores | None"]]
"""From a model, some samples, and what is to be known of it, to a file's content and, where it runs, its scores."""


def export_model(folder: Path, path: Path, client: int | None, trust: Trust) -> float | None:
    """Write a run's model.

    Args:
        folder: the run's.
        path: the file.
        client: 0-based; None for the global model.
        trust: what the run's configuration may import.

    Returns:
        The largest difference of a score; None where nothing could run what was written.

    Raises:
        ConfigError: if it cannot be exported.
    """
    makers = {".onnx": _onnx, ".pt": _torch_script, ".ts": _torch_script}
    require(path.suffix in makers, "--output", "must end in .onnx, .pt or .ts", str(path))
    require(not path.is_dir(), "--output", "must be a file", str(path))
    with undisturbed():
        warnings.simplefilter("ignore")  # torch calls both exporters old, and says what a trace may miss: it is checked
        loop = rebuilt(folder, trust)  # with gradients: what tries a run's fits out takes some, and so may `adapt`
        model = classifier_of(loop, folder, client)
        content, difference = _written(makers[path.suffix], model, loop, path.suffix)
    rule = f"{_name(model)} cannot be written as {path.suffix}: what it does depends on the samples, scores differ"
    require(difference is None or difference <= CLOSE, "export", rule, difference)
    write_atomically(path, lambda file: file.write(content))
    note_shift(loop, "global" if model.client is None else str(model.client))
    return difference


@torch.no_grad()
def _written(make: Maker, model: Classifier, loop: FederatedLoop, ending: str) -> tuple[bytes, float | None]:
    """What a file of a model holds, and the largest difference of a score; None where nothing could run it.

    Args:
        make: makes it.
        model: the model; it is wide afterwards where the file is.
        loop: its run's.
        ending: of the file.

    Raises:
        ConfigError: if it cannot be written so.
    """
    x = _samples(loop, model.client)
    _require_alike(model, x)
    if ending == ".onnx":
        x = _widen(model, x)
    try:
        content, written = make(model.in_one(), x[:2], about(model, loop.data))
        return content, None if written is None else _difference(written(x), model(x))
    except ConfigError:
        raise
    except Exception as error:  # whatever an exporter cannot say
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError("export", f"{_name(model)} cannot be written as {ending}: {said[:120]}") from error


def _name(model: Classifier) -> str:
    return f"{type(model.method).__name__}'s {type(model.method.model).__name__}"


def _samples(loop: FederatedLoop, client: int | None) -> Tensor:
    """Some samples, normalised, of the whole test part where there is one: no model was trained for made-up ones.

    A file may be in the order of its texts' lengths. The last of tokens is without padding.
    """
    indices = loop.data.server_test if client is None else loop.data.clients[client].test
    indices = indices if len(indices) else loop.data.server_test
    indices = indices if len(indices) else torch.arange(len(loop.data.store.x))
    indices = torch.as_tensor(indices)
    spread = torch.linspace(0, len(indices) - 1, SAMPLES).long()  # a batch of one or two samples proves nothing
    x = loop.data.store.gather(indices[spread])[0].cpu()
    if not x.is_floating_point():
        x[-1] = torch.where(x[-1] == 0, x[-1].max(), x[-1])
    return x


def _require_alike(model: Classifier, x: Tensor) -> None:
    """Refuse a model that gives NaN, with which nothing compares, or draws random numbers when it predicts."""
    scores = model(x)
    require(not scores.isnan().any(), "export", f"{_name(model)} gives NaN as scores of test samples")
    rule = f"{_name(model)} draws random numbers when it predicts, so no file can give its scores"
    require(torch.equal(scores, model(x)), "export", rule)


def _widen(model: Classifier, x: Tensor) -> Tensor:
    """Let a model compute in float32 where it has half precision, which ONNX has not for all that a network does.

    A line says how far that moves scores.

    Returns:
        The samples, as the model now takes them.
    """
    own = model(x)
    model.widen()
    x = x.float() if x.dtype in HALF else x
    moved = _difference(own, model(x))
    if moved:
        say(
            f"fl-lightning: note: ONNX has the model in float32; the run's precision rounds scores by up to {moved:.1e}"
        )
    return x


def _difference(a: Tensor, b: Tensor) -> float:
    """The largest one of a score; equal infinities, which masks give, do not differ, and NaN differs from all."""
    if a.shape != b.shape:
        return math.inf
    worst = float(torch.where(a == b, 0.0, (a - b).abs() / b.abs().clamp(min=1)).max())
    return math.inf if math.isnan(worst) else worst


def about(model: Classifier, data: FederatedData) -> dict[str, str]:
    """What a user of the file must know, as texts.

    ``x * scale + shift`` makes of images of bytes, by channel, or of features as they are read, by place, what the
    model takes; both are null where nobody knows that.
    """
    known = {"classes": list(model.classes), "input_shape": list(model.input_shape), "client": model.client}
    constants = dict(zip(("scale", "shift"), _scale_and_shift(model, data), strict=True))
    return {name: json.dumps(value) for name, value in {**known, **constants}.items()}


def _scale_and_shift(model: Classifier, data: FederatedData) -> tuple[list[float] | None, list[float] | None]:
    if data.arrays.x.is_floating_point():  # scaled as they were read, of which the model knows nothing
        if not says_how_it_scales(data.dataset):
            return None, None
        if (training := unscaled(data.dataset)) is not None:
            mean, deviation = mean_and_deviation(training)
            return (1 / deviation).flatten().tolist(), (-mean / deviation).flatten().tolist()
    return model.scale.flatten().tolist(), model.shift.flatten().tolist()


def _torch_script(model: Classifier, x: Tensor, known: dict[str, str]) -> tuple[bytes, Scores | None]:
    with _jit_is_scripting():  # a LightningModule inside has no trainer here
        traced = torch.jit.trace(model, x, check_trace=False)
    file = io.BytesIO()
    torch.jit.save(traced, file, _extra_files={"about.json": json.dumps(known)})
    file.seek(0)
    return file.getvalue(), torch.jit.load(file)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without a page of a graph that ONNX has not."""
    logs = getattr(torch._C, "_jit_onnx_log", None)
    vars(torch._C)["_jit_onnx_log"] = lambda *said: None  # it prints whatever `verbose` says
    try:
        yield
    finally:
        vars(torch._C)["_jit_onnx_log"] = logs


def _onnx(model: Classifier, x: Tensor, known: dict[str, str]) -> tuple[bytes, Scores | None]:
    with importing("onnx", "export", "ONNX needs the package onnx: pip install 'fl-lightning[export]'"):
        import onnx
    file, first = io.BytesIO(), {0: "N"}
    names = {"input_names": ["x"], "output_names": ["scores"], "dynamic_axes": {"x": first, "scores": first}}
    with _jit_is_scripting(), attention_step_by_step(), _quietly():
        torch.onnx.export(model, (x,), file, dynamo=False, **names)  # type: ignore[arg-type]
    made = onnx.load_model_from_string(file.getvalue())
    onnx.helper.set_model_props(made, known)
    content = made.SerializeToString()
    try:
        import onnxruntime
    except ImportError:
        return content, None
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return content, lambda x: torch.from_numpy(np.asarray(session.run(None, {"x": x.numpy()})[0]))
