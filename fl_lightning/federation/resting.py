"""What a prediction rests on: measured, not believed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from fl_lightning.core.client import ClientModule
from fl_lightning.core.freezing import training
from fl_lightning.core.method import Predictor, Seen
from fl_lightning.core.nobody import AsksWho, TimelessFacts, as_nobody
from fl_lightning.errors import own_code
from fl_lightning.seeding import isolated_streams

BODY = "model.body."
"""What the names of a body's parameters and buffers begin with."""


def rests_on_what_travels(client: ClientModule, way: Predictor, x: Tensor) -> bool:
    """Whether a way to predict uses nothing that stays with a client, nor what its method makes of a receive.

    Measured: for the length of one prediction, under the same random streams, all of that is hidden, and which client
    it is with it.

    Args:
        client: any client.
        way: the predictor.
        x: [1, …] an input.
    """
    try:
        with as_nobody(client.method):
            return _unmoved(client, _not_travelling(client), partial(_scores, way, x), (0, 0))
    except AsksWho:
        return False


def goes_by_the_round(client: ClientModule, x: Tensor) -> bool:
    """Whether a prediction asks which round it is: after a receive it is another one than when the model was made.

    Args:
        client: any client, with predictions that may be everybody's.
        x: [1, …] an input.
    """
    with torch.no_grad(), training(client.method, False), isolated_streams(0, "examiner"):
        try:
            with as_nobody(client.method, TimelessFacts):
                for way in client.predictors.values():
                    way.scores(Seen(x))
        except AsksWho:
            return True
    return False


def draws(client: ClientModule, x: Tensor) -> bool:
    """Whether a prediction rests on the random streams, as dropout that stays on does.

    Args:
        client: any client of its architecture.
        x: [1, …] an input.
    """
    return not all(_unmoved(client, (), partial(_scores, way, x), (0, 1)) for way in client.predictors.values())


def _scores(way: Predictor, x: Tensor) -> Tensor:
    return way.scores(Seen(x))


def mixes(client: ClientModule, x: Tensor) -> bool:
    """Whether a prediction looks at a mini-batch's other samples, as one that adapts to what it is given does.

    One that is another beside the very same samples, or by rounding alone (padding that is cut off, sums in another
    order), does not show it.

    Args:
        client: any client of its architecture.
        x: [3, …] inputs: the first is predicted beside the second, and beside the third.
    """
    if len(x) < 3:
        return False

    def beside(way: Predictor, other: int) -> Tensor:
        with isolated_streams(0, "examiner"):
            return _scores(way, x[[0, other]])[0]

    with torch.no_grad(), training(client.method, False), own_code("method", client.method, "predictors()"):
        for way in client.predictors.values():
            one = beside(way, 1)
            if not _is_close(one, beside(way, 2)) and _is_close(one, beside(way, 1)):
                return True
    return False


def _is_close(one: Tensor, other: Tensor) -> bool:
    """Whether scores are the same but for rounding."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    finite = one[one.isfinite()].abs()
    largest = float(finite.max()) if len(finite) else 0.0
    return torch.allclose(one, other, rtol=0, atol=largest * torch.finfo(one.dtype).eps ** 0.75, equal_nan=True)


def embeds_by_a_body_that_travels(client: ClientModule, x: Tensor) -> bool:
    """Whether the embedding is what the body alone makes, all of which is exchanged, and draws nothing.

    The former two are read, for an `embed` of a model's own may ask for anything; the last is measured, under two
    random streams and with everything else hidden.

    Args:
        client: any client.
        x: [1, …] an input.
    """
    travels, tensors = _travelling(client), _tensors(client)
    whole = all(name in travels for name in client.entries if name.startswith(BODY))
    if not client.method.model.embeds_by_body or not whole:
        return False
    others = [tensor for name, tensor in tensors.items() if not name.startswith(BODY)]
    return _unmoved(client, others, lambda: client.method.model.embed(x), (0, 1))


def _unmoved(
    client: ClientModule, hidden: Sequence[Tensor], made: Callable[[], Tensor], seeds: tuple[int, int]
) -> bool:
    """Whether what is made in eval mode stays the same, bit for bit, while tensors are hidden.

    Args:
        client: the client.
        hidden: its tensors, which come back unharmed.
        made: makes it.
        seeds: of the random streams before and under the hiding.
    """
    before = [tensor.clone() for tensor in hidden]
    with torch.no_grad(), training(client.method, False):
        with isolated_streams(seeds[0], "examiner"):
            plain = made()
        for tensor in hidden:
            _hide(tensor)
        try:
            with isolated_streams(seeds[1], "examiner"):
                return torch.equal(made(), plain)
        finally:
            for tensor, value in zip(hidden, before, strict=True):
                tensor.copy_(value)


def _travelling(client: ClientModule) -> set[str]:
    """Names of entries that travel; those by which a tied tensor stands elsewhere among them."""
    division, entries = client.division, client.entries
    names = {*division.shared, *division.anew, *division.fixed}
    places = {entries[name].data_ptr() for name in names & entries.keys()} - {0}
    return names | {name for name, tensor in entries.items() if tensor.data_ptr() in places}


def _tensors(client: ClientModule) -> dict[str, Tensor]:
    """Entries, and the buffers beside them that the method and its terms fill in a receive."""
    entries = client.entries
    filled = {n: own for n, own in client.method.named_buffers() if n.startswith("terms.") or "." not in n}
    return {**filled, **entries}


def _not_travelling(client: ClientModule) -> list[Tensor]:
    travels = _travelling(client)
    return [tensor for name, tensor in _tensors(client).items() if name not in travels]


def _hide(tensor: Tensor) -> None:
    """Make numbers NaN and turn truths around; integers stay, for they may be places in something."""
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    elif tensor.dtype == torch.bool:
        tensor.logical_not_()
