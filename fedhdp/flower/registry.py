"""Who takes part: every node is asked which level its owner chose, and what it said first holds.

A node that answers and does not say gets the strictest level; one that fails to answer is asked again. The choice is
kept in the ledger before anything is trained. A client that later asks for something looser stays where it is; one that
asks for something stricter is not sent anything any more, because what it has spent cannot be unspent. An identity of
the client's own ties it to its past over restarts; a client that gives none is known by its node.
"""

from __future__ import annotations

import itertools
import time
from logging import INFO, WARNING

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.serverapp import Grid
from msgspec.structs import replace

from fedhdp.flower.config import Deployment
from fedhdp.flower.protocol import Offer, ask_choice, read_choice
from fedhdp.privacy.ledger import Ledger


class Registry:
    """The clients of a run, with the level that each is held to, and the nodes where they can be reached."""

    def __init__(self, deployment: Deployment, ledger: Ledger, run: str, members: dict[str, str] | None = None):
        self.deployment, self.ledger = deployment, ledger
        self.members = dict(members or {})  # client -> level, in the order of joining
        self.withdrawn: set[str] = set()  # asked for something stricter since, or have spent a budget of their own
        self.node_of: dict[str, int] = {}
        self._first: dict[int, str] = {}  # who a node was when it first said so in this run
        self._pending: dict[str, tuple[int, float]] = {}  # message -> node, and until when it may answer
        self._known: set[int] = set()  # nodes that were asked
        self._unclear: set[int] = set()  # nodes to be asked again before the next round
        of_level = {group.name: group for group in deployment.mechanism(dict.fromkeys(deployment.levels, 1)).groups}
        groups = [of_level[name] for name in deployment.strictness]
        noise, rates = [deployment.told(group) for group in groups], [group.sampling_rate for group in groups]
        self._offer = Offer(run, 0, list(deployment.strictness), noise, rates, deployment.rounds)

    def listen(self, grid: Grid, again: bool = False) -> None:
        """Ask the nodes that are new, and again those that are unclear, and take in who has answered; this does not wait."""
        connected = set(grid.get_node_ids())
        self.node_of = {client: node for client, node in self.node_of.items() if node in connected}
        if again:
            self._known -= self._unclear
            self._unclear.clear()
        self._known &= connected
        new = sorted(connected - self._known)
        if new:
            seconds = self.deployment.gather_seconds
            offer = replace(self._offer, charged=self.ledger.charged_rounds(f"{self._offer.run}/"))
            messages = {node: ask_choice(node, offer, seconds) for node in new}
            sent, until = set(grid.push_messages(list(messages.values()))), time.monotonic() + seconds
            names = {message.metadata.message_id: node for node, message in messages.items()}
            self._pending |= {name: (node, until) for name, node in names.items() if name in sent}
            self._known |= {node for name, node in names.items() if name in sent}
        self._settle(grid, connected)

    def wait_for_enough(self, grid: Grid, look_every: float = 0.1) -> None:
        """Wait until enough clients have registered and all that were asked have answered or had their time."""
        enough, said = self.deployment.least_clients, -1
        while True:
            self.listen(grid)
            if len(self.members) >= enough and not self._pending:
                return
            if len(self.members) != said:
                said = len(self.members)
                log(INFO, "registered so far: %d; the first round begins with %d", said, enough)
            time.sleep(look_every)

    def wait_for_somebody(self, grid: Grid, look_every: float = 1.0) -> None:
        """Wait while nobody at all can be reached: such a round would cost everybody and teach nothing."""
        self.listen(grid, again=True)
        for waited in itertools.count():
            if any(self.reachable(client) is not None for client in self.members):
                return
            if waited % 60 == 0:
                log(WARNING, "no client can be reached, or all have withdrawn: waiting before another round is charged")
            time.sleep(look_every)
            self.listen(grid)

    def doubt(self, client: str) -> None:
        """Ask a client again before the next round: it may want another level by now."""
        if client in self.node_of:
            self._unclear.add(self.node_of[client])

    def reachable(self, client: str) -> int | None:
        """The node of a client that can be sent a round."""
        return None if client in self.withdrawn else self.node_of.get(client)

    def _settle(self, grid: Grid, connected: set[int]) -> None:
        if not self._pending:
            return
        answers = {reply.metadata.reply_to_message_id: reply for reply in grid.pull_messages(sorted(self._pending))}
        for message, (node, until) in sorted(self._pending.items(), key=lambda item: item[1]):
            reply = answers.get(message)
            if reply is None and time.monotonic() < until and node in connected:
                continue
            del self._pending[message]
            lost = reply is not None and reply.has_error() and reply.error.code == ErrorCode.NODE_UNAVAILABLE
            if lost or (reply is None and node not in connected):
                self._known.discard(node)  # it is gone; should it come back it is asked again
            elif reply is None or reply.has_error():
                self._unclear.add(node)
                log(WARNING, "node %d has not said which level it wants: it is asked again next round", node)
            else:
                self._register(node, reply)

    def _register(self, node: int, reply: Message) -> None:
        said = read_choice(reply)
        client, offered = said.client or f"node {node}", self.deployment.levels
        name = f"client {client[:8]}" if said.client else client  # who reads a log need not know an identity
        if self.node_of.get(client, node) != node:
            log(WARNING, "node %d says that it is %s, which is connected as another: not let in", node, name)
            self._known.discard(node)  # the other may only be slow to go: ask again
            return
        first = self._first.setdefault(node, client)
        if first != client:
            self.withdrawn.add(first)  # who is there now is not the one who was promised something
            log(WARNING, "node %d says that it is %s now and was another client before: not let in", node, name)
            return
        level = said.level if said.level in offered else self.deployment.strictest
        if said.level is None:
            log(INFO, "%s does not say which level it wants and gets the strictest, %s", name, level)
        elif said.level not in offered:
            log(WARNING, "%s wants %r, which is not on offer, and gets the strictest, %s", name, said.level, level)
        held = self.ledger.register(client, level)
        if held not in offered:
            log(WARNING, "%s is held to level %r, which is not on offer: not let in", name, held)
            return
        self.node_of[client] = node
        self.members.setdefault(client, held)
        self.withdrawn.discard(client)
        if said.spent:
            self.withdrawn.add(client)
            log(WARNING, "%s has spent its own budget: it is sent nothing more", name)
        if self.deployment.stricter(level, than=held):
            self.withdrawn.add(client)
            log(WARNING, "%s wants %s now and has been in %s: it is sent nothing more", name, level, held)
        elif level != held:
            log(WARNING, "%s wants %s now and stays in %s: a level is never loosened", name, level, held)
