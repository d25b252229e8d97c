"""A server that keeps what every client has sent last, and lends each client some of the others' models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.core.division import division_of
from fl_lightning.core.facts import Facts
from fl_lightning.core.message import Message
from fl_lightning.core.precision import Wide, stretches
from fl_lightning.core.server import Server
from fl_lightning.errors import require
from fl_lightning.models.mixture import summed
from fl_lightning.seeding import torch_generator

WISH = "wish"
"""The artifact by which a client says how much it wants each of the others' models: [N]."""


def as_vector(weights: Mapping[str, Tensor]) -> Tensor:
    """[P] all floating-point entries, one after another in the order of their names."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in _floats(weights)])


def _floats(weights: Mapping[str, Tensor]) -> list[Tensor]:
    return [tensor for _, tensor in sorted(weights.items()) if tensor.is_floating_point()]


@torch.no_grad()
def put_vector(values: Tensor, weights: Mapping[str, Tensor]) -> None:
    """The inverse of `as_vector`: fill entries in place."""
    for tensor, part in stretches(values, _floats(weights)):
        tensor.copy_(part)


def shared_entries(method: nn.Module) -> dict[str, Tensor]:
    """What a client shares of its state, without copies."""
    division = division_of(method)
    entries = division.entries()
    return {name: entries[name] for name in division.shared}


def lent_models(message: Message) -> dict[int, Tensor]:
    """The models [P] in a message, by the client that each is of; none before anybody has sent one."""
    lent, lenders = message.artifacts.get("lent"), message.artifacts.get("lenders")
    there = isinstance(lent, Tensor) and isinstance(lenders, Tensor)
    return dict(zip(lenders.tolist(), lent, strict=True)) if there else {}  # type: ignore[union-attr, arg-type]


def lent_parameters(message: Message, method: Any) -> dict[int, Tensor]:
    """The same of the model's parameters alone, [Q]: without batch norm's statistics.

    Args:
        message: what came in.
        method: the client's, whose shared entries are what is lent.
    """
    entries = {name: tensor.clone() for name, tensor in shared_entries(method).items()}
    whole = {**division_of(method).entries(), **entries}  # what is frozen is everybody's, and not lent
    own = {name: whole[f"model.{name}"] for name, _ in method.model.named_parameters()}
    found = {}
    for client, values in lent_models(message).items():
        put_vector(values, entries)
        found[client] = as_vector(own)
    return found


class AllModels(Wide):
    """Every client's model at one client: parameters in rows, but zeros in its own, which it has by itself.

    Nothing of it is in a state dict.

    Args:
        method: the client's, of which all share the whole model; what it starts from counts for who has sent nothing.
    """

    initial: Tensor  # [P]
    rows: Tensor  # [N, P]
    own: Tensor  # [N], 1 in the client's own place
    shares: Tensor  # [N], of all training samples; 1/N each until some are told

    def __init__(self, method: Any) -> None:
        super().__init__()
        num_clients = method.facts.num_clients
        start = as_vector(dict(method.model.named_parameters()))
        self.register_buffer("initial", start, persistent=False)
        self.register_buffer("rows", start.repeat(num_clients, 1), persistent=False)
        self.register_buffer("own", torch.zeros(num_clients), persistent=False)
        self.register_buffer("shares", torch.full((num_clients,), 1 / num_clients), persistent=False)

    def mixture(self, model: Any, relations: Tensor, others: Tensor) -> dict[str, Tensor]:
        """Parameters of the sum of all models, by name.

        Args:
            model: the client's own.
            relations: p, [N], how much of each is in the sum.
            others: Σ p_j w_j over the other clients, [P].
        """
        return summed(model, self.own @ relations, others)

    @torch.no_grad()
    def take(self, message: Message, method: Any, data: Any) -> bool:
        """Take what a client has received. Who has sent nothing yet counts as many samples as the others on average.

        Args:
            message: from `LendingServer`.
            method: the client's.
            data: its own.

        Returns:
            Whether anything was heard.
        """
        client = data.client
        self.own.zero_()[client] = 1
        heard = "lent" in message.artifacts or bool(message.weights)
        if heard:
            self.rows.copy_(self.initial.expand_as(self.rows))
            for other, values in lent_parameters(message, method).items():
                self.rows[other] = values.to(self.rows)
            self.rows[client] = 0
            self.shares.fill_(1 / len(self.shares))
            sizes = message.artifacts.get("sizes")
            if isinstance(sizes, Tensor):
                counts = sizes.to(self.shares)
                counts[client] = data.num_train
                told = counts > 0
                counts = torch.where(told, counts, counts.sum() / told.sum())
                self.shares.copy_(counts).div_(counts.sum())
        return heard


@dataclass(frozen=True)
class Lending:
    """Which of the others' models a client hears.

    Args:
        models: M, how many, >= 1; null for all.
        exploration: ε, the chance that a random model takes the place of the most wanted one left, in [0, 1]: of the
            first round, in which nothing is lent yet.
        exploration_decay: by how much ε falls from round to round, >= 0.
    """

    models: int | None = 8
    exploration: float = 0.3
    exploration_decay: float = 0.05

    def __post_init__(self) -> None:
        key = "method.lending"
        require(self.models is None or self.models >= 1, f"{key}.models", "must be >= 1 or null (all)", self.models)
        require(0 <= self.exploration <= 1, f"{key}.exploration", "must be in [0, 1]", self.exploration)
        require(self.exploration_decay >= 0, f"{key}.exploration_decay", "must be >= 0", self.exploration_decay)


class LendingServer(Server):
    """Keeps each client's last weights, and sends every client those of the others that it wants most.

    A client's messages may say by an artifact what it wants, `WISH`. The message down holds no weights of its own, but
    the models as rows of an artifact, ``lent`` [M, P], and whose they are, ``lenders`` [M]; before anybody has sent one
    it is the initial message.

    Args:
        initial: as the base's.
        lending: which.
        adds: whether wishes add up over the rounds; otherwise the last ones count.
        tells_sizes: whether everybody's training samples come down, too, ``sizes`` [N]; 0 for who has sent nothing.
    """

    sees_messages = True
    takes_noise = False  # a lent model would stay within a norm of the initial one, from which nobody starts any more

    def __init__(self, initial: Message, lending: Lending, adds: bool = False, tells_sizes: bool = False) -> None:
        self.lending = lending
        self.adds, self.tells_sizes = adds, tells_sizes
        self.models: dict[int, Tensor] = {}
        self.wishes: dict[int, Tensor] = {}
        self.sizes: dict[int, int] = {}
        self.closed = 0
        """The last round that has closed: until the next one does, a client hears the same."""
        super().__init__(initial)

    def lenders(self, client: int) -> list[int]:
        """Whose models a client hears, of those that others have sent."""
        others = sorted(self.models.keys() - {client})
        wish, most = self.wishes.get(client), self.lending.models
        if most is None or len(others) <= most:
            return others
        best = others if wish is None else sorted(others, key=lambda other: -float(wish[other]))
        generator = torch_generator(self.facts.seed, "server/lending", self.closed, client)
        chance = self.lending.exploration - self.closed * self.lending.exploration_decay
        chosen: list[int] = []
        while len(chosen) < most:
            explores = float(torch.rand((), generator=generator)) < chance
            index = int(torch.randint(len(best), (), generator=generator)) if explores else 0
            chosen.append(best.pop(index))
        return sorted(chosen)

    def message_for(self, client: int) -> Message:
        """The models that are lent to the client."""
        if not self.models:
            return self.message
        own, like = self.lenders(client), next(iter(self.models.values()))
        lent = torch.stack([self.models[lender] for lender in own]) if own else like.new_empty((0, len(like)))
        beside = {"lent": lent, "lenders": torch.tensor(own, dtype=torch.long, device=like.device)}
        if self.tells_sizes:
            sizes = [self.sizes.get(other, 0) for other in range(self.facts.num_clients)]
            beside["sizes"] = torch.tensor(sizes, dtype=torch.long, device=like.device)
        return replace(self.message, weights={}, artifacts={**self.message.artifacts, **beside})

    def open_round(self) -> None:
        """Start a round: forget what came in."""
        super().open_round()
        self._held: dict[int, Message] = {}

    def see(self, client: int, message: Message) -> Message:
        """Keep weights and wishes until the round closes; the rest is merged."""
        self._held[client] = message
        public = {name: value for name, value in message.artifacts.items() if name != WISH}
        return replace(message, weights={}, artifacts=public)

    def close_round(self) -> None:
        """Take up what came in."""
        for client, message in sorted(self._held.items()):
            self.models[client] = as_vector(message.weights)
            self.sizes[client] = message.num_samples
            wish = message.artifacts.get(WISH)
            before = self.wishes.get(client) if self.adds else None
            if isinstance(wish, Tensor):
                self.wishes[client] = wish.clone() if before is None else before + wish
        self.closed = self.round
        super().close_round()

    def state_dict(self) -> dict[str, Any]:
        """The base's state, models and wishes."""
        own = {"models": dict(self.models), "wishes": dict(self.wishes), "sizes": dict(self.sizes)}
        return {**super().state_dict(), **own, "closed": self.closed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        super().load_state_dict(state)
        self.models, self.wishes = dict(state["models"]), dict(state["wishes"])
        self.sizes, self.closed = dict(state["sizes"]), state["closed"]


def lending_all(method: Any, initial: Message, facts: Facts) -> LendingServer:
    """A server that sends every client all the others' last models, and all sizes: ``make_server = lending_all``.

    Raises:
        ConfigError: if something else than the model travels, which nobody would hear.
    """
    beside = next((name for name in initial.weights if not name.startswith("model.")), None)
    rule = f"{type(method).__name__} lends models alone, and {beside} is a term's: let it stay with the client"
    require(beside is None, "method.extra_terms", rule)
    return LendingServer(initial, Lending(models=None), tells_sizes=True)
