"""A public basis in a deployment: of the clients who opted out, who are asked once, and one that needs no messages."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedhdp[flower]'")

from flower_helpers import (
    DATA,
    FIRST_NODE,
    LEVELS,
    SEED,
    TRAINING,
    Crash,
    InProcessGrid,
    Node,
    before_round,
    client_costs,
    client_examples,
    crash,
    is_declined,
    make_deployment,
    make_grid,
    saved_model,
)
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from helpers import group_by_group, raises_field
from msgspec.structs import replace

from fedhdp.basis import cosine_basis, fingerprint, pca_basis, public_moments, second_moments, with_basis
from fedhdp.errors import ConfigError, DataError, ModelError
from fedhdp.experiments.bases import PcaBasis
from fedhdp.flower import Trainer, client_app, initial_arrays, jax_trainer, run_deployment, scorer
from fedhdp.flower.client_state import InMemoryState
from fedhdp.flower.config import Deployment
from fedhdp.flower.protocol import BASIS, MOMENTS, RoundRequest, moments_request
from fedhdp.models import linear, mlp
from fedhdp.privacy.calibration import PrivacyLevel
from fedhdp.privacy.ledger import Budget
from fedhdp.simulation import simulate

COLUMNS = 4
ON_BASIS = mlp(COLUMNS, 5, 3)
OPEN_NODES = [FIRST_NODE, FIRST_NODE + 1]  # the others of make_grid have levels with noise


def trainer_of(context: Context, model=ON_BASIS) -> Trainer:
    number = int(context.node_config["partition-id"])
    train, test = client_examples(DATA.train, number), client_examples(DATA.test, number)
    return jax_trainer(model, TRAINING, *train, test=test, batches=(SEED, number), input_scale=DATA.input_scale)


def grid_of(model=ON_BASIS, **changes: object) -> InProcessGrid:
    return make_grid(app=client_app(partial(trainer_of, model=model)), **changes)


def run_on_basis(grid: InProcessGrid, deployment: Deployment, model=ON_BASIS):
    score = scorer(model, *client_examples(DATA.test, 7), DATA.input_scale)
    return run_deployment(grid, deployment, initial_arrays(model, SEED), score)


def pca_deployment(tmp_path, **changes: object) -> Deployment:
    return make_deployment(tmp_path, **({"basis": PcaBasis(COLUMNS), "rounds": 4, "evaluate_every": 2} | changes))


def nodes_asked(grid: InProcessGrid) -> list[int]:
    return sorted(message.metadata.dst_node_id for message in grid.pushed_of(MOMENTS))


def stored(deployment: Deployment) -> np.ndarray:
    return np.load(f"{deployment.out}/basis.npy")


@pytest.mark.parametrize("model", [ON_BASIS, linear(COLUMNS, 3)], ids=["mlp", "linear"])
def test_deployment_on_a_basis_of_who_opted_out_equals_simulation(tmp_path, model):
    deployment = pca_deployment(tmp_path, cohort_seed=7, arithmetic="float32")
    grid = grid_of(model)
    (variant,) = run_on_basis(grid, deployment, model).variants
    assert nodes_asked(grid) == OPEN_NODES

    mechanism = deployment.mechanism({"open": 2, "mid": 3, "strict": 3})
    data = DATA.with_levels(group_by_group(mechanism))
    basis = pca_basis(public_moments(data, ["open"]), COLUMNS)
    np.testing.assert_allclose(stored(deployment), basis, atol=1e-6)
    simulation = simulate(data, with_basis(model, basis), mechanism, TRAINING, None, 4, seed=SEED, noise_seed=7)
    trained = saved_model(deployment)
    for name, array in simulation.parameters.items():
        np.testing.assert_allclose(trained[name], array, atol=1e-5)
    scores = {(row.group, row.model, row.metric): row.value for row in simulation.history}
    for group in variant.groups:
        for of in ("global", "personal"):
            assert group.value("accuracy", of) == pytest.approx(scores[group.name, of, "accuracy"], abs=1e-6)
    assert fingerprint(stored(deployment))[:12] in variant.preparation
    assert variant.groups[0].epsilon == float("inf")
    assert variant.values["global/accuracy"] == pytest.approx(
        scorer(with_basis(model, basis), *client_examples(DATA.test, 7), DATA.input_scale)(
            {name.removeprefix("global/"): array for name, array in trained.items()}
        )["accuracy"]
    )


def test_a_basis_that_needs_no_messages_is_a_part_of_the_apps_model(tmp_path):
    model = with_basis(ON_BASIS, cosine_basis(DATA.input_shape, COLUMNS))
    deployment, grid = make_deployment(tmp_path, cohort_seed=7, arithmetic="float32"), grid_of(model)
    run_on_basis(grid, deployment, model)
    assert nodes_asked(grid) == []
    mechanism = deployment.mechanism({"open": 2, "mid": 3, "strict": 3})
    data = DATA.with_levels(group_by_group(mechanism))
    simulation = simulate(data, model, mechanism, TRAINING, None, 3, seed=SEED, noise_seed=7)
    for name, array in simulation.parameters.items():
        np.testing.assert_allclose(saved_model(deployment)[name], array, atol=1e-5)


def test_who_opted_out_is_asked_once(tmp_path):
    deployment = pca_deployment(tmp_path)
    first, second = grid_of(state_dir=tmp_path / "clients"), grid_of(state_dir=tmp_path / "clients")
    first.on_push = before_round(2, crash)
    with pytest.raises(Crash):
        run_on_basis(first, deployment)
    matrix = stored(deployment)
    late = Node(200, second.nodes[FIRST_NODE].app, **{"partition-id": 0, "privacy": "open"})
    second.nodes[200] = late
    run_on_basis(second, deployment)
    assert nodes_asked(first) == OPEN_NODES
    assert nodes_asked(second) == []  # nor anyone who opts out later
    np.testing.assert_array_equal(stored(deployment), matrix)
    costs = client_costs(tmp_path / "clients" / "client 0")
    assert {cost.noise_multiplier for cost in costs} == {0.0}  # the client's own ledger says that nothing protects it


def test_where_nobody_opted_out_nothing_is_asked_or_charged(tmp_path):
    deployment, grid = pca_deployment(tmp_path), grid_of()
    for node in OPEN_NODES:
        del grid.nodes[node]
    with raises_field("basis", DataError):
        run_on_basis(grid, deployment)
    assert nodes_asked(grid) == []
    assert grid.pushed_of("train") == []


@pytest.mark.parametrize(
    ("level", "owner"),
    [("strict", {"privacy": "strict"}), ("open", {"privacy": "strict"}), ("open", {}), ("open", {"privacy": "mid"})],
)
def test_a_client_who_did_not_opt_out_sends_no_second_moments_to_whoever_asks(tmp_path, level, owner):
    asked = []

    def trainer(context: Context) -> Trainer:
        plain = trainer_of(context)
        return plain._replace(moments=lambda: asked.append(level) or plain.moments())

    node = Node(1, client_app(trainer), **{"partition-id": 4}, **owner)
    deployment = make_deployment(tmp_path, noise_seed=None, cohort_seed=None, rounds=1)
    grid = InProcessGrid([node, Node(2, client_app(trainer), **{"partition-id": 1, "privacy": "open"})])
    run_deployment(grid, deployment, initial_arrays(mlp(12, 5, 3), SEED))
    run = str(node.received_of("query")[0].content["offer"]["run"])
    for noise in (0.0, 1.0):
        request = RoundRequest("0" * 16, run, 0, 1, level, noise, 0.5, 0.05)
        reply = node.answer(moments_request(1, request, 10.0))
        assert is_declined(reply)
        assert set(reply.content) == {"request"}
    assert asked == []


def test_an_owner_with_a_budget_sends_no_second_moments(tmp_path):
    deployment = pca_deployment(tmp_path, noise_seed=None, cohort_seed=None, rounds=1)
    grid = grid_of(state_dir=tmp_path / "clients")
    grid.nodes[FIRST_NODE].context.node_config["epsilon"] = 5.0
    run_on_basis(grid, deployment)
    assert nodes_asked(grid) == OPEN_NODES[1:]  # it says that its budget is exhausted when it enrols
    run = str(grid.nodes[FIRST_NODE].received_of("query")[0].content["offer"]["run"])
    request = RoundRequest("0" * 16, run, 0, 1, "open", 0.0, 0.5, 0.05)
    assert is_declined(grid.nodes[FIRST_NODE].answer(moments_request(FIRST_NODE, request, 10.0)))


SQUARE = np.eye(12)
INVALID = {
    "not a number": {"sum": SQUARE + np.nan},
    "infinite": {"sum": SQUARE + np.inf},
    "of other inputs": {"sum": np.eye(11)},
    "no matrix": {"sum": np.ones(12)},
    "not square": {"sum": np.ones((12, 3))},
    "float32": {"sum": SQUARE.astype(np.float32)},
    "no examples": {"sum": SQUARE, "examples": 0},
    "no count": {"sum": SQUARE, "examples": "many"},
    "another token": {"sum": SQUARE, "token": "0" * 16},
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_second_moments_are_left_out(tmp_path, name):
    changes = dict(INVALID[name])
    deployment, grid = pca_deployment(tmp_path, rounds=1), grid_of()

    def tamper(message: Message, reply: Message, node: Node) -> list[Message]:
        if message.metadata.message_type == MOMENTS and node.id == OPEN_NODES[1]:
            reply.content["moments"] = ArrayRecord({"sum": Array(changes.pop("sum"))})
            reply.content["request"] = ConfigRecord({**reply.content["request"], **changes})
        return [reply]

    grid.tamper = tamper
    run_on_basis(grid, deployment)
    x_N, _ = client_examples(DATA.train, 0)
    expected = pca_basis(second_moments(x_N, DATA.input_scale), COLUMNS)
    np.testing.assert_allclose(stored(deployment), expected, atol=1e-6)


def test_without_any_second_moments_the_run_does_not_begin(tmp_path):
    deployment, grid = pca_deployment(tmp_path), grid_of()
    grid.tamper = lambda message, reply, node: [] if message.metadata.message_type == MOMENTS else [reply]
    with raises_field("basis", DataError):
        run_on_basis(grid, deployment)
    assert grid.pushed_of("train") == []
    grid.tamper = lambda message, reply, node: [reply]
    run_on_basis(grid, deployment)  # submitted again, it asks again and runs
    assert len(grid.pushed_of("train")) > 0


def test_personal_models_of_different_bases_do_not_mix(tmp_path):
    bases = [cosine_basis((12,), COLUMNS), cosine_basis((12,), COLUMNS, exponent=0.5)]
    app = client_app(trainer_of)
    node = Node(1, app, **{"partition-id": 0, "privacy": "open"})
    state = InMemoryState(node.context.state)
    model = initial_arrays(ON_BASIS, SEED)
    state.save_personal(model | {BASIS: bases[0]})
    assert state.load_personal(model | {BASIS: bases[1]}) is None
    assert state.load_personal(model) is None
    np.testing.assert_array_equal(state.load_personal(model | {BASIS: bases[0]})["first/w"], model["first/w"])


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"levels": {"strict": LEVELS["strict"]}}, "basis"),
        (
            {"levels": LEVELS | {"open": PrivacyLevel(sampling_rate=0.0, epsilon=float("inf"))}},
            "levels.open.sampling_rate",
        ),
        ({"budgets": {"open": Budget(10.0, 1e-5)}}, "budgets.open"),
    ],
)
def test_a_deployment_whose_ledger_would_not_say_what_the_basis_cost_is_refused(tmp_path, changes, field):
    with raises_field(field):
        pca_deployment(tmp_path, **changes)


def test_a_basis_is_read_from_a_run_configuration_and_kept(tmp_path):
    deployment = pca_deployment(tmp_path)
    assert Deployment.from_toml(deployment.to_toml().decode()) == deployment
    assert replace(deployment, basis=PcaBasis(3)).changed_fields(deployment) == ["basis"]
    config = {
        "out": "o",
        "ledger": "l",
        "rounds": 1,
        "clip": 0.3,
        "levels.a.sampling-rate": 1.0,
        "levels.a.epsilon": float("inf"),
    }
    read = Deployment.from_run_config(config | {"basis.name": "pca", "basis.size": 9, "basis.exponent": 0.3})
    assert read.basis == PcaBasis(9, exponent=0.3)
    with pytest.raises(ConfigError, match=r"basis\.name: Invalid value 'cosine'"):
        Deployment.from_run_config(config | {"basis.name": "cosine"})


def test_a_client_of_another_framework_loads_no_jax():
    program = "import sys, fedhdp.flower.clientapp; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_an_array_with_the_name_of_a_basis_is_refused(tmp_path):
    with raises_field("initial_arrays", ModelError):
        run_deployment(grid_of(), make_deployment(tmp_path), {BASIS: np.ones((2, 2), np.float32)})
