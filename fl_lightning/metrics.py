"""The metrics that a configuration names, built and tried once."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fl_lightning.building import build
from fl_lightning.configuration import short_name
from fl_lightning.errors import ConfigError, require
from fl_lightning.federation.measures import Measures, Reading
from fl_lightning.report.columns import BALANCED, FIGURES, LOSS, less_is_better
from fl_lightning.seeding import isolated_streams
from fl_lightning.trust import import_name

if TYPE_CHECKING:
    from torchmetrics import Metric

_USUAL = ("Accuracy", "F1Score", "AUROC", "CalibrationError")
_TRIED = 64
"""Samples that a metric is tried on."""


def build_metrics(nodes: Sequence[Mapping[str, Any]], num_classes: int) -> dict[str, Reading]:
    """The metrics, by the names of their columns: the class's, with the arguments where a class comes twice.

    Args:
        nodes: the configuration's section `metrics`.
        num_classes: C, which a metric is given, as it is the task.

    Raises:
        ConfigError: for a metric that cannot be built, gives no number for predictions of that many classes, or whose
            name and class do not agree on whether more or less of it is better.
    """
    names = column_names(nodes)
    metrics = {}
    for index, (name, node) in enumerate(zip(names, nodes, strict=True)):
        key = f"metrics.{index}"
        takes = inspect.signature(import_name(node["class_path"], key)).parameters
        facts = {"task": "multiclass", "num_classes": num_classes, "validate_args": True}
        given = {argument: value for argument, value in facts.items() if argument in takes}
        top_k = (node.get("init_args") or {}).get("top_k")
        rule = "must be at least 1"  # which torchmetrics leaves to torch, and that speaks of sizes of tensors
        require(not isinstance(top_k, int) or top_k >= 1, f"{key}.top_k", rule, top_k)
        metric = build(node, key, **given)
        if "validate_args" in takes:
            metric.validate_args = False  # of every batch: that takes longer than the metric itself
        metrics[name] = _tried(metric, key, num_classes)
        _require_said(name, metrics[name].metric, key)
    return metrics


def column_names(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the columns of each metric begin with.

    >>> column_names([{"class_path": "torchmetrics.AUROC"}])
    ['AUROC']

    Raises:
        ConfigError: if a metric is there twice, or would take another column's name.
    """
    names: list[str] = []
    classes = [short_name(node) for node in nodes]
    for index, (node, name) in enumerate(zip(nodes, classes, strict=True)):
        if classes.count(name) > 1:
            arguments = node.get("init_args") or {}
            others = [other.get("init_args") or {} for other in nodes if short_name(other) == name]
            differ = [key for key in arguments if any(other.get(key) != arguments[key] for other in others)]
            name = "_".join([name, *(f"{key}_{arguments[key]}" for key in differ)])
        name = "".join(letter if letter.isalnum() or letter in "_-." else "-" for letter in name)
        free = name not in (*names, "loss", LOSS, BALANCED, *FIGURES)
        require(free, f"metrics.{index}", "is there already, with the same arguments", name)
        names.append(name)
    return names


def _tried(metric: Metric, key: str, num_classes: int) -> Reading:
    """The metric, if it is one of classification that gives one number for made-up predictions, and again the same."""
    kind = type(metric)
    ours = kind.__module__.partition(".")[0] != "torchmetrics"
    fits = ours or (kind.__module__.startswith("torchmetrics.classification") and kind.__name__ not in _others())
    require(fits, key, f"must be a metric of single-label classification ({', '.join(_USUAL)}, …)", kind.__name__)
    reading = Reading(metric, num_classes)
    measures = Measures(num_classes, loss=False, balanced=False, metrics={key: reading})
    values = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for tried in (_TRIED, _TRIED // 2, _TRIED):
                with isolated_streams(0, "metrics"):
                    y = torch.arange(tried) % num_classes
                    values.append(
                        measures.of(measures.outcome(torch.randn(tried, num_classes), y), measures.balance(y))
                    )
        except Exception as error:  # whatever somebody's metric raises
            said = " ".join(str(error).split())
            rule = "must give one number for class scores [n, C] and classes [n]"
            many = "one element" in said or "scalar" in said or "float()" in said
            rule += "; choose an average" if many else f" ({type(error).__name__}: {said[:120]})"
            raise ConfigError(key, f"{kind.__name__} {rule}") from error
        finally:
            metric.reset()
    rule = "keeps something that reset() does not clear, so that clients' samples add up; use add_state"
    require(str(values[0]) == str(values[2]), key, f"{kind.__name__} {rule}")
    reading.is_tried = True
    return reading


def _require_said(name: str, metric: Metric, key: str) -> None:
    """Refuse a name that says the opposite of its class: who reads a run's tables later knows the name alone."""
    more, said = getattr(metric, "higher_is_better", None), less_is_better(f"{name}/{FIGURES[0]}")
    rule = "less of it is better (higher_is_better), so its class must be called …Error, …Loss or …Distance"
    require(more is not False or said, key, rule, name)
    rule = "more of it is better (higher_is_better), so it must not be called Error, Loss, Distance or the like"
    require(more is not True or not said, key, rule, name)


def _others() -> list[str]:
    """Names of torchmetrics' classes for other tasks: two classes by one score, several labels a sample."""
    from torchmetrics import classification

    return [name for name in vars(classification) if name.startswith(("Binary", "Multilabel"))]
