"""One exchange of messages: push, then pull every so often until all have answered or time is up.

Flower's own ``send_and_receive`` waits seconds between two looks, and error replies made on a client's behalf carry the
wrong sender. So this keeps its own map from message to client, and every reply is tied to the message it answers: a
second answer to the same message, or an answer to a message that this exchange never sent, does not count.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from flwr.app import Message
from flwr.serverapp import Grid

LOOK_EVERY = 0.1  # seconds, at first; longer when an exchange takes long
LOOK_AT_MOST = 1.0


class Answers(NamedTuple):
    """Who answered what; everybody else is absent."""

    by_client: dict[str, Message]
    errors: dict[str, int]  # clients for whom an error came instead, with Flower's code
    strays: Counter[str]  # replies that answer nothing, by kind: duplicate or replayed


def gather(grid: Grid, messages: Mapping[str, Message], seconds: float) -> Answers:
    """Send each client its message and wait for the answers, so long and no longer."""
    if not messages:
        return Answers({}, {}, Counter())
    until, look = time.monotonic() + seconds, LOOK_EVERY
    client_of = push(grid, messages)
    replies: list[Message] = []
    waiting = set(client_of)
    while waiting and time.monotonic() < until:
        pulled = list(grid.pull_messages(sorted(waiting)))
        replies += pulled
        waiting -= {reply.metadata.reply_to_message_id for reply in pulled}
        if waiting:
            time.sleep(min(look, max(until - time.monotonic(), 0)))
            look = min(look * 1.1, LOOK_AT_MOST)
    return tie(client_of, replies)


def push(grid: Grid, messages: Mapping[str, Message]) -> dict[str, str]:
    """Send the messages; the client behind each message that could be sent."""
    ids = grid.push_messages(list(messages.values()))
    return {id: client for id, client in zip(ids, messages) if id}


def tie(client_of: Mapping[str, str], replies: Iterable[Message]) -> Answers:
    """Each reply with the client whose message it answers; the first counts."""
    answers = Answers({}, {}, Counter())
    for reply in replies:
        client = client_of.get(reply.metadata.reply_to_message_id)
        if client is None:
            answers.strays["replayed"] += 1
        elif client in answers.by_client or client in answers.errors:
            answers.strays["duplicate"] += 1
        elif reply.has_error():
            answers.errors[client] = reply.error.code
        else:
            answers.by_client[client] = reply
    return answers
