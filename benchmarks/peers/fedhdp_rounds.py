"""This project, with or without personal models: ``Simulation.run_round`` until its result is computed."""

import sys
from pathlib import Path

import numpy as np

import fedhdp

sys.path.insert(0, str(Path(__file__).parents[1]))
import jax
import jaxlib
import work as w
from jax.flatten_util import ravel_pytree

from fedhdp.client import LocalTraining
from fedhdp.clips import AdaptiveClip
from fedhdp.data import FederatedData, examples
from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.models import mlp
from fedhdp.simulation import Simulation


def peers_mechanism(work: w.Work) -> Mechanism:
    """The peers' mechanism: one group, a fixed clip."""
    group = PrivacyGroup("all", work.clients, work.noise_multiplier, work.cohort / work.clients)
    return Mechanism((group,), work.clip, sampling="fixed")


def paper_mechanism(work: w.Work) -> Mechanism:
    """The paper's mechanism: groups with different noise and weights, an adaptive clip."""
    rate, public = work.cohort / work.clients, max(1, work.clients // 20)
    groups = (
        PrivacyGroup("private", work.clients - public, work.noise_multiplier, rate, weight=0.1),
        PrivacyGroup("opted out", public, 0.0, rate),
    )
    return Mechanism(groups, AdaptiveClip(work.clip), sampling="fixed")


def main() -> None:
    fedhdp.use_cpu_cores()
    task = w.read_task()
    work, data, personal = task.work, w.data(task.work), task.options.get("personal", False)
    train = examples(
        data.x_KM.reshape(-1, w.SIDE, w.SIDE),
        data.y_KM.reshape(-1).astype(np.int32),
        np.full(work.clients, work.samples),
    )
    server = data.server_x_N, data.server_y_N.astype(np.int32)
    federated = FederatedData("benchmark", train, train, *server, w.CLASSES, input_scale=1 / 255)
    model = mlp(w.INPUTS, work.hidden, w.CLASSES)
    training = LocalTraining(work.epochs, work.batch, work.learning_rate, personalize=personal)
    mechanism = paper_mechanism(work) if personal else peers_mechanism(work)
    simulation = Simulation(federated, model, mechanism, training, seed=work.seed)
    w1, b1, w2, b2 = w.initial_model(work)
    theta_P, _ = ravel_pytree({"first": {"w": w1, "b": b1}, "rest": {"w": w2.T, "b": b2}})
    initial = simulation.server_state._replace(theta_P=theta_P[None])
    simulation.server_state = jax.device_put(initial, simulation.engine.replicated)

    def run_round(number: int) -> None:
        simulation.run_round()
        simulation.wait()

    seconds = w.time_rounds(task, run_round)
    trained = simulation.engine.unravel(simulation.global_model())
    parts = [trained["first"]["w"], trained["first"]["b"], trained["rest"]["w"].T, trained["rest"]["b"]]
    cohort_size = round(mechanism.expected_cohort_size())
    steps = cohort_size * training.epochs * -(-work.samples // training.batch_size) * (2 if personal else 1)
    versions = {"fedhdp": fedhdp.__version__, "jax": jax.__version__, "jaxlib": jaxlib.__version__}
    device = f"{len(jax.devices())} × {jax.devices()[0].device_kind}"
    w.write_result(task, data, seconds, steps, [np.asarray(part) for part in parts], versions, device=device)


main()
