"""Which figures no run of a configuration can have, found before the first one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fl_lightning.building import build
from fl_lightning.configuration import short_name
from fl_lightning.errors import ConfigError, own_code
from fl_lightning.report.columns import BALANCED, LOSS, accuracy_of, is_score, is_validated, measure_of
from fl_lightning.table.quantity import Figure

_SPENT = {"epsilon": "privacy.", "record_epsilon": "record_privacy."}
"""Columns of what privacy is spent -> how entries of `summary.json` begin that say the same."""


def why_lacking(figure: Figure, config: Mapping[str, Any]) -> str:
    """Why no run of a resolved configuration has a figure; empty where some may have it."""
    return next(filter(None, (_why(name, config) for name in figure.columns)), "")


def _why(name: str, config: Mapping[str, Any]) -> str:
    data, federation = config["data"], config["federation"]
    if is_validated(name) and data["evaluate_on"] != "test":
        return "under data.evaluate_on: validation those of validation parts have the test parts' names"
    if is_validated(name) and not data["validation_fraction"] and not lists_validation(data):
        return "its runs have no validation parts: set data.validation_fraction above 0"
    if measure := _unknown_measure(name, config):
        return f"its runs do not measure {measure}: name it under metrics"
    if switch := _switched_off(name, federation.get("evaluate") or {}):
        return f"federation.evaluate.{switch} switches it off"
    if name.endswith("_newcomers") and not (federation.get("newcomers") or {}).get("clients"):
        return "nobody joins its runs later: set federation.newcomers.clients"
    spent = next((own for own, entry in _SPENT.items() if name == own or name.startswith(entry)), "")
    if spent == "record_epsilon" and federation.get("record_privacy") is None:
        return "its runs spend no privacy of samples: set federation.record_privacy"
    if spent == "epsilon" and not any(map(_may_spend, federation.get("wire") or ())):
        return "its runs spend no privacy: put ClipAndNoise into federation.wire"
    return _untested(name, config)


def lists_validation(data: Mapping[str, Any]) -> bool:
    """Whether the partition itself says which samples are for validation, so that no share of the others is.

    Args:
        data: that section of a resolved configuration.
    """
    if data["split"] != "global":
        return bool(data["split"] == "file")
    from fl_lightning.data.listed import ListedPartition, lists_any  # here: other splits do not wait for torch

    try:
        partition = build(data["partition"], "data.partition")
        with own_code("data.partition", partition):
            listed = partition.listed(data["num_clients"]) if isinstance(partition, ListedPartition) else ()
            return any(lists_any(validation) for _, validation, _ in listed)
    except ConfigError:  # which the run itself says
        return True


def _untested(name: str, config: Mapping[str, Any]) -> str:
    """Why nobody is tested for a column, by a setting that is no switch."""
    score = accuracy_of(name) if is_score(name) else ""
    if score and "/fine_tuned" in name and (config["federation"].get("evaluate") or {}).get("fine_tune") is None:
        return "its runs fine-tune nobody: set federation.evaluate.fine_tune"
    if config["data"]["split"] == "global" and (name == "receive_drop" or score.startswith("Local-T")):
        return "under data.split: global clients have no test samples of their own: take Global-T or Server-T"
    return ""


def _switched_off(name: str, policy: Mapping[str, Any]) -> str:
    """The switch without which a score is not measured; empty where none is off."""
    score = accuracy_of(name) if is_score(name) else ""
    switches = {
        "validation": is_validated(name),
        "server": score.startswith("Server-"),
        "globally": score.startswith("Global-"),
        "received": "_received" in score or name == "receive_drop",
        "trained": name == "receive_drop"
        or (score != "" and "_received" not in score and not score.startswith("Server-")),
    }
    return next((switch for switch, is_needed in switches.items() if is_needed and not policy.get(switch, True)), "")


def _may_spend(filter: Mapping[str, Any]) -> bool:
    """Whether a wire's filter spends privacy, or is somebody's own, that may."""
    path = str(filter["class_path"])
    return path.endswith(".ClipAndNoise") or not path.startswith("fl_lightning.")


def _unknown_measure(name: str, config: Mapping[str, Any]) -> str:
    """The measure of a column that a configuration has not; one that is there twice has its arguments in its name."""
    asked, policy = measure_of(name), config["federation"].get("evaluate") or {}
    usual = [own for own, key in ((LOSS, "loss"), (BALANCED, "balanced_accuracy")) if policy.get(key, True)]
    known = [*usual, *map(short_name, config.get("metrics") or ())]
    return "" if any(asked == own or asked.startswith(f"{own}_") for own in known) else asked
