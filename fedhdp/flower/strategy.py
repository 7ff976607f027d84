"""FedHDP as a Flower strategy: who is asked, what is sent, what of the replies counts; the rest is ``server.py``.

A round: newcomers are let in, the round is charged, every client tosses its coin, and those who are drawn and reachable
are sent the global model. Who does not answer in time, or not in order, counts as absent: the denominator is fixed, so
the promise stays true. Each update is clipped here, whatever the client did.

Axis letters: P parameters, G groups.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable
from logging import INFO, WARNING
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedhdp import server
from fedhdp.flower.config import Deployment
from fedhdp.flower.exchange import Answers, tie
from fedhdp.flower.protocol import (
    Arrays,
    Declined,
    Order,
    Refused,
    Reply,
    as_record,
    flat,
    order_message,
    read_reply,
    unflat,
)
from fedhdp.flower.registry import Registry
from fedhdp.mechanism import SERVER, RoundParams
from fedhdp.privacy.accounting import format_epsilon, pluralize
from fedhdp.privacy.budget import DeploymentBilling
from fedhdp.results.metrics import MetricRow, group_rows
from fedhdp.rng import COHORT, NOISE, os_entropy, stream
from fedhdp.server import ServerState, Sums

ABSENT, DECLINED, FAILED = "absent", "declined", "failed"


@jax.jit
def _clip_and_sum(terms: RoundParams, clip: jax.Array, update_CP: jax.Array, *who: jax.Array) -> server.Sums:
    return server.clip_and_sum(terms, clip, server.dense_updates(update_CP), *who)


_finish_round = jax.jit(server.finish_round, static_argnums=0)


class Asked(NamedTuple):
    """A client that was sent a message, and which."""

    client: str
    group: int
    order: Order
    message: Message


def _who(asked: Asked) -> str:
    """A client as a log may name it: an identity is a password of sorts."""
    return f"client {asked.client[:8]} ({asked.order.level}, node {asked.message.metadata.dst_node_id})"


class FedHDP(Strategy):
    """The server's side of a deployment; ``start_model`` says what the model's arrays are and where they start."""

    def __init__(
        self,
        deployment: Deployment,
        registry: Registry,
        billing: DeploymentBilling,
        run: str,
        start_model: Arrays,
        score: Callable[[Arrays], float] | None = None,
    ):
        self.deployment, self.registry, self.billing, self.run = deployment, registry, billing, run
        self.like, self.score = start_model, score
        self.round = 0  # rounds completed
        self.state: ServerState | None = None
        self.refused: dict[str, Counter[str]] = {name: Counter() for name in deployment.levels}
        self.strangers = 0  # answers to messages that were never sent
        self.rows: list[MetricRow] = []  # of the last round
        self._drawn: Counter[str] = Counter()
        self._asked: list[Asked] = []
        self._scored = -1  # the round whose model was last looked at on the server's test set

    @property
    def model(self) -> Arrays:
        """The global model as it stands."""
        assert self.state is not None
        return unflat(np.asarray(self.state.theta_P), self.like)

    def let_in(self, grid: Grid) -> None:
        """Let the clients who have registered by now take part, and be ready for as many groups as there are."""
        self.registry.listen(grid)
        self.billing.admit(self.registry.members)
        if self.state is None:
            theta_P = jnp.asarray(flat(self.like))
            self.state = server.initial_state(self.billing.mechanism, self.deployment.server, theta_P)
        groups = len(self.billing.mechanism.groups)
        if self.state.refused_G.shape != (groups,):
            self.state = self.state._replace(refused_G=jnp.zeros(groups, jnp.int32))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Charge the round, draw the cohort, and write to those of it who can be reached."""
        self.registry.wait_for_somebody(grid)
        self.let_in(grid)
        mechanism = self.billing.charge_next()
        charged = self.billing.charged
        everyone = self._clients()
        every = self.deployment.evaluate_every
        evaluate = bool(every and self.round and self.round % every == 0)
        seed = self.deployment.cohort_seed
        rng = np.random.default_rng(None if seed is None else [seed, COHORT, self.round])
        self._asked, self._drawn = [], Counter()
        for number in server.sample_cohort(mechanism, rng):
            client, group = everyone[number]
            self._drawn[mechanism.groups[group].name] += 1
            self._ask(MessageType.TRAIN, client, group, arrays, charged, evaluate)
        return [asked.message for asked in self._asked]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Clip and sum what counts, noise it, move the model and the clip."""
        assert self.state is not None
        mechanism = self.billing.mechanism
        terms, answers, came, counts = mechanism.round_params, self._tie(replies), Counter[str](), Counter[str]()
        groups = [group.name for group in mechanism.groups]
        nobody_G = jnp.zeros(len(groups), jnp.int32)
        sums = Sums(jnp.zeros_like(self.state.theta_P), jnp.float32(0), nobody_G)
        scores: dict[str, dict[str, float]] = {}
        for asked in self._asked:
            reply = self._read(asked, answers, counts, training=True)
            if reply is None or reply.update_P is None:
                continue
            came[groups[asked.group]] += 1
            scores[asked.client] = reply.scores
            one = (reply.update_P[None], np.array([asked.group]), np.array([True]))
            sums = jax.tree.map(jnp.add, sums, _clip_and_sum(terms, self.state.clip, *one))
        for name, count in zip(groups, np.asarray(sums.refused_G)):  # finite numbers whose norm is not
            self.refused[name].update({"not finite": int(count)} if count else {})
            came[name] -= int(count)
        self.state = _finish_round(self.deployment.server, terms, self.state, sums, self._noise_key())
        self.billing.completed()
        self.rows = self._score_rows(self.round, scores)  # of the model that was sent
        self.round += 1
        self.rows += self._round_rows(came)
        look = self.deployment.score_every or self.deployment.evaluate_every
        if look and self.round % look == 0:
            self.rows += self._server_rows()
        self._say(came, counts)
        return as_record(self.model), MetricRecord({"replies": came.total(), "clip": float(self.state.clip)})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """After the last round, and if clients are asked at all: everybody but those who are left out."""
        self._asked = []
        if self.deployment.evaluate_every and server_round == self.deployment.rounds:
            charged, groups = self.billing.charged, self.billing.mechanism.groups
            for client, group in self._clients():
                if groups[group].name not in self.billing.dropped_groups:
                    self._ask(MessageType.EVALUATE, client, group, arrays, charged, True)
        return [asked.message for asked in self._asked]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """How good the models are for each group."""
        answers, counts = self._tie(replies), Counter[str]()
        read = ((asked.client, self._read(asked, answers, counts, training=False)) for asked in self._asked)
        scores = {client: reply.scores for client, reply in read if reply is not None}
        self.rows = self._score_rows(self.round, scores) + self._server_rows()
        return None

    def summary(self) -> None:
        """Say what is about to be run."""
        log(INFO, "%s; levels, the strictest first: %s", pluralize(self.deployment.rounds), self.deployment.strictness)

    def _clients(self) -> list[tuple[str, int]]:
        """Every client with its group, in the order in which a mechanism has its clients."""
        members = self.registry.members.items()
        groups = enumerate(group.name for group in self.billing.mechanism.groups)
        return [(client, number) for number, name in groups for client, level in members if level == name]

    def _ask(self, kind: str, client: str, group: int, model: ArrayRecord, charged: int, evaluate: bool) -> None:
        node, mechanism = self.registry.reachable(client), self.billing.mechanism
        if node is None:
            return
        chosen = mechanism.groups[group]
        promised = (chosen.name, self.deployment.told(chosen), chosen.sampling_rate)
        order = Order(secrets.token_hex(8), self.run, self.round, charged, *promised, chosen.pull, evaluate)
        message = order_message(kind, node, model, order, self.deployment.reply_seconds)
        self._asked.append(Asked(client, group, order, message))

    def _tie(self, replies: Iterable[Message]) -> Answers:
        """Each reply with its client; messages have their names by now, since they were sent."""
        answers = tie({asked.message.metadata.message_id: asked.client for asked in self._asked}, replies)
        level_of = {asked.client: asked.order.level for asked in self._asked}
        for client in answers.duplicates:
            self.refused[level_of[client]]["duplicate"] += 1
            log(WARNING, "another reply of client %s (%s) is refused: duplicate", client[:8], level_of[client])
        if answers.strangers:
            log(WARNING, "%d replies to messages that were not sent are refused: replayed", answers.strangers)
        self.strangers += answers.strangers
        return answers

    def _read(self, asked: Asked, answers: Answers, counts: Counter[str], training: bool) -> Reply | None:
        """The reply of a client if it counts; else it is counted why not."""
        message = answers.by_client.get(asked.client)
        if message is None:
            counts[FAILED if asked.client in answers.failed else ABSENT] += 1
            return None
        try:
            return read_reply(message, asked.order, self.like, training)
        except Declined as error:
            counts[DECLINED] += 1
            self.registry.doubt(asked.client)
            log(INFO, "%s declines: %s", _who(asked), error)
        except Refused as error:
            self.refused[asked.order.level][error.kind] += 1
            counts[error.kind] += 1
            log(WARNING, "a reply of %s is refused: %s", _who(asked), error)
        return None

    def _score_rows(self, round: int, scores: dict[str, dict[str, float]]) -> list[MetricRow]:
        """What clients say of the global model and of their own, by group; of a group of one that is its own score."""
        group_of, names = dict(self._clients()), [group.name for group in self.billing.mechanism.groups]
        rows = []
        for model in ("global", "personal"):
            told = [(group_of[client], said[model]) for client, said in scores.items() if model in said]
            if told:
                group_K, score_K = (np.array(column) for column in zip(*told))
                rows += group_rows(round, model, names, group_K, score_K)
        return rows

    def _server_rows(self) -> list[MetricRow]:
        if self.score is None or self._scored == self.round:
            return []
        self._scored = self.round
        return [MetricRow(self.round, SERVER, "global", "accuracy", float(self.score(self.model)))]

    def _round_rows(self, came: Counter[str]) -> list[MetricRow]:
        assert self.state is not None
        rows = [MetricRow(self.round, SERVER, "global", "clip", float(self.state.clip))]
        if self.strangers:
            rows.append(MetricRow(self.round, SERVER, "global", "refused: replayed", float(self.strangers)))
        sent = Counter(asked.order.level for asked in self._asked)
        for name, epsilon in self.billing.epsilon().items():
            values: dict[str, float] = {"drawn": self._drawn[name], "sent": sent[name], "replies": came[name]}
            values |= {"refused": self.refused[name].total(), "epsilon": epsilon}
            values |= {f"refused: {kind}": count for kind, count in self.refused[name].items()}
            rows += [MetricRow(self.round, name, "global", metric, float(value)) for metric, value in values.items()]
        return rows

    def _say(self, came: Counter[str], counts: Counter[str]) -> None:
        told: dict[str, dict[str, float]] = {}
        for row in self.rows:
            if row.round == self.round and row.group != SERVER:
                told.setdefault(row.group, {})[row.metric] = row.value
        by_group = "; ".join(
            f"{name} {came[name]} of {v['sent']:.0f} sent, epsilon {format_epsilon(v['epsilon'])}"
            for name, v in told.items()
        )
        others = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        place = f"round {self.round}/{self.deployment.rounds}"
        log(INFO, "%s: %s%s", place, by_group, f"; {others}" if others else "")

    def _noise_key(self) -> jax.Array:
        seed = self.deployment.noise_seed
        words = os_entropy(2) if seed is None else stream(seed, NOISE, self.round)
        return jax.random.wrap_key_data(jnp.asarray(words))
