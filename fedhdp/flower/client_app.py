"""The ClientApp: a frame around ``fit``, in JAX, PyTorch or anything that has arrays.

A user says how a client trains: ``fit(parameters, personal, pull, round)`` gets the global and the personal model as
named NumPy arrays and returns both after training, the personal one pulled towards the global model that came in
(``personal − rate·(gradient + pull·(personal − parameters))`` in each step). The frame does the rest: it says which level
the owner chose, keeps the personal model on the client, counts what the client has spent, and declines rounds.

The owner's wishes are in the SuperNode's ``--node-config``:

    privacy="strict"         the level; not said: the strictest on offer
    directory="DIR"          where the client keeps its things
    epsilon=2.0 delta=1e-5   a budget for the client's life, in its own count
    scores=false             do not tell how good models are, even when asked; with a budget that is the default
"""

from __future__ import annotations

from collections.abc import Callable
from logging import INFO, WARNING
from pathlib import Path
from typing import NamedTuple

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.common.logger import log

from fedhdp.flower.client_state import SPENT, Folder, Memory, Promise, check, promised
from fedhdp.flower.protocol import (
    Arrays,
    Choice,
    Declined,
    Offer,
    Order,
    decline_message,
    read_offer,
    read_order,
    reply_message,
    shapes,
    tell_choice,
)
from fedhdp.privacy.ledger import Budget

Fit = Callable[[Arrays, Arrays, float, int], tuple[Arrays, Arrays | None]]


class Trainer(NamedTuple):
    """How one client trains and, if it can tell, how good a model is on its own test examples."""

    fit: Fit
    score: Callable[[Arrays], float] | None = None


def chosen_level(context: Context) -> str | None:
    """The level that the owner wrote in the SuperNode's configuration."""
    level = context.node_config.get("privacy")
    return level if isinstance(level, str) else None


def client_app(
    trainer: Callable[[Context], Trainer], level: Callable[[Context], str | None] = chosen_level
) -> ClientApp:
    """A ClientApp for clients that train like this; ``level`` says which level a client's owner chose."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        kept, offer = _kept(context), read_offer(message)
        with kept.alone():
            promises = kept.promises()
            if offer.run not in promises:  # what was promised first holds
                promise = _set_aside(kept, offer, promised(offer, level(context)), _budget(context))
                kept.keep_promises(promises | {offer.run: promise})
                wishes = (level(context) or "the strictest there is", _budget(context) or "none", _tells(context))
                log(INFO, "run %s: level %s, own budget %s, tells scores: %s", offer.run, *wishes)
            promise = kept.promises()[offer.run]
            promise.seen = max(offer.charged, promise.seen)  # by either count
            spent = _spent(kept, promise, _budget(context))
            identity = kept.identity()
        return tell_choice(message, Choice(level(context), identity, spent))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        parameters, order = read_order(message)
        kept, mine = _kept(context), trainer(context)  # one that cannot train fails before anything is counted
        try:
            _agree(kept, order, level(context), context)
        except Declined as error:
            return _decline(message, order, error)
        own = kept.personal(parameters)
        trained, personal = mine.fit(_copy(parameters), _copy(own or parameters), order.pull, order.round)
        if personal is not None and shapes(personal) != shapes(parameters):
            raise ValueError(f"fit returned a personal model of {shapes(personal)}, not of {shapes(parameters)}")
        if personal is not None and all(np.isfinite(array).all() for array in personal.values()):
            kept.keep_personal(personal)
        elif personal is not None:
            log(WARNING, "the personal model after round %d is not finite: the one before is kept", order.round)
            personal = own
        update = {name: trained[name] - array for name, array in parameters.items()}
        return reply_message(message, order, update, _scores(mine, order, context, parameters, personal))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        parameters, order = read_order(message)
        kept = _kept(context)
        try:
            promise = check(order, kept.promises(), level(context))
            promise.seen = max(order.charged - 1, promise.seen)  # by either count
            if _spent(kept, promise, _budget(context)):
                raise Declined(SPENT)
        except Declined as error:
            return _decline(message, order, error)
        scores = _scores(trainer(context), order, context, parameters, kept.personal(parameters))
        return reply_message(message, order, None, scores)

    return app


def _kept(context: Context) -> Memory:
    directory = context.node_config.get("directory")
    return Folder(Path(str(directory))) if directory else Memory(context.state)


def _set_aside(kept: Memory, offer: Offer, promise: Promise, budget: Budget | None) -> Promise:
    """Count all rounds that a run is to have, or those that the budget allows, before any of them.

    Who may be drawn pays for every round, and a client is not told of those after the last in which it was.
    """
    rounds = int(min(max(0, offer.rounds - offer.charged), kept.left(promise.once(), budget)))
    if rounds:
        kept.charge(offer.run, promise.once(rounds), budget)
    promise.rounds += rounds
    return promise


def _spent(kept: Memory, promise: Promise, budget: Budget | None) -> bool:
    """Whether no further round of a run can be paid for."""
    trained_out = promise.seen >= promise.rounds
    return kept.overspent(budget) or (trained_out and kept.left(promise.once(), budget) < 1)


def _agree(kept: Memory, order: Order, level: str | None, context: Context) -> None:
    """Check what is promised, and that the round is paid for, or pay for it, before doing anything."""
    budget = _budget(context)
    with kept.alone():
        promises = kept.promises()
        promise = check(order, promises, level)
        if kept.overspent(budget):
            raise Declined(SPENT)
        promise.seen = max(order.charged, promise.seen + 1)  # whatever the server says, each time is a round
        if promise.seen > promise.rounds:
            kept.charge(order.run, promise.once(promise.seen - promise.rounds), budget)
            promise.rounds = promise.seen
        kept.keep_promises(promises)


def _budget(context: Context) -> Budget | None:
    epsilon, delta = context.node_config.get("epsilon"), context.node_config.get("delta")
    if epsilon is None and delta is not None:
        raise ValueError("the SuperNode's configuration has a delta and no epsilon: which budget is meant is not clear")
    return None if epsilon is None else Budget(float(epsilon), float(1e-5 if delta is None else delta))


def _tells(context: Context) -> bool:
    """Whether the owner lets scores be told, which no epsilon covers; what is not plainly a yes is a no."""
    told = context.node_config.get("scores", _budget(context) is None)
    return str(told).lower() in ("true", "yes", "on", "1")


def _decline(message: Message, order: Order, why: Declined) -> Message:
    log(WARNING, "round %d of run %s is declined: %s", order.round, order.run, why)
    return decline_message(message, order, str(why))


def _copy(arrays: Arrays) -> Arrays:
    """A model that may be trained in place."""
    return {name: array.copy() for name, array in arrays.items()}


def _scores(
    trainer: Trainer, order: Order, context: Context, parameters: Arrays, personal: Arrays | None
) -> dict[str, float]:
    """How good both models are, if it was asked and the owner does not mind; a new client's own is the global one."""
    if trainer.score is None or not order.evaluate or not _tells(context):
        return {}
    return {"global": trainer.score(parameters), "personal": trainer.score(personal or parameters)}
