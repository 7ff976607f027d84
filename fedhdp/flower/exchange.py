"""One exchange of messages: push, then pull every so often until all have answered or time is up.

Flower's own ``send_and_receive`` waits seconds between two looks, and error replies made on a client's behalf carry the
wrong sender. So replies are tied to clients by the message they answer, in a map of our own: a second answer to the same
message, or an answer to a message that was never sent, does not count.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from flwr.app import Message
from flwr.serverapp import Grid

LOOK_EVERY = 0.1  # seconds, at first; longer when an exchange takes long
LOOK_AT_MOST = 1.0


class Answers(NamedTuple):
    """Who answered what; everybody else is absent."""

    by_client: dict[str, Message]
    failed: dict[str, int]  # clients for whom an error came instead, with Flower's code
    duplicates: list[str]  # clients of whom there was a second answer
    strangers: int  # answers to messages that were not sent


def gather(grid: Grid, messages: Sequence[Message], seconds: float) -> list[Message]:
    """Send the messages and wait for answers, so long and no longer."""
    if not messages:
        return []
    waiting = {sent for sent in grid.push_messages(messages) if sent}  # a message that cannot be sent has no name
    until, look, replies = time.monotonic() + seconds, LOOK_EVERY, list[Message]()
    while waiting:
        pulled = list(grid.pull_messages(sorted(waiting)))
        replies += pulled
        waiting -= {reply.metadata.reply_to_message_id for reply in pulled}
        if not waiting or time.monotonic() >= until:
            break
        time.sleep(min(look, max(until - time.monotonic(), 0)))
        look = min(look * 1.1, LOOK_AT_MOST)
    return replies


def tie(client_of: Mapping[str, str], replies: Iterable[Message]) -> Answers:
    """Each reply with the client whose message it answers; the first counts."""
    by_client: dict[str, Message] = {}
    failed: dict[str, int] = {}
    duplicates, strangers = [], 0
    for reply in replies:
        client = client_of.get(reply.metadata.reply_to_message_id)
        if client is None:
            strangers += 1
        elif client in by_client or client in failed:
            duplicates.append(client)
        elif reply.has_error():
            failed[client] = reply.error.code
        else:
            by_client[client] = reply
    return Answers(by_client, failed, duplicates, strangers)
