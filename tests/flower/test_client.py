"""What a client sends, keeps and declines."""

from __future__ import annotations

import math
import threading
import time

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedhdp[flower]'")

from flower_helpers import (
    PLAIN_APP,
    PLAIN_MODEL,
    PRIVATE,
    TWO_LEVELS,
    InProcessGrid,
    Node,
    is_declined,
    is_equal,
    is_train,
    is_train_of,
    make_deployment,
    open_ledger,
    plain_node,
    record_updates,
    run_plain,
    saved_model,
    saved_values,
    strict_node,
)
from flwr.app import Context, Message
from msgspec.structs import replace

from fedhdp.errors import FedHDPError
from fedhdp.flower import Trainer, client_app
from fedhdp.flower.client_state import ClientStateDir, Promise, check_request
from fedhdp.flower.protocol import DeclinedRound, LevelOffer, RoundRequest, offer_message, request_message, to_record
from fedhdp.privacy.calibration import PrivacyLevel

REQUEST = RoundRequest("token", "run", 0, 1, "strict", 1.0, 0.5, 0.05)
OFFER = LevelOffer("run", 0, ["strict"], [1.0], [0.5], 1)


# Replies


def test_reply_has_only_what_was_requested(tmp_path):
    grid, exchanges = InProcessGrid([strict_node(tmp_path)]), []

    def tamper(message: Message, reply: Message, node: Node) -> list[Message]:
        if is_train(message):
            exchanges.append((message.content, reply.content))
        return [reply]

    grid.tamper = tamper
    run_plain(grid, make_deployment(tmp_path, levels=TWO_LEVELS, evaluate_every=2))
    replies = [reply for _, reply in exchanges]
    assert [set(reply) for reply in replies] == [{"request", "update"}] * 2 + [{"request", "update", "scores"}]
    for request, reply in exchanges:
        assert dict(reply["request"]) == {"token": request["request"]["token"]}
        assert set(reply["update"]) == set(PLAIN_MODEL)
    assert set(replies[-1]["scores"]) == {"global/accuracy", "personal/accuracy"}


@pytest.mark.parametrize("setting", [False, "false", "no", 0])
def test_owner_can_forbid_scores(tmp_path, setting):
    deployment = make_deployment(tmp_path, levels=TWO_LEVELS, evaluate_every=1)
    (variant,) = run_plain(InProcessGrid([strict_node(tmp_path, scores=setting)]), deployment).variants
    assert variant.groups[0].value("accuracy", "personal") is None
    assert variant.groups[0].refused == 0


@pytest.mark.parametrize(("config", "has_scores"), [({}, False), ({"scores": True}, True)])
def test_client_with_a_budget_sends_scores_only_if_configured(tmp_path, config, has_scores):
    node = strict_node(tmp_path, epsilon=1000.0, **config)
    deployment = make_deployment(tmp_path, levels=TWO_LEVELS, evaluate_every=1, **PRIVATE)
    (variant,) = run_plain(InProcessGrid([node]), deployment).variants
    assert (variant.groups[0].value("accuracy") is not None) == has_scores


def test_fit_may_train_in_place(tmp_path):
    def in_place_trainer(context: Context) -> Trainer:
        def fit(parameters, personal, pull, round):
            for model, step in ((parameters, 0.5), (personal, 0.25)):
                for array in model.values():
                    array += step
            return parameters, personal

        return Trainer(fit)

    models = []
    for name, app in (("in place", client_app(in_place_trainer)), ("copies", PLAIN_APP)):
        deployment = make_deployment(tmp_path / name, levels=TWO_LEVELS, rounds=2)
        directory = tmp_path / name / "client"
        run_plain(InProcessGrid([Node(1, app, privacy="strict", directory=str(directory))]), deployment)
        models.append((saved_model(deployment), ClientStateDir(directory).load_personal(PLAIN_MODEL)))
    (in_place, in_place_personal), (copies, copies_personal) = models
    assert is_equal(in_place, copies)
    assert is_equal(in_place_personal, copies_personal)


# Personal models


def test_personal_model_survives_a_restart_and_a_new_run(tmp_path):
    run_plain(InProcessGrid([strict_node(tmp_path)]), make_deployment(tmp_path, levels=TWO_LEVELS, rounds=2))
    state = ClientStateDir(tmp_path / "client")
    np.testing.assert_allclose(state.load_personal(PLAIN_MODEL)["w"], np.full((2, 3), 0.5))
    second = make_deployment(tmp_path, levels=TWO_LEVELS, rounds=1, out=str(tmp_path / "second"))
    run_plain(InProcessGrid([strict_node(tmp_path)]), second)
    np.testing.assert_allclose(state.load_personal(PLAIN_MODEL)["w"], np.full((2, 3), 0.75))


def test_personal_models_by_shape(tmp_path):
    state, small_model = ClientStateDir(tmp_path / "client"), {"small": np.ones(2, np.float32)}
    state.save_personal(small_model)
    run_plain(InProcessGrid([strict_node(tmp_path)]), make_deployment(tmp_path, levels=TWO_LEVELS, rounds=1))
    assert is_equal(state.load_personal(small_model), small_model)
    assert set(state.load_personal(PLAIN_MODEL)) == set(PLAIN_MODEL)
    assert state.load_personal({"w": np.zeros(7)}) is None


def test_personal_model_of_another_shape_is_an_error(tmp_path):
    def fit(parameters, personal, pull, round):
        return parameters, {"w": personal["w"].reshape(-1), "b": personal["b"]}

    app = client_app(lambda context: Trainer(fit))
    node = Node(1, app, privacy="strict", directory=str(tmp_path / "client"))
    deployment = make_deployment(tmp_path, levels=TWO_LEVELS, rounds=1)
    run_plain(InProcessGrid([node]), deployment)
    assert saved_values(deployment, "strict", "replies") == [0.0]
    assert list((tmp_path / "client").glob("personal-*")) == []


def test_infinite_personal_model_is_not_stored(tmp_path):
    def fit(parameters, personal, pull, round):
        return parameters, {name: array / round for name, array in personal.items()}

    app = client_app(lambda context: Trainer(fit))
    node = Node(1, app, privacy="strict", directory=str(tmp_path / "client"))
    with np.errstate(divide="ignore", invalid="ignore"):
        run_plain(InProcessGrid([node]), make_deployment(tmp_path, levels=TWO_LEVELS, rounds=2))
    personal = ClientStateDir(tmp_path / "client").load_personal(PLAIN_MODEL)
    assert all(np.isfinite(array).all() for array in personal.values())


# Promises


@pytest.mark.parametrize("change", [{"noise_multiplier": 0.5}, {"sampling_rate": 1.5}])
def test_round_below_the_promise_is_declined(tmp_path, change):
    node = strict_node(tmp_path)
    grid = InProcessGrid([node])
    has_update = record_updates(grid, node)

    def on_push(messages: list[Message]) -> None:
        for message in messages:
            if is_train_of(message, 1):
                message.content["request"].update(change)

    grid.on_push = on_push
    run_plain(grid, make_deployment(tmp_path, levels=TWO_LEVELS, rounds=2, **PRIVATE))
    assert has_update == [True, False]


@pytest.mark.parametrize(
    "change",
    [
        {"noise_multiplier": 0.999},
        {"noise_multiplier": 0.0},
        {"noise_multiplier": math.nan},
        {"sampling_rate": 0.500001},
        {"sampling_rate": 1.0},
        {"sampling_rate": math.nan},
        {"sampling_rate": 0.0},
        {"level": "open"},
    ],
)
def test_request_below_the_promise_is_declined(change):
    promise = Promise(1.0, 0.5, levels=["strict", "open"], level="strict")
    assert check_request(REQUEST, {"run": promise}, "strict") == promise
    with pytest.raises(DeclinedRound):
        check_request(replace(REQUEST, **change), {"run": promise}, "strict")


def test_request_without_a_promise_is_declined(tmp_path):
    node = strict_node(tmp_path)
    run_plain(InProcessGrid([node]), make_deployment(tmp_path, levels=TWO_LEVELS, rounds=1))
    (message,) = node.received_of("train")
    (tmp_path / "client" / "promises.json").unlink()
    assert is_declined(node.answer(message))


def test_request_at_sampling_rate_zero_is_declined(tmp_path):
    node = strict_node(tmp_path, epsilon=0.01)
    node.answer(offer_message(1, LevelOffer("run", 0, ["strict"], [0.0], [0.0], 100), 1.0))
    request = replace(REQUEST, noise_multiplier=0.0, sampling_rate=0.0)
    assert is_declined(node.answer(request_message("train", 1, to_record(PLAIN_MODEL), request, 1.0)))


def test_first_promise_of_a_run_is_binding(tmp_path):
    node = strict_node(tmp_path)
    run_plain(InProcessGrid([node]), make_deployment(tmp_path, levels=TWO_LEVELS, rounds=1, **PRIVATE))
    state = ClientStateDir(tmp_path / "client")
    promises = state.load_promises()
    (query,) = node.received_of("query")
    query.content["offer"]["noise_multipliers"] = [0.1, 0.0]
    node.answer(query)
    assert state.load_promises() == promises
    assert [promise.noise_multiplier for promise in promises.values()] == [1.0]


def test_default_promise_is_that_of_the_strictest_level(tmp_path):
    levels = {
        "rare": PrivacyLevel(sampling_rate=0.01, noise_multiplier=0.9),
        "often": PrivacyLevel(sampling_rate=1.0, noise_multiplier=1.0),
    }
    deployment = make_deployment(tmp_path, levels=levels, rounds=1, **PRIVATE)
    run_plain(InProcessGrid([plain_node(1, directory=str(tmp_path / "client"))]), deployment)
    (promise,) = ClientStateDir(tmp_path / "client").load_promises().values()
    assert deployment.strictest_level == "rare"
    assert (promise.noise_multiplier, promise.sampling_rate) == (0.9, 0.01)


@pytest.mark.parametrize("change", [{"levels": []}, {"noise_multipliers": [math.nan]}, {"sampling_rates": [1.5]}])
def test_invalid_offer_is_not_answered(tmp_path, change):
    query = offer_message(1, OFFER, 1.0)
    query.content["offer"].update(change)
    assert strict_node(tmp_path).answer(query).has_error()
    assert ClientStateDir(tmp_path / "client").load_promises() == {}


def test_level_that_had_noise_is_not_trained_without(tmp_path):
    node = strict_node(tmp_path)
    grid = InProcessGrid([node])
    has_update = record_updates(grid, node)
    first = make_deployment(tmp_path, levels=TWO_LEVELS, rounds=1, **PRIVATE)
    swapped = {
        "strict": PrivacyLevel(sampling_rate=1.0, noise_multiplier=0.0),
        "open": PrivacyLevel(sampling_rate=1.0, noise_multiplier=5.0),
    }
    second = replace(first, levels=swapped, out=str(tmp_path / "second"))
    third = replace(second, ledger=str(tmp_path / "another ledger"), out=str(tmp_path / "third"))
    run_plain(grid, first)
    with pytest.raises(FedHDPError):  # by the server, whose ledger knows the noise
        run_plain(grid, second)
    run_plain(grid, third)  # by the client
    assert has_update == [True, False]


# State


def test_concurrent_runs_store_both_promises(tmp_path):
    state, is_started, order = ClientStateDir(tmp_path / "client"), threading.Event(), []

    def save_second() -> None:
        is_started.set()
        with ClientStateDir(tmp_path / "client").locked():
            order.append("second")
            state.save_promises(state.load_promises() | {"second": Promise(1.0, 0.1)})

    thread = threading.Thread(target=save_second)
    with state.locked():
        promises = state.load_promises() | {"first": Promise(1.0, 0.1)}
        thread.start()
        is_started.wait()
        time.sleep(0.05)
        order.append("first")
        state.save_promises(promises)
    thread.join()
    assert order == ["first", "second"]
    assert set(state.load_promises()) == {"first", "second"}


def test_directory_is_readable_by_its_owner_alone(tmp_path):
    assert ClientStateDir(tmp_path / "client").path.stat().st_mode & 0o777 == 0o700


def test_client_id_is_written_under_the_lock(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def token_hex(size: int) -> str:
        with open(tmp_path / "client" / ".lock", "w") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return "ab" * size

    monkeypatch.setattr("fedhdp.flower.client_state.secrets.token_hex", token_hex)
    reply = strict_node(tmp_path).answer(offer_message(1, OFFER, 1.0))
    assert reply.content["enrollment"]["client_id"] == "ab" * 16


def test_log_abbreviates_client_ids(tmp_path, caplog):
    node = strict_node(tmp_path)
    grid = InProcessGrid([node])
    grid.tamper = lambda message, reply, _: [reply, reply] if is_train(message) else [reply]
    with caplog.at_level("INFO", "flwr"):
        run_plain(grid, make_deployment(tmp_path, levels=TWO_LEVELS, rounds=1))
    client_id = ClientStateDir(tmp_path / "client").client_id()
    with open_ledger(tmp_path / "ledger") as ledger:
        assert list(ledger.registrations()) == [client_id]
    assert caplog.records
    assert not any(client_id in record.getMessage() for record in caplog.records)
