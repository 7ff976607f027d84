"""The messages between server and clients: their records, their validation, and how replies are matched to clients.

    message    the server sends                  the client replies
    ────────   ───────────────────────────────   ─────────────────────────────────────────────────────────────
    query      ``LevelOffer``                    ``Enrollment``: its level, its id, whether its budget is exhausted
    moments    ``RoundRequest``                  the second moments of its inputs: asked of clients who opted out alone
    train      global model, ``RoundRequest``    the update; the scores of both models, if requested
    evaluate   global model, ``RoundRequest``    the scores of both models

A model is a dictionary of named float32 arrays. The server knows the names and shapes, and an update must match them
exactly. A public basis is sent beside the global model, and is among a client's arrays as ``BASIS``; updates are without
it. Every ``RoundRequest`` carries a random token for one client and one round. The reply must repeat the token, so that a
replayed reply is refused. The server trusts nothing in a reply.

Axis letters: P parameters, F inputs, K columns of a basis.
"""

from __future__ import annotations

import io
import itertools
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from logging import INFO
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log

from fedhdp.basis import Moments
from fedhdp.errors import require
from fedhdp.mechanism import MAX_VALUE

if TYPE_CHECKING:
    from flwr.serverapp import Grid

Arrays = dict[str, np.ndarray]
Score = Callable[[Arrays], float | Mapping[str, float]]
SCORED_MODELS = ("global", "personal")
BASIS = "public/basis"  # the name of a public basis among a client's arrays
MOMENTS_ACTION = "moments"
MOMENTS = f"{MessageType.QUERY}.{MOMENTS_ACTION}"  # the type of the message that requests second moments
MAX_INPUTS = 10_000  # of second moments, whose size is the square of it
MAX_HEADER_BYTES = 1024  # of an array's message, beside its numbers
CLIENT_ID = re.compile(r"[0-9A-Za-z]{1,64}")
POLL_SECONDS, MAX_POLL_SECONDS = 0.1, 1.0  # Flower's own send_and_receive waits 3 seconds between two polls


class RoundRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a client is requested to do in a round, and what the round promises it."""

    token: str
    run: str
    round: int  # completed before this one
    charged_rounds: int  # of the run, this one and those that a crash cut short included
    level: str
    noise_multiplier: float  # promised to the client's level; other levels may give it more, which stays hidden
    sampling_rate: float
    pull: float
    metrics: list[str] = []  # what to measure with both models, for the scores; none: no scores

    @property
    def evaluate(self) -> bool:
        """Whether scores are requested."""
        return len(self.metrics) > 0


class LevelOffer(msgspec.Struct, frozen=True):
    """The privacy levels of a run, the strictest first, and what each promises."""

    run: str
    charged_rounds: int  # of the run; a new client took part in none of them
    levels: list[str]
    noise_multipliers: list[float]
    sampling_rates: list[float]
    total_rounds: int = 0

    def __post_init__(self) -> None:
        count = len(set(self.levels))
        is_complete = count == len(self.levels) == len(self.noise_multipliers) == len(self.sampling_rates) > 0
        rule = "distinct names, each with a noise multiplier and a sampling rate"
        require(is_complete, "levels", self.levels, rule)
        levels = list(zip(self.levels, self.noise_multipliers, self.sampling_rates, strict=True))
        for _, noise, rate in levels:
            require(0 <= noise <= MAX_VALUE, "noise_multipliers", noise, f"from 0 to {MAX_VALUE:g}")
            require(0 <= rate <= 1, "sampling_rates", rate, "from 0 to 1")
        for (name, noise, rate), (later, later_noise, later_rate) in itertools.combinations(levels, 2):
            is_stricter = later_noise > noise and later_rate <= rate
            require(not is_stricter, "levels", later, f"listed before {name!r}: the strictest level comes first")


class Enrollment(NamedTuple):
    """A client's answer to a ``LevelOffer``; None stands for what it does not say."""

    level: str | None
    client_id: str | None  # outlives the client's connection
    budget_exhausted: bool = False  # the client's budget allows no further round


class RefusedReply(Exception):
    """A reply that does not count.

    Args:
        kind: The kind of defect, under which it is counted: malformed, replayed, wrong shape, wrong dtype, not finite.
        detail: What exactly is wrong.
    """

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind


class DeclinedRound(Exception):
    """A client declines to take part in a round; it counts as absent."""


class ClientReply(NamedTuple):
    """A valid reply; the update is one row, in the order of the model's arrays."""

    update_P: np.ndarray | None
    scores: dict[str, float]  # by MODEL/METRIC


def flatten(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """A model as one row of float32."""
    return np.concatenate([np.ravel(array) for array in arrays.values()]).astype(np.float32, copy=False)


def unflatten(row_P: np.ndarray, like: Mapping[str, np.ndarray]) -> Arrays:
    """A row as a model with the names and shapes of ``like``."""
    ends = np.cumsum([array.size for array in like.values()])
    parts = np.split(np.asarray(row_P, np.float32), ends[:-1])
    return {name: part.reshape(array.shape) for (name, array), part in zip(like.items(), parts, strict=True)}


def array_shapes(arrays: Mapping[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    """The names of a model's arrays and their shapes."""
    return {name: array.shape for name, array in arrays.items()}


def to_record(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    """A model as Flower's record."""
    return ArrayRecord({name: Array(np.asarray(array, np.float32)) for name, array in arrays.items()})


def from_record(record: ArrayRecord) -> Arrays:
    """A model from Flower's record."""
    return {name: array.numpy() for name, array in record.items()}


def offer_message(node: int, offer: LevelOffer, ttl: float) -> Message:
    """The query that enrolls a client; ``ttl`` is its time to live in seconds."""
    return Message(RecordDict({"offer": _to_config(offer)}), node, MessageType.QUERY, ttl=ttl)


def parse_offer(message: Message) -> LevelOffer:
    """The offer in a query.

    Raises:
        InvalidValueError: If the levels are not complete or not listed from the strictest on.
    """
    return msgspec.convert(dict(message.content.config_records["offer"]), LevelOffer)


def enrollment_message(query: Message, enrollment: Enrollment) -> Message:
    """A client's reply to a query; fields that are None are left out."""
    fields = {key: value for key, value in enrollment._asdict().items() if value is not None}
    return Message(RecordDict({"enrollment": ConfigRecord(fields)}), reply_to=query)


def parse_enrollment(reply: Message) -> Enrollment:
    """The enrollment in a reply; fields that are missing or malformed become None."""
    if not reply.has_content() or not isinstance(reply.content.get("enrollment"), ConfigRecord):
        return Enrollment(None, None)
    record = reply.content.config_records["enrollment"]
    level, client_id, budget_exhausted = (record.get(field) for field in Enrollment._fields)
    return Enrollment(
        level if isinstance(level, str) else None,
        client_id if isinstance(client_id, str) and CLIENT_ID.fullmatch(client_id) else None,
        budget_exhausted is True,
    )


def request_message(
    kind: str, node: int, model: ArrayRecord, request: RoundRequest, ttl: float, basis: np.ndarray | None = None
) -> Message:
    """A message that requests training or evaluation, by ``kind``; ``ttl`` is its time to live in seconds."""
    content = RecordDict({"global": model, "request": _to_config(request)})
    if basis is not None:
        content["basis"] = to_record({BASIS: basis})
    return Message(content, node, kind, ttl=ttl, group_id=str(request.round))


def parse_request(message: Message) -> tuple[Arrays, RoundRequest]:
    """The global model, with its public basis if it has one, and what to do with it."""
    records = message.content.array_records
    arrays = from_record(records["global"]) | (from_record(records["basis"]) if "basis" in records else {})
    return arrays, _request_of(message)


def without_basis(arrays: Mapping[str, np.ndarray]) -> Arrays:
    """The arrays that are trained."""
    return {name: array for name, array in arrays.items() if name != BASIS}


def moments_request(node: int, request: RoundRequest, ttl: float) -> Message:
    """A message that requests second moments of a client who opted out."""
    return Message(RecordDict({"request": _to_config(request)}), node, MOMENTS, ttl=ttl)


def parse_moments_request(message: Message) -> RoundRequest:
    """What the second moments are requested for."""
    return _request_of(message)


def moments_message(message: Message, request: RoundRequest, moments: Moments) -> Message:
    """A reply with second moments."""
    record = ConfigRecord({"token": request.token, "examples": moments.num_examples})
    sums = ArrayRecord({"sum": Array(np.asarray(moments.sum_FF, np.float64))})
    return Message(RecordDict({"request": record, "moments": sums}), reply_to=message)


def parse_moments(message: Message, request: RoundRequest, inputs: int | None) -> Moments:
    """Validate a client's second moments.

    Args:
        message: The reply.
        request: The request that it answers.
        inputs: The number of inputs that other clients have; None: any.

    Raises:
        RefusedReply: If they are not finite second moments of so many inputs.
        DeclinedRound: If the client declines.
    """
    try:
        record = message.content.config_records["request"]
        _check_answer(record, request)
        examples, array = record["examples"], message.content.array_records["moments"]["sum"]
        if not isinstance(examples, int) or not 1 <= examples <= MAX_VALUE:
            raise RefusedReply("malformed", "second moments must be of one example or more")
        if len(array.shape) != 2 or not 1 <= array.shape[0] <= MAX_INPUTS:
            raise RefusedReply("malformed", f"second moments must be a matrix of at most {MAX_INPUTS:,} inputs")
        size = array.shape[0] if inputs is None else inputs
        sum_FF = _parse_array(array, (size, size), np.float64)
        if not (np.abs(sum_FF) <= MAX_VALUE).all():
            raise RefusedReply("not finite")
        return Moments(sum_FF, examples)
    except (RefusedReply, DeclinedRound):
        raise
    except Exception as error:  # no reply may end the server, whatever it provokes
        raise RefusedReply("malformed", _printable(f"{type(error).__name__}: {error}")) from error


def _request_of(message: Message) -> RoundRequest:
    return msgspec.convert(dict(message.content.config_records["request"]), RoundRequest)


def reply_message(
    message: Message, request: RoundRequest, update: Arrays | None, scores: Mapping[str, float]
) -> Message:
    """A reply with the update and the requested scores."""
    content: dict[str, Any] = {"request": ConfigRecord({"token": request.token})}
    if update is not None:
        content["update"] = to_record(update)
    if scores:
        content["scores"] = MetricRecord(dict(scores))
    return Message(RecordDict(content), reply_to=message)


def decline_message(message: Message, request: RoundRequest, reason: str) -> Message:
    """A reply that declines the round."""
    record = ConfigRecord({"token": request.token, "declined": reason})
    return Message(RecordDict({"request": record}), reply_to=message)


def parse_reply(
    message: Message, request: RoundRequest, like: Mapping[str, np.ndarray], is_training: bool
) -> ClientReply:
    """Validate a client's reply.

    Args:
        message: The reply.
        request: The request that it answers.
        like: A model with the names and shapes that the update must have.
        is_training: Whether an update was requested.

    Raises:
        RefusedReply: If there are other records than the requested ones, or their content is invalid.
        DeclinedRound: If the client declines.
    """
    try:
        content, record = message.content, message.content.config_records["request"]
        _check_answer(record, request)
        allowed = {"request"} | ({"update"} if is_training else set()) | ({"scores"} if request.evaluate else set())
        if extra := set(content) - allowed:
            raise RefusedReply("malformed", f"{len(extra)} records that were not requested")
        update_P = _parse_update(content.array_records["update"], like) if is_training else None
        return ClientReply(update_P, _parse_scores(content.metric_records.get("scores", {}), request.metrics))
    except (RefusedReply, DeclinedRound):
        raise
    except Exception as error:  # no reply may end the server, whatever it provokes
        raise RefusedReply("malformed", _printable(f"{type(error).__name__}: {error}")) from error


def _check_answer(record: ConfigRecord, request: RoundRequest) -> None:
    """Refuse a reply to another request; a client that declines has its exception."""
    if record.get("token") != request.token:
        raise RefusedReply("replayed", "the token is not this round's")
    if "declined" in record:
        raise DeclinedRound(_printable(str(record["declined"])))


def _to_config(value: msgspec.Struct) -> ConfigRecord:
    return ConfigRecord(msgspec.to_builtins(value))


def _printable(text: str) -> str:
    """A client's text, cut to what fits in one line of a log."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:200])


def _parse_update(record: ArrayRecord, like: Mapping[str, np.ndarray]) -> np.ndarray:
    if set(record) != set(like):
        raise RefusedReply("malformed", "the names of the arrays are not the model's")
    row_P = flatten({name: _parse_array(record[name], array.shape) for name, array in like.items()})
    if not np.isfinite(row_P).all():
        raise RefusedReply("not finite")
    return row_P


def _parse_array(array: Array, shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
    """One array; its header is checked before memory is allocated for it."""
    if len(array.data) > np.dtype(dtype).itemsize * math.prod(shape) + MAX_HEADER_BYTES:
        raise RefusedReply("wrong shape", f"{len(array.data)} bytes where {shape} is expected")
    data = io.BytesIO(array.data)
    version = np.lib.format.read_magic(data)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    header_shape, _, header_dtype = read_header(data, MAX_HEADER_BYTES)
    if header_dtype != dtype:
        raise RefusedReply("wrong dtype", f"{header_dtype} where {np.dtype(dtype)} is expected")
    if header_shape != shape:
        raise RefusedReply("wrong shape", f"{header_shape} where {shape} is expected")
    return array.numpy()


def _parse_scores(record: Mapping[str, Any], metrics: Iterable[str]) -> dict[str, float]:
    names = {f"{model}/{metric}" for model in SCORED_MODELS for metric in metrics}
    for name, score in record.items():
        if name not in names or not isinstance(score, int | float) or not abs(score) <= MAX_VALUE:
            raise RefusedReply("malformed", f"scores must be requested ones, and numbers up to {MAX_VALUE:g}")
    return {name: float(score) for name, score in record.items()}


def select_metrics(score: float | Mapping[str, float], metrics: Sequence[str]) -> dict[str, float]:
    """Those of a score function's metrics that are requested; a single number is the first of them."""
    named = score if isinstance(score, Mapping) else {metrics[0]: score}
    if missing := [metric for metric in metrics if metric not in named]:
        log(INFO, "metrics of the deployment that are not measured here: %s", ", ".join(missing))
    return {metric: float(named[metric]) for metric in metrics if metric in named}


class MatchedReplies(NamedTuple):
    """The replies of a round by client; clients without a reply are absent."""

    by_client: dict[str, Message]
    errors: dict[str, int]  # client -> Flower's code of the error instead of a reply
    duplicates: list[str]  # clients of further replies to the same message
    unsolicited: int  # replies to messages that were never sent


def send_and_gather(
    grid: Grid,
    messages: Sequence[Message],
    timeout_seconds: float,
    while_waiting: Callable[[int], object] = lambda missing: None,
) -> list[Message]:
    """Send messages and poll for replies, in any order, until all have arrived or the time is up.

    Args:
        grid: Flower's connection to the nodes.
        messages: The messages.
        timeout_seconds: How long to wait for replies.
        while_waiting: Called between two polls with the number of replies that are missing.
    """
    if not messages:
        return []
    waiting = {message_id for message_id in grid.push_messages(messages) if message_id}  # unsent messages have no id
    deadline, pause, replies = time.monotonic() + timeout_seconds, POLL_SECONDS, list[Message]()
    while waiting:
        pulled = list(grid.pull_messages(sorted(waiting)))
        replies += pulled
        waiting -= {reply.metadata.reply_to_message_id for reply in pulled}
        if not waiting or time.monotonic() >= deadline:
            break
        while_waiting(len(waiting))
        time.sleep(min(pause, max(deadline - time.monotonic(), 0)))
        pause = min(pause * 1.1, MAX_POLL_SECONDS)
    return replies


def match_replies(client_of: Mapping[str, str], replies: Iterable[Message]) -> MatchedReplies:
    """Match replies to clients by the id of the message that they answer; the first reply to a message counts.

    The sender in a reply is not used: error replies that the SuperLink makes for a client carry the wrong one.
    """
    matched = MatchedReplies({}, {}, [], 0)
    for reply in replies:
        client = client_of.get(reply.metadata.reply_to_message_id)
        if client is None:
            matched = matched._replace(unsolicited=matched.unsolicited + 1)
        elif client in matched.by_client or client in matched.errors:
            matched.duplicates.append(client)
        elif reply.has_error():
            matched.errors[client] = reply.error.code
        else:
            matched.by_client[client] = reply
    return matched
