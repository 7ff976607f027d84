"""Enrollment: every node is offered the levels, and the level that its client chooses first is binding.

A client that chooses no level gets the strictest. A node that does not answer is queried again. Levels are recorded in the
ledger before any training. A client that later asks for a looser level stays in its own. A client that asks for a stricter
one is sent nothing further, because its privacy cost so far cannot be undone. A client's id ties it to its past over
restarts; a client without an id is identified by its node.
"""

from __future__ import annotations

import itertools
import time
from logging import INFO, WARNING
from typing import NamedTuple

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.serverapp import Grid
from msgspec.structs import replace

from fedhdp.flower.config import Deployment
from fedhdp.flower.protocol import Enrollment, LevelOffer, offer_message, parse_enrollment
from fedhdp.privacy.ledger import Ledger


class PendingQuery(NamedTuple):
    """A query without an answer so far."""

    node: int
    deadline: float  # by time.monotonic()


class Registry:
    """The clients of a run, their levels, and the nodes where they can be reached.

    Args:
        deployment: The configuration, with the levels on offer.
        ledger: The ledger that records levels.
        run: The run's id.
        members: Level by client from a checkpoint.
    """

    def __init__(self, deployment: Deployment, ledger: Ledger, run: str, members: dict[str, str] | None = None):
        self.deployment, self.ledger = deployment, ledger
        self.members = dict(members or {})  # client -> level, in the order of enrollment
        self.withdrawn: set[str] = set()  # want a stricter level, or have exhausted a budget of their own
        self.node_of: dict[str, int] = {}
        self._first_client_of: dict[int, str] = {}  # a node is one client in a run
        self._pending: dict[str, PendingQuery] = {}  # by message id
        self._queried_nodes: set[int] = set()
        self._nodes_to_requery: set[int] = set()
        self._offer = _offer(deployment, run)

    def poll(self, grid: Grid, requery: bool = False) -> None:
        """Query new nodes and enroll the clients that have answered, without waiting.

        Args:
            grid: Flower's connection to the nodes.
            requery: Also query the nodes again that did not answer or that declined a round.
        """
        connected = set(grid.get_node_ids())
        self.node_of = {client: node for client, node in self.node_of.items() if node in connected}
        if requery:
            self._queried_nodes -= self._nodes_to_requery
            self._nodes_to_requery.clear()
        self._queried_nodes &= connected
        self._query(grid, sorted(connected - self._queried_nodes))
        self._collect_answers(grid, connected)

    def wait_for_clients(self, grid: Grid, poll_seconds: float = 0.1) -> None:
        """Wait until enough clients are enrolled and no query is pending."""
        required, logged = self.deployment.min_available_clients, -1
        while True:
            self.poll(grid)
            if len(self.members) >= required and not self._pending:
                return
            if len(self.members) != logged:
                logged = len(self.members)
                log(INFO, "clients enrolled: %d; the first round needs %d", logged, required)
            time.sleep(poll_seconds)

    def wait_for_reachable_client(self, grid: Grid, poll_seconds: float = 1.0) -> None:
        """Wait while no client is reachable: such a round would be charged to all and teach nothing."""
        self.poll(grid, requery=True)
        for attempt in itertools.count():
            if any(self.reachable_node(client) is not None for client in self.members):
                return
            if attempt % 60 == 0:
                log(WARNING, "no client is reachable, or all have withdrawn: waiting before the next round is charged")
            time.sleep(poll_seconds)
            self.poll(grid)

    def requery(self, client: str) -> None:
        """Query a client again before the next round: its owner may want another level."""
        if client in self.node_of:
            self._nodes_to_requery.add(self.node_of[client])

    def reachable_node(self, client: str) -> int | None:
        """The node of a client that a round can be sent to, or None."""
        return None if client in self.withdrawn else self.node_of.get(client)

    def _query(self, grid: Grid, nodes: list[int]) -> None:
        if not nodes:
            return
        timeout = self.deployment.enroll_timeout_seconds
        offer = replace(self._offer, charged_rounds=self.ledger.charged_rounds(f"{self._offer.run}/"))
        messages = {node: offer_message(node, offer, timeout) for node in nodes}
        pushed = set(grid.push_messages(list(messages.values())))
        deadline = time.monotonic() + timeout
        for node, message in messages.items():
            if message.metadata.message_id in pushed:
                self._pending[message.metadata.message_id] = PendingQuery(node, deadline)
                self._queried_nodes.add(node)

    def _collect_answers(self, grid: Grid, connected: set[int]) -> None:
        if not self._pending:
            return
        replies = {reply.metadata.reply_to_message_id: reply for reply in grid.pull_messages(sorted(self._pending))}
        for message_id, query in sorted(self._pending.items(), key=lambda item: item[1]):
            reply, is_connected = replies.get(message_id), query.node in connected
            if reply is None and time.monotonic() < query.deadline and is_connected:
                continue
            del self._pending[message_id]
            if _is_gone(reply, is_connected):
                self._queried_nodes.discard(query.node)  # it is queried again when it reconnects
            elif reply is None or reply.has_error():
                self._nodes_to_requery.add(query.node)
                log(WARNING, "node %d did not answer the offer and is queried again before the next round", query.node)
            else:
                self._enroll(query.node, parse_enrollment(reply))

    def _enroll(self, node: int, enrollment: Enrollment) -> None:
        client = enrollment.client_id or f"node {node}"
        label = f"client {client[:8]}" if enrollment.client_id else client  # whoever has an id can pass as the client
        if not self._is_new_or_same(node, client, label):
            return
        requested_level = self._requested_level(enrollment, label)
        level = self.ledger.register(client, requested_level)
        if level not in self.deployment.levels:
            log(WARNING, "%s is registered for level %r, which is not on offer: not admitted", label, level)
            return
        self.node_of[client] = node
        self.members.setdefault(client, level)
        self.withdrawn.discard(client)
        if enrollment.budget_exhausted:
            self.withdrawn.add(client)
            log(WARNING, "%s has exhausted its own budget: it is sent nothing further", label)
        if self.deployment.is_stricter(requested_level, than=level):
            self.withdrawn.add(client)
            log(WARNING, "%s wants level %s but was in %s: it is sent nothing further", label, requested_level, level)
        elif requested_level != level:
            log(WARNING, "%s wants level %s but stays in %s: levels are never loosened", label, requested_level, level)

    def _is_new_or_same(self, node: int, client: str, label: str) -> bool:
        """Whether the client may use the node: neither has been seen with another one."""
        if self.node_of.get(client, node) != node:
            log(WARNING, "node %d claims to be %s, which is connected as another node: not admitted", node, label)
            self._queried_nodes.discard(node)  # the other connection may be an old one that is about to end
            return False
        first_client = self._first_client_of.setdefault(node, client)
        if first_client != client:
            self.withdrawn.add(first_client)  # the promises were made to a client that has left
            log(WARNING, "node %d claims to be %s but was another client before: not admitted", node, label)
            return False
        return True

    def _requested_level(self, enrollment: Enrollment, label: str) -> str:
        level, strictest = enrollment.level, self.deployment.strictest_level
        if level in self.deployment.levels:
            return level
        if level is None:
            log(INFO, "%s chooses no level and gets the strictest, %s", label, strictest)
        else:
            log(
                WARNING, "%s wants level %r, which is not on offer, and gets the strictest, %s", label, level, strictest
            )
        return strictest


def _offer(deployment: Deployment, run: str) -> LevelOffer:
    """The levels with what each promises."""
    names = deployment.levels_by_strictness
    groups = {group.name: group for group in deployment.mechanism(dict.fromkeys(names, 1)).groups}
    noise_multipliers = [deployment.advertised_noise(groups[name]) for name in names]
    sampling_rates = [groups[name].sampling_rate for name in names]
    return LevelOffer(run, 0, list(names), noise_multipliers, sampling_rates, deployment.rounds)


def _is_gone(reply: Message | None, is_connected: bool) -> bool:
    """Whether a node disconnected before it answered."""
    if reply is None:
        return not is_connected
    return reply.has_error() and reply.error.code == ErrorCode.NODE_UNAVAILABLE
