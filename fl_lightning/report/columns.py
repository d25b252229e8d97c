"""What a column of `metrics.csv` is, by its name.

``Local-T_received/prototype_std`` is an accuracy (of clients' own models on their own test parts, right after the
receive, by one of several ways to predict) and how it is spread; ``eval_loss/Local-T_weighted`` is another measure of
the same.
"""

from __future__ import annotations

import re

FIGURES = ("Local-T", "Global-T", "Server-T", "Local-V", "Server-V")
"""Whose model, on which part: T for the test parts, V for the validation parts."""
ACCURACY_SPREADS = ("", "_std", "_min", "_worst10", "_weighted", "_gini", "_jain")
"""What is written of an accuracy over clients."""
MEASURE_SPREADS = ("", "_std", "_weighted", "_undefined")
"""What is written of another measure over clients; `_undefined` counts those that have samples and no value."""
HURT = "_hurt"
"""Of an accuracy on clients' own test parts: the share of clients below what they reach alone."""
SPREADS = (*ACCURACY_SPREADS[1:], "_undefined", HURT, "_newcomers")
LOSS, BALANCED = "eval_loss", "balanced_accuracy"
"""The measures that are there by default."""
LOG = "log/"
"""What the columns of values begin with that fits have logged."""
SECONDS = "seconds"
"""How long a round took; with an underscore and a word behind it, a part of that."""
OTHERS = (
    "round", "receive_drop", "uplink_params", "downlink_params", "uplink_bytes", "downlink_bytes", "participants",
    "missing", "skipped", "loss", "loss_newcomers", "epsilon", "record_epsilon", SECONDS,
    *(f"{SECONDS}_{part}" for part in ("fit", "evaluate", "exchange", "save")),
)  # fmt: skip
"""The columns that are not read off predictions; each loss term has one beside them, ``loss/proximal``."""
_WHOSE = "(?:Loc|Glob)al|Server"
_MEASURE = re.compile(rf"[^/]+/(?:{_WHOSE})-[TV](?![^_/])")
_ALONE = re.compile("Local-T(_received)?(/fine_tuned)?")  # compared with what a client reaches alone
_OF_CLIENTS = "(?:Local-T|Local-V|Global-T)(?:_received)?"
_FIGURE = re.compile(rf"(?:[^/]+/)?(?:Server-[TV]|{_OF_CLIENTS}(?:/.+|{'|'.join(SPREADS)})?)")
_ACCURACY = re.compile(rf"(?:{'|'.join(FIGURES)})(?:_received)?")
_LESS = re.compile(r"([^/]*([Ll]oss|Error|Distance|Divergence|Perplexity)|EER)[^/]*/")


def may_exist(column: str) -> bool:
    """Whether some run writes a column of this name: which measures, ways to predict and terms there are, it decides.

    >>> [may_exist(name) for name in ("Local-T_received/prototype_std", "F1Score/Server-T", "loss/proximal", "Local-X")]
    [True, True, True, False]
    >>> [may_exist(name) for name in ("Local-T_recieved", "local-T", "second", "seconds_fit", "Global-T_worst10")]
    [False, False, False, True, True]
    >>> [may_exist(name) for name in ("Server-T_std", "Global-T_hurt", "F1Score/Local-T_min", "Local-T_undefined")]
    [False, False, False, False]
    """
    if _FIGURE.fullmatch(column) is None:
        return column in OTHERS or re.fullmatch("loss/.+", column) is not None
    spread = next((own for own in SPREADS if column.endswith(own)), "")
    return spread in ("", "_newcomers", *spreads_of(column.removesuffix(spread)))


def is_measure(column: str) -> bool:
    """Whether a column is of another measure than accuracy: ``F1Score/Local-T``.

    >>> [is_measure(name) for name in ("Local-T", "Local-T/prototype", "eval_loss/Local-T_std", "loss/proximal")]
    [False, False, True, False]
    """
    return _MEASURE.match(column) is not None


def is_time(column: str) -> bool:
    """Whether a column is never the same twice, because it holds seconds.

    >>> [is_time(name) for name in ("seconds", "seconds_fit", "loss")]
    [True, True, False]
    """
    return column == SECONDS or column.startswith(f"{SECONDS}_")


def is_score(column: str) -> bool:
    """Whether a column is read off predictions: an accuracy or another measure, a mean or a spread."""
    return column.startswith(FIGURES) or is_measure(column)


def measure_of(column: str) -> str:
    """The name of the measure; empty for accuracy.

    >>> measure_of("F1Score/Server-T"), measure_of("Local-T/prototype")
    ('F1Score', '')
    """
    return column.partition("/")[0] if is_measure(column) else ""


def accuracy_of(column: str) -> str:
    """The plain accuracy that is tested when a score is.

    >>> [accuracy_of(name) for name in ("AUROC/Local-T", "Local-T_received_hurt", "Local-T/prototype_std", "Server-V")]
    ['Local-T', 'Local-T_received', 'Local-T', 'Server-V']
    """
    found = _ACCURACY.search(column)
    return found.group() if found is not None else column


def spreads_of(column: str) -> tuple[str, ...]:
    """What is written over clients of one of their columns.

    >>> spreads_of("F1Score/Local-T"), spreads_of("Local-T_received")[-3:], spreads_of("Local-V")[-1]
    (('', '_std', '_weighted', '_undefined'), ('_gini', '_jain', '_hurt'), '_jain')
    """
    if is_measure(column):
        return MEASURE_SPREADS
    return (*ACCURACY_SPREADS, HURT) if _ALONE.fullmatch(column) else ACCURACY_SPREADS


def is_spread(column: str) -> bool:
    """Whether a column says how a figure is spread over clients, or which share of them it concerns.

    >>> [is_spread(name) for name in ("Local-T/fine_tuned", "Local-T/fine_tuned_worst10", "Local-T_received")]
    [False, True, False]
    """
    return column.endswith(SPREADS)


def less_is_better(column: str) -> bool:
    """Whether a smaller value of a score is the better one, as its name says.

    >>> [less_is_better(name) for name in ("Local-T", "Local-T_std", "eval_loss/Local-T", "CalibrationError/Server-T")]
    [False, True, True, True]
    >>> [less_is_better(name) for name in ("EER/Local-T", "F1Score/Local-T")]
    [True, False]
    """
    return column.endswith(("_std", "_gini", HURT, "_undefined")) or (
        is_measure(column) and _LESS.match(column) is not None
    )


def is_share(column: str) -> bool:
    """Whether a column is read in percent: accuracies, balanced ones too, how they are spread, the receive drop.

    >>> [is_share(name) for name in ("Local-T_gini", "balanced_accuracy/Server-T", "receive_drop")]
    [True, True, True]
    >>> [is_share(name) for name in ("eval_loss/Local-T", "balanced_accuracy/Local-T_undefined", "seconds")]
    [False, False, False]
    """
    counted = column.endswith("_undefined")
    return column == "receive_drop" or (is_score(column) and not counted and measure_of(column) in ("", BALANCED))


def is_validated(column: str) -> bool:
    """Whether a column is called after the validation parts.

    >>> [is_validated(name) for name in ("Local-V_received", "eval_loss/Server-V", "Local-T", "loss/my-V")]
    [True, True, False, False]
    """
    return re.match(rf"(?:[^/]+/)?(?:{_WHOSE})-V(?![^_/])", column) is not None


def validated(column: str) -> str:
    """The same figure on the validation parts: ``Local-V`` for ``Local-T``.

    >>> validated("eval_loss/Local-T_received"), validated("Global-T")
    ('eval_loss/Local-V_received', 'Global-V')
    """
    return re.sub(rf"((?:^|/)(?:{_WHOSE})-)T(?![^_/])", r"\1V", column, count=1)
