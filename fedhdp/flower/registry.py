"""Enrollment: every node is offered the levels, and the level that its client chooses first is binding.

A client that chooses no level gets the strictest. A node that does not answer is queried again when the time of its query
is up, with twice the time. An error counts as no answer, so the times of queries do not depend on what nodes send. Levels
are recorded in the ledger before any training. A client that later asks for a looser level stays in its own. A client that
asks for a stricter one is sent nothing further, because its privacy cost so far cannot be undone. A client's id ties it to
its past over restarts; a client without an id is identified by its node.
"""

from __future__ import annotations

import math
import time
from collections import deque
from logging import INFO, WARNING
from typing import NamedTuple

from flwr.common.logger import log
from flwr.serverapp import Grid
from msgspec.structs import replace

from fedhdp.flower.config import Deployment
from fedhdp.flower.protocol import Enrollment, LevelOffer, offer_message, parse_enrollment
from fedhdp.privacy.accounting import pluralize
from fedhdp.privacy.ledger import Ledger

HOUR = 3600.0
MAX_LOGGED = 200  # letters of a node's text
MAX_TIMEOUT_FACTOR = 8  # of queries to a node that answers none


class Query(NamedTuple):
    """The latest query to a node."""

    number: int  # from 1, of the queries in a row without an answer
    repeat_at: float  # by time.monotonic(); infinite once the node has answered
    message_id: str = ""  # empty once there is a reply
    blocked_by: int | None = None  # another node where the same client is connected

    @property
    def is_first(self) -> bool:
        """Whether it is a node's first query, and pending."""
        return self.number == 1 and self.message_id != ""


class WaitLog:
    """Logs what a run waits for, and for how long: first after ``delay`` seconds, then every ``interval`` seconds."""

    def __init__(self, delay: float = 0.0, interval: float = 30.0):
        self.started = time.monotonic()
        self._next, self._interval = self.started + delay, interval

    def log(self, reason: str) -> None:
        """Log the reason, if a line is due."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._interval
            level = INFO if now < self.started + self._interval else WARNING
            log(level, "waiting for %.0f s: %s", now - self.started, reason)


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
        self._queries: dict[int, Query] = {}  # by connected node
        self._registered_at: deque[float] = deque()  # times of new registrations within the last hour
        self._offer = _offer(deployment, run)

    def poll(self, grid: Grid) -> None:
        """Query the nodes that are due and enroll the clients that have answered, without waiting."""
        connected = set(grid.get_node_ids())
        if self.deployment.allowed_nodes:
            connected &= set(self.deployment.allowed_nodes)
        self.node_of = {client: node for client, node in self.node_of.items() if node in connected}
        blocked = {node for node, query in self._queries.items() if query.blocked_by not in connected | {None}}
        self._queries = {node: self._queries[node] for node in self._queries.keys() & (connected - blocked)}
        self._collect_answers(grid)
        if self._query(grid, sorted(connected)):
            self._collect_answers(grid)

    def wait_for_clients(self, grid: Grid, poll_seconds: float = 0.1) -> None:
        """Wait until enough clients are enrolled and every node has had the time of a query to answer."""
        required, wait_log, start_at = self.deployment.min_available_clients, WaitLog(), math.inf
        while True:
            self.poll(grid)
            if len(self.members) >= required:
                start_at = min(start_at, time.monotonic() + self.deployment.enroll_timeout_seconds)
                if time.monotonic() >= start_at or not any(query.is_first for query in self._queries.values()):
                    return
            needs = f"the first round needs {pluralize(required, 'client')}"
            wait_log.log(f"{needs}, {len(self.members)} enrolled; {self._nodes()}")
            time.sleep(poll_seconds)

    def wait_for_reachable_client(self, grid: Grid, poll_seconds: float = 1.0) -> None:
        """Wait while no client is reachable: such a round would be charged to all and teach nothing."""
        wait_log = WaitLog()
        self.poll(grid)
        while not any(self.reachable_node(client) is not None for client in self.members):
            reason = f"none of {len(self.members)} clients is reachable, {len(self.withdrawn)} of them withdrew"
            wait_log.log(f"{reason}; {self._nodes()}; no round is charged")
            time.sleep(poll_seconds)
            self.poll(grid)

    def requery(self, client: str) -> None:
        """Query a client again before the next round: its owner may want another level."""
        if client in self.node_of:
            self._queries.pop(self.node_of[client], None)

    def withdraw(self, client: str, reason: str) -> None:
        """Send a client nothing further, until it enrolls again."""
        if client not in self.withdrawn:
            self.withdrawn.add(client)
            log(WARNING, "client %s is sent nothing further: %s", client[:8], reason)

    def reachable_node(self, client: str) -> int | None:
        """The node of a client that a round can be sent to, or None."""
        return None if client in self.withdrawn else self.node_of.get(client)

    def _query(self, grid: Grid, nodes: list[int]) -> bool:
        """Query those of the nodes that are due; whether there are any."""
        now, numbers = time.monotonic(), dict[int, int]()
        for node in nodes:
            previous = self._queries.get(node, Query(0, -math.inf))
            if now >= previous.repeat_at:
                numbers[node] = previous.number + 1
        if not numbers:
            return False
        offer = replace(self._offer, charged_rounds=self.ledger.charged_rounds(f"{self._offer.run}/"))
        messages = {node: offer_message(node, offer, self._timeout(number)) for node, number in numbers.items()}
        pushed = set(grid.push_messages(list(messages.values())))
        for node, message in messages.items():
            message_id, number = message.metadata.message_id, numbers[node]
            if message_id in pushed:
                self._queries[node] = Query(number, now + self._timeout(number), message_id)
            if number > 1:
                log(WARNING, "node %d did not answer the offer; query %d", node, number)
        return True

    def _collect_answers(self, grid: Grid) -> None:
        pending = {node: query.message_id for node, query in sorted(self._queries.items()) if query.message_id}
        pulled = grid.pull_messages(sorted(pending.values())) if pending else []
        replies = {reply.metadata.reply_to_message_id: reply for reply in pulled}
        for node, message_id in pending.items():
            if (reply := replies.get(message_id)) is None:
                continue
            query = self._queries[node]._replace(message_id="")
            self._queries[node] = query if reply.has_error() else query._replace(repeat_at=math.inf)
            if reply.has_error():
                log(WARNING, "node %d answered the offer with error %d", node, reply.error.code)
            else:
                self._enroll(node, parse_enrollment(reply))

    def _timeout(self, number: int) -> float:
        """The seconds to answer a query by its number: a slow node gets more time each time."""
        return self.deployment.enroll_timeout_seconds * min(2 ** (number - 1), MAX_TIMEOUT_FACTOR)

    def _nodes(self) -> str:
        """The connected nodes in words."""
        silent = sorted(node for node, query in self._queries.items() if query.repeat_at < math.inf)
        names = ", ".join(map(str, silent[:3])) + (", …" if len(silent) > 3 else "")
        without_answer = f", {len(silent)} without an answer ({names})" if silent else ""
        return f"{pluralize(len(self._queries), 'node')} connected{without_answer}"

    def _enroll(self, node: int, enrollment: Enrollment) -> None:
        client = enrollment.client_id or f"node {node}"
        label = f"client {client[:8]}" if enrollment.client_id else client  # whoever has an id can pass as the client
        if not self._is_new_or_same(node, client, label):
            return
        requested_level = self._requested_level(enrollment, label)
        if not self._may_register(node, client, requested_level, label):
            return
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
            self._queries[node] = self._queries[node]._replace(blocked_by=self.node_of[client])  # may be about to end
            return False
        first_client = self._first_client_of.setdefault(node, client)
        if first_client != client:
            self.withdrawn.add(first_client)  # the promises were made to a client that has left
            log(WARNING, "node %d claims to be %s but was another client before: not admitted", node, label)
            return False
        return True

    def _may_register(self, node: int, client: str, level: str, label: str) -> bool:
        """Whether the client is known, or may register: neither its level nor this hour is full."""
        if self.ledger.group_of(client) is not None:
            return True
        limit, hourly = self.deployment.max_clients.get(level), self.deployment.max_registrations_per_hour
        size = self.ledger.clients(level) if level in self.ledger.groups() else 0
        if limit is not None and size >= limit:
            log(WARNING, "%s wants level %s, which has its %d clients: not admitted", label, level, limit)
            return False
        now = time.monotonic()
        while self._registered_at and self._registered_at[0] <= now - HOUR:
            self._registered_at.popleft()
        if hourly is not None and len(self._registered_at) >= hourly:
            self._queries[node] = self._queries[node]._replace(repeat_at=self._registered_at[0] + HOUR)
            log(WARNING, "%s waits: %d clients have registered within an hour", label, hourly)
            return False
        self._registered_at.append(now)
        return True

    def _requested_level(self, enrollment: Enrollment, label: str) -> str:
        level, strictest = enrollment.level, self.deployment.strictest_level
        if level in self.deployment.levels:
            return level
        if level is None:
            log(INFO, "%s chooses no level and gets the strictest, %s", label, strictest)
        else:
            message = "%s wants level %r, which is not on offer, and gets the strictest, %s"
            log(WARNING, message, label, level[:MAX_LOGGED], strictest)  # a node can send any text
        return strictest


def _offer(deployment: Deployment, run: str) -> LevelOffer:
    """The levels with what each promises."""
    names = deployment.levels_by_strictness
    groups = {group.name: group for group in deployment.mechanism(dict.fromkeys(names, 1)).groups}
    noise_multipliers = [deployment.advertised_noise(groups[name]) for name in names]
    sampling_rates = [groups[name].sampling_rate for name in names]
    return LevelOffer(run, 0, list(names), noise_multipliers, sampling_rates, deployment.rounds)
