"""The ClientApp around a client's training, in JAX, PyTorch or any other framework.

An app provides ``fit(parameters, personal, pull, round)``. It gets the global and the personal model as named NumPy arrays
and returns both after training. The personal model is pulled towards the global model of the request: each step is
``personal − rate·(gradient + pull·(personal − parameters))``. This module does the rest: it enrolls the client at its
owner's level, keeps the personal model, charges rounds in the client's ledger, and declines rounds.

The owner's settings are in the SuperNode's ``--node-config``:

    privacy="strict"         the level; default: the strictest on offer
    directory="DIR"          where the client keeps its state
    epsilon=2.0 delta=1e-5   the client's lifetime budget, enforced by the client
    scores=false             never send scores; the default is true without a budget and false with one

What the client does, by what it knows of the run:

    promised    message     condition                             action
    ─────────   ─────────   ───────────────────────────────────   ─────────────────────────────────────────────────────
    nothing     query                                             store the promise, charge all rounds that the budget
                                                                  allows, reply with the enrollment
    nothing     train, …                                          decline
    a level     query                                             reply with the enrollment; the promise stays
    a level     train       keeps the promise, within budget      charge the round if needed, train, reply with the update
    a level     evaluate    keeps the promise, within budget      reply with the scores, unless the owner forbids it
    a level     moments     its owner opted out, without budget   reply with the second moments of its inputs
    a level     train, …    otherwise                             decline
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

from fedhdp.basis import Moments
from fedhdp.errors import ConfigError, ModelError
from fedhdp.flower.client_state import (
    BUDGET_EXHAUSTED,
    ClientStateDir,
    InMemoryState,
    Promise,
    check_request,
    make_promise,
)
from fedhdp.flower.protocol import (
    BASIS,
    MOMENTS_ACTION,
    Arrays,
    DeclinedRound,
    Enrollment,
    LevelOffer,
    RoundRequest,
    Score,
    array_shapes,
    decline_message,
    enrollment_message,
    moments_message,
    parse_moments_request,
    parse_offer,
    parse_request,
    reply_message,
    select_metrics,
    without_basis,
)
from fedhdp.mechanism import MAX_VALUE
from fedhdp.privacy.ledger import Budget

Fit = Callable[[Arrays, Arrays, float, int], tuple[Arrays, Arrays | None]]
DEFAULT_BUDGET_DELTA = 1e-5


class Trainer(NamedTuple):
    """How one client trains.

    Args:
        fit: ``fit(parameters, personal, pull, round)`` returns the trained global and personal model; None for a client
            without a personal model. ``round`` is the number of completed rounds.
        score: Returns a model's metrics on the client's test examples by name, if it has any; a single number is the first
            metric of the deployment. Only metrics that the deployment names are sent, and only finite ones.
        moments: Returns the second moments of the client's training inputs, for a basis of the clients who opted out. It
            is called if the owner opted out, never else. None: the client declines.

    With such a basis the models that ``fit`` and ``score`` get have it as the array ``public/basis``, which stays as it is.
    """

    fit: Fit
    score: Score | None = None
    moments: Callable[[], Moments] | None = None


class OwnerSettings(NamedTuple):
    """What the client's owner configured."""

    level: str | None
    budget: Budget | None
    sends_scores: bool


def configured_level(context: Context) -> str | None:
    """The level in the SuperNode's configuration, or None."""
    level = context.node_config.get("privacy")
    return level if isinstance(level, str) else None


def client_app(
    trainer: Callable[[Context], Trainer], level: Callable[[Context], str | None] = configured_level
) -> ClientApp:
    """A ClientApp that takes part in a deployment.

    Args:
        trainer: Returns a client's trainer.
        level: Returns the level that a client's owner chose; None: the strictest on offer.
    """
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        settings, offer = _settings(context, level), parse_offer(message)
        return enrollment_message(message, _enroll(_open_state(context), offer, settings))

    @app.query(MOMENTS_ACTION)
    def moments(message: Message, context: Context) -> Message:
        settings, state, request = _settings(context, level), _open_state(context), parse_moments_request(message)
        try:
            _check_opted_out(state, request, settings)
            client_moments = trainer(context).moments
            if client_moments is None:
                raise DeclinedRound("this app has no second moments")
        except DeclinedRound as error:
            return _decline(message, request, error)
        return moments_message(message, request, client_moments())

    @app.train()
    def train(message: Message, context: Context) -> Message:
        parameters, request = parse_request(message)
        settings, state = _settings(context, level), _open_state(context)
        client_trainer = trainer(context)  # a client that cannot train fails before a round is charged
        try:
            _charge(state, request, settings)
        except DeclinedRound as error:
            return _decline(message, request, error)
        update, personal = _fit(client_trainer, state, parameters, request)
        scores = _scores(client_trainer, request, settings, parameters, personal)
        return reply_message(message, request, update, scores)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        parameters, request = parse_request(message)
        settings, state = _settings(context, level), _open_state(context)
        try:
            promise = check_request(request, state.load_promises(), settings.level)
            promise.last_round = max(request.charged_rounds - 1, promise.last_round)
            if _is_exhausted(state, promise, settings.budget):
                raise DeclinedRound(BUDGET_EXHAUSTED)
        except DeclinedRound as error:
            return _decline(message, request, error)
        scores = _scores(trainer(context), request, settings, parameters, state.load_personal(parameters))
        return reply_message(message, request, None, scores)

    return app


def _settings(context: Context, level: Callable[[Context], str | None]) -> OwnerSettings:
    config = context.node_config
    epsilon, delta = config.get("epsilon"), config.get("delta")
    if epsilon is None and delta is not None:
        raise ConfigError(f"node-config has delta {delta} without epsilon", field="epsilon")
    budget = (
        None if epsilon is None else Budget(float(epsilon), float(DEFAULT_BUDGET_DELTA if delta is None else delta))
    )
    sends_scores = str(config.get("scores", budget is None)).lower() in ("true", "yes", "on", "1")  # else: no
    return OwnerSettings(level(context), budget, sends_scores)


def _open_state(context: Context) -> InMemoryState:
    directory = context.node_config.get("directory")
    return ClientStateDir(Path(str(directory))) if directory else InMemoryState(context.state)


def _enroll(state: InMemoryState, offer: LevelOffer, settings: OwnerSettings) -> Enrollment:
    """Store and charge what a new run promises; the first promise of a run is binding."""
    with state.locked():
        promises = state.load_promises()
        if offer.run not in promises:
            promise = make_promise(offer, settings.level)
            _charge_ahead(state, offer, promise, settings.budget)
            state.save_promises(promises | {offer.run: promise})
            level, budget = settings.level or "the strictest on offer", settings.budget or "none"
            log(INFO, "run %s: level %s, budget %s, scores %s", offer.run, level, budget, settings.sends_scores)
        promise = state.load_promises()[offer.run]
        promise.last_round = max(offer.charged_rounds, promise.last_round)
        is_exhausted = _is_exhausted(state, promise, settings.budget)
        return Enrollment(settings.level, state.client_id(), is_exhausted)


def _charge_ahead(state: InMemoryState, offer: LevelOffer, promise: Promise, budget: Budget | None) -> None:
    """Charge all rounds that a run is to have, or as many as the budget allows.

    Sampling amplifies privacy only if every round is charged, sampled or not. The client does not hear of rounds after the
    last one in which it is sampled.
    """
    rounds = int(min(max(0, offer.total_rounds - offer.charged_rounds), state.rounds_left(promise.cost(), budget)))
    if rounds:
        state.charge(offer.run, promise.cost(rounds), budget)
    promise.charged_rounds += rounds


def _is_exhausted(state: InMemoryState, promise: Promise, budget: Budget | None) -> bool:
    """Whether no further round of a run can be charged."""
    all_used = promise.last_round >= promise.charged_rounds
    return state.is_overspent(budget) or (all_used and state.rounds_left(promise.cost(), budget) < 1)


def _check_opted_out(state: InMemoryState, request: RoundRequest, settings: OwnerSettings) -> None:
    """Second moments leave a client without noise: its owner must have chosen a level without noise by its name.

    Raises:
        DeclinedRound: If the owner did not, or has a budget.
    """
    with state.locked():
        promise = check_request(request, state.load_promises(), settings.level)
        if settings.level != promise.level or promise.noise_multiplier > 0:
            raise DeclinedRound("second moments are of clients who opted out")
        if state.rounds_left(promise.cost(), settings.budget) < 1:
            raise DeclinedRound(BUDGET_EXHAUSTED)


def _charge(state: InMemoryState, request: RoundRequest, settings: OwnerSettings) -> None:
    """Check that the round keeps the promise and is charged, before anything is computed.

    Raises:
        DeclinedRound: If it does not, or the budget does not allow it.
    """
    with state.locked():
        promises = state.load_promises()
        promise = check_request(request, promises, settings.level)
        if state.is_overspent(settings.budget):
            raise DeclinedRound(BUDGET_EXHAUSTED)
        promise.last_round = max(request.charged_rounds, promise.last_round + 1)  # each request is a round
        if promise.last_round > promise.charged_rounds:
            state.charge(request.run, promise.cost(promise.last_round - promise.charged_rounds), settings.budget)
            promise.charged_rounds = promise.last_round
        state.save_promises(promises)


def _fit(
    trainer: Trainer, state: InMemoryState, parameters: Arrays, request: RoundRequest
) -> tuple[Arrays, Arrays | None]:
    """Train both models, keep the personal model, and return the update and the personal model."""
    previous = state.load_personal(parameters)
    start, personal_start = _copy(parameters), _copy(previous or parameters)  # fit may train in place
    trained, personal = trainer.fit(start, personal_start, request.pull, request.round)
    if personal is not None and BASIS in parameters:
        personal = {**personal, BASIS: parameters[BASIS]}
    if personal is not None and array_shapes(personal) != array_shapes(parameters):
        shapes, expected = array_shapes(personal), array_shapes(parameters)
        raise ModelError(f"fit returned a personal model of shapes {shapes}, not {expected}", "personal", shapes)
    if personal is not None and all(np.isfinite(array).all() for array in personal.values()):
        state.save_personal(personal)
    elif personal is not None:
        log(WARNING, "the personal model of round %d is not finite: the previous one stays", request.round)
        personal = previous
    return {name: trained[name] - array for name, array in without_basis(parameters).items()}, personal


def _decline(message: Message, request: RoundRequest, error: DeclinedRound) -> Message:
    log(WARNING, "round %d of run %s is declined: %s", request.round, request.run, error)
    return decline_message(message, request, str(error))


def _copy(arrays: Arrays) -> Arrays:
    return {name: array.copy() for name, array in arrays.items()}


def _scores(
    trainer: Trainer, request: RoundRequest, settings: OwnerSettings, parameters: Arrays, personal: Arrays | None
) -> dict[str, float]:
    """The scores of both models, if requested and allowed; the global model stands in for a missing personal model."""
    if trainer.score is None or not request.evaluate or not settings.sends_scores:
        return {}
    scores = {}
    for model, arrays in (("global", parameters), ("personal", personal or parameters)):
        for metric, score in select_metrics(trainer.score(arrays), request.metrics).items():
            if abs(score) <= MAX_VALUE:  # an undefined metric is not sent
                scores[f"{model}/{metric}"] = score
    return scores
