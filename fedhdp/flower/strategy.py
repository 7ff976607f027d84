"""FedHDP as a Flower strategy: the server of Algorithm 1 over messages. The mathematics is in ``server.py``.

A round: admit new clients, charge the round, sample the cohort, and send it the global model. Clip and sum the updates that
come back, add noise, and move the model and the clip. A client that is not reachable, answers too late, declines or sends an
invalid reply counts as absent: the denominator is public, so the privacy guarantee holds whoever answers.

Axis letters: P parameters, G groups, K scored clients.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Iterable, Iterator
from logging import INFO, WARNING
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedhdp import server
from fedhdp.basis import Moments
from fedhdp.errors import DataError
from fedhdp.flower.aggregation import start_aggregation
from fedhdp.flower.basis import read_basis, write_basis
from fedhdp.flower.config import Deployment
from fedhdp.flower.counts import MessageCounts
from fedhdp.flower.protocol import (
    BASIS,
    MOMENTS,
    SCORED_MODELS,
    Arrays,
    ClientReply,
    DeclinedRound,
    MatchedReplies,
    RefusedReply,
    RoundRequest,
    Score,
    flatten,
    match_replies,
    moments_request,
    parse_moments,
    parse_reply,
    request_message,
    select_metrics,
    send_and_gather,
    to_record,
    unflatten,
)
from fedhdp.flower.registry import Registry
from fedhdp.mechanism import SERVER, Mechanism
from fedhdp.metrics import BUILT_IN
from fedhdp.privacy.accounting import pluralize
from fedhdp.privacy.budget import DeploymentBilling
from fedhdp.results.metrics import clip_rows, group_rows
from fedhdp.results.schema import MetricInfo, MetricRow
from fedhdp.rng import COHORT, process_entropy, secret_generator
from fedhdp.server import Layers, ServerState


def layers_of(mechanism: Mechanism, arrays: Arrays) -> Layers | None:
    """The layers of a model that have clips of their own; ``InvalidValueError`` if they are not the model's."""
    return server.make_layers(mechanism, {name: array.size for name, array in arrays.items()})


class PendingRequest(NamedTuple):
    """A message to a client, and what it requests."""

    client: str
    group: int
    request: RoundRequest
    message: Message

    @property
    def label(self) -> str:
        """The client's name in a log, which must not show its whole id."""
        return f"client {self.client[:8]} ({self.request.level}, node {self.message.metadata.dst_node_id})"


class FedHDP(Strategy):
    """The server's side of a deployment.

    Args:
        deployment: The configuration.
        registry: The clients, their levels and their nodes.
        billing: Charges rounds; its mechanism is the one in force.
        run: The run's id, sent with every request.
        initial_arrays: The initial model.
        score: Returns a model's metrics on the server's test set by name, or the first one.
    """

    def __init__(
        self,
        deployment: Deployment,
        registry: Registry,
        billing: DeploymentBilling,
        run: str,
        initial_arrays: Arrays,
        score: Score | None = None,
    ):
        self.deployment, self.registry, self.billing, self.run = deployment, registry, billing, run
        self.initial_arrays, self.score = initial_arrays, score
        self.round = 0  # completed rounds
        self.state: ServerState | None = None
        self.basis: np.ndarray | None = None
        self.counts = MessageCounts(deployment.levels)
        self.metric_rows: list[MetricRow] = []  # of the last round
        self._pending: list[PendingRequest] = []
        self._last_scored_round = -1

    @property
    def model(self) -> Arrays:
        """The global model."""
        assert self.state is not None
        return unflatten(np.asarray(self.state.theta_P), self.initial_arrays)

    def admit(self, grid: Grid) -> None:
        """Let newly enrolled clients take part, and size the server's state for the mechanism's groups.

        The first time it also makes the public basis of the clients who opted out, if the deployment has one.

        Raises:
            DataError: If the basis cannot be made, since nobody opted out or no such client sends second moments.
        """
        self.registry.poll(grid)
        members = dict(self.registry.members)
        refused_levels = self.billing.refused_levels(members)
        for client in [client for client, level in members.items() if level in refused_levels]:
            self.registry.withdraw(client, f"level {members.pop(client)} allows no round of this run")
        self.billing.admit(members)
        mechanism = self.billing.mechanism
        if self.state is None:
            theta_P = jnp.asarray(flatten(self.initial_arrays))
            self.state = server.initial_state(mechanism, self.deployment.server, theta_P)
        if len(self.state.refused_G) != len(mechanism.groups):
            self.state = self.state._replace(refused_G=jnp.zeros(len(mechanism.groups), jnp.int32))
        if self.deployment.basis is not None and self.basis is None:
            self.basis = read_basis(self.deployment)
            if self.basis is None:
                self.basis = self._make_basis(grid)

    def _make_basis(self, grid: Grid) -> np.ndarray:
        """Ask the clients who opted out for their second moments, once in the run, and nobody else ever."""
        groups, budget_of = self.billing.mechanism.groups, self.billing.ledger.budget
        public = [group.opted_out and budget_of(group.name) is None for group in groups]  # a budget ends their rounds
        clients = [(client, number) for client, number in self._clients() if public[number]]
        if not clients:
            message = "basis must not be pca where nobody opted out: private clients' examples are not public, got pca"
            raise DataError(message, "basis", "pca")
        messages = self._make_requests(MOMENTS, clients, ArrayRecord(), evaluate=False)
        log(INFO, "asking %s who opted out for second moments", pluralize(len(messages), "client"))
        matched = self._match(send_and_gather(grid, messages, self.deployment.reply_timeout_seconds))
        moments: list[Moments] = []
        for pending in self._pending:
            if (reply := matched.by_client.get(pending.client)) is None:
                continue
            try:
                inputs = len(moments[0].sum_FF) if moments else None
                moments.append(parse_moments(reply, pending.request, inputs))
            except (DeclinedRound, RefusedReply) as error:
                log(WARNING, "second moments of %s are left out: %s", pending.label, error)
        return write_basis(self.deployment, moments)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Admit new clients, charge the round, sample the cohort, and request training from it.

        Raises:
            BudgetExhausted: If the round cannot be charged.
        """
        self.registry.wait_for_reachable_client(grid)
        self.admit(grid)
        mechanism = self.billing.charge_next()
        cohort = self._sample_cohort(mechanism)
        self.counts.start_round(mechanism.groups[group].name for _, group in cohort)
        evaluate = self._is_due(self.deployment.evaluate_every)
        messages = self._make_requests(MessageType.TRAIN, cohort, arrays, evaluate)
        self.counts.sent.update(pending.request.level for pending in self._pending)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Clip and sum the updates, add noise, move the model and the clip."""
        assert self.state is not None
        mechanism, scores = self.billing.mechanism, dict[str, dict[str, float]]()
        layers, noise_seed = layers_of(mechanism, self.initial_arrays), self.deployment.noise_seed
        aggregation = start_aggregation(mechanism, self.state, layers, noise_seed, self.round)
        for pending, reply in self._valid_replies(replies, is_training=True):
            assert reply.update_P is not None
            aggregation.add(reply.update_P, pending.group)
            scores[pending.client] = reply.scores
            self.counts.replies[pending.request.level] += 1
        self.state = aggregation.finish(self.deployment.server)
        self.billing.completed()
        self._count_infinite(aggregation.refused_G)
        self._report_round(scores)
        metrics = MetricRecord({"replies": self.counts.replies.total(), "clip": np.asarray(self.state.clip).tolist()})
        return to_record(self.model), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """After the last round, request scores from all clients of groups that are not dropped, if clients are scored."""
        is_due = self.deployment.evaluate_every and server_round == self.deployment.rounds
        groups, dropped = self.billing.mechanism.groups, self.billing.dropped_groups
        clients = [(client, group) for client, group in self._clients() if groups[group].name not in dropped]
        return self._make_requests(MessageType.EVALUATE, clients if is_due else [], arrays, evaluate=True)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Collect the scores of the final models."""
        valid_replies = self._valid_replies(replies, is_training=False)
        scores = {pending.client: reply.scores for pending, reply in valid_replies}
        self.metric_rows = self._score_rows(scores) + self._server_rows()
        return None

    def summary(self) -> None:
        """Log what is about to run."""
        levels = ", ".join(self.deployment.levels_by_strictness)
        log(INFO, "%s; levels from the strictest on: %s", pluralize(self.deployment.rounds), levels)

    def _clients(self) -> list[tuple[str, int]]:
        """Every admitted client with its group's number, in the mechanism's order."""
        members = self.billing.members.items()
        groups = enumerate(group.name for group in self.billing.mechanism.groups)
        return [(client, number) for number, name in groups for client, level in members if level == name]

    def _sample_cohort(self, mechanism: Mechanism) -> list[tuple[str, int]]:
        seed = self.deployment.cohort_seed
        words = process_entropy(8).tolist()
        rng = secret_generator(words) if seed is None else np.random.default_rng([seed, COHORT, self.round])
        clients = self._clients()
        group_C = np.array([group for _, group in clients])
        members_G = [np.flatnonzero(group_C == group) for group in range(len(mechanism.groups))]
        return [clients[number] for number in server.sample_cohort(mechanism, members_G, rng)]

    def _make_requests(
        self, kind: str, clients: Iterable[tuple[str, int]], model: ArrayRecord, evaluate: bool
    ) -> list[Message]:
        """The messages to those of the clients that are reachable."""
        groups, charged_rounds = self.billing.mechanism.groups, self.billing.charged
        self._pending = []
        for client, number in clients:
            node, group = self.registry.reachable_node(client), groups[number]
            if node is None:
                continue
            request = RoundRequest(
                token=secrets.token_hex(8),
                run=self.run,
                round=self.round,
                charged_rounds=charged_rounds,
                level=group.name,
                noise_multiplier=self.deployment.advertised_noise(group),
                sampling_rate=group.sampling_rate,
                pull=group.pull,
                metrics=list(self.deployment.metrics) if evaluate else [],
            )
            timeout = self.deployment.reply_timeout_seconds
            if kind == MOMENTS:
                message = moments_request(node, request, timeout)
            else:
                message = request_message(kind, node, model, request, timeout, self.basis)
            self._pending.append(PendingRequest(client, number, request, message))
        return [pending.message for pending in self._pending]

    def _valid_replies(
        self, replies: Iterable[Message], is_training: bool
    ) -> Iterator[tuple[PendingRequest, ClientReply]]:
        """The valid replies in the order of the requests; every other client is counted as absent."""
        matched = self._match(replies)
        for pending in self._pending:
            message = matched.by_client.get(pending.client)
            if message is None:
                self.counts.absences["failed" if pending.client in matched.errors else "absent"] += 1
                continue
            try:
                reply = parse_reply(message, pending.request, self.initial_arrays, is_training)
            except DeclinedRound as error:
                self.counts.absences["declined"] += 1
                self.registry.requery(pending.client)
                log(INFO, "%s declines: %s", pending.label, error)
            except RefusedReply as error:
                self.counts.absences[error.kind] += 1
                self.counts.refused[pending.request.level][error.kind] += 1
                log(WARNING, "a reply of %s is refused: %s", pending.label, error)
            else:
                yield pending, reply

    def _match(self, replies: Iterable[Message]) -> MatchedReplies:
        """Match replies to clients; a message has its id since it was sent."""
        matched = match_replies(
            {pending.message.metadata.message_id: pending.client for pending in self._pending}, replies
        )
        by_client = {pending.client: pending for pending in self._pending}
        for client in matched.duplicates:
            self.counts.refused[by_client[client].request.level]["duplicate"] += 1
            log(WARNING, "another reply of %s is refused: duplicate", by_client[client].label)
        if matched.unsolicited:
            log(WARNING, "%d replies to messages that were not sent are refused: replayed", matched.unsolicited)
        self.counts.unsolicited += matched.unsolicited
        for client, code in matched.errors.items():
            log(WARNING, "%s fails with error %d", by_client[client].label, code)
        return matched

    def _count_infinite(self, refused_G: np.ndarray) -> None:
        """Count updates of finite numbers whose norm is infinite as refused."""
        groups = self.billing.mechanism.groups
        for group, count in zip(groups, refused_G.tolist(), strict=True):
            if count:
                self.counts.refused[group.name]["not finite"] += count
                self.counts.replies[group.name] -= count

    def _report_round(self, scores: dict[str, dict[str, float]]) -> None:
        """Count the round, write its metrics, and log it."""
        assert self.state is not None
        self.metric_rows = self._score_rows(scores)  # of the model that was sent, so before the round is counted
        self.round += 1
        epsilon_of = self.billing.epsilon()
        self.metric_rows += clip_rows(self.round, self.billing.mechanism.layers, self.state.clip)
        self.metric_rows += self.counts.rows(self.round, epsilon_of)
        if self._is_due(self.deployment.server_evaluate_every or self.deployment.evaluate_every):
            self.metric_rows += self._server_rows()
        log(INFO, "round %d/%d: %s", self.round, self.deployment.rounds, self.counts.format_round(epsilon_of))

    def _score_rows(self, scores: dict[str, dict[str, float]]) -> list[MetricRow]:
        """The clients' scores by group; for a group of one client, this is the client's own score."""
        group_of, names = dict(self._clients()), [group.name for group in self.billing.mechanism.groups]
        rows = []
        for model, metric in itertools.product(SCORED_MODELS, metric_infos(self.deployment)):
            name = f"{model}/{metric.name}"
            clients = [client for client, client_scores in scores.items() if name in client_scores]
            if clients:
                group_K = np.array([group_of[client] for client in clients])
                score_K = np.array([scores[client][name] for client in clients])
                rows += group_rows(self.round, model, metric, names, group_K, score_K)
        return rows

    def _server_rows(self) -> list[MetricRow]:
        if self.score is None or self._last_scored_round == self.round:
            return []
        self._last_scored_round = self.round
        model = self.model if self.basis is None else self.model | {BASIS: self.basis}
        values = select_metrics(self.score(model), self.deployment.metrics).items()
        return [MetricRow(self.round, SERVER, "global", name, value) for name, value in values if not math.isnan(value)]

    def _is_due(self, every: int) -> bool:
        """Whether something that happens every so many rounds is due after this round; 0: never."""
        return every > 0 and self.round > 0 and self.round % every == 0


def metric_infos(deployment: Deployment) -> tuple[MetricInfo, ...]:
    """The deployment's metrics; of those that are not built in, the higher is the better."""
    known = [BUILT_IN.get(name) for name in deployment.metrics]
    pairs = zip(deployment.metrics, known, strict=True)
    return tuple(
        MetricInfo(n, n != "loss") if m is None else MetricInfo(n, m.higher_is_better, m.percent) for n, m in pairs
    )
