"""Your own data, model, levels, weights and optimizer: `python examples/own.py`, a quarter of a minute on two cores.

The first two functions are all that a command needs: `fedhdp run examples/own.toml` compares algorithms on these clinics,
writes the run to a folder and can resume it. The rest does the same in Python, with an optax optimizer on the server.

Six hundred clinics, with 15 to 60 patients each, predict how many days a patient stays from eight measurements. Clinics
differ, so each has a personal model. A third of them choose strong privacy, a third some, a third none.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from msgspec.structs import replace

from fedhdp.client import LocalTraining
from fedhdp.clips import AdaptiveClip
from fedhdp.data import FederatedData, examples
from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.metrics import Metric
from fedhdp.models import Model, squared_error
from fedhdp.privacy.accounting import epsilon_reports
from fedhdp.privacy.calibration import calibrate
from fedhdp.simulation import Simulation

ROUNDS, DELTA = 60, 1e-3


# Data: the examples of one client after the other, and each client's count. A client without test examples has the count 0.
def data(seed):
    rng = np.random.default_rng(seed)
    counts = rng.integers(15, 61, 600)
    shared = 2 * rng.normal(size=(8, 1))
    rules = [shared + 0.5 * rng.normal(size=(8, 1)) for _ in counts]

    def patients(counts):
        """Measurements, and the days by each clinic's rule, in the shape of the model's outputs."""
        x = rng.normal(size=(counts.sum(), 8)).astype(np.float32)
        y = np.concatenate([part @ rule for part, rule in zip(np.split(x, np.cumsum(counts)[:-1]), rules, strict=True)])
        return x, (y + 0.1 * rng.normal(size=y.shape)).astype(np.float32)

    train, test = examples(*patients(counts), counts), examples(*patients(counts // 5), counts // 5)
    server_x = rng.normal(size=(500, 8)).astype(np.float32)
    server = server_x, (server_x @ shared).astype(np.float32)
    return FederatedData("clinics", train, test, *server, classes=1, server_has_client_data=False)


# Model: any pytree of float arrays, and a function of it. The key is for dropout, and None in evaluation.
def model():
    def init(key):
        first, second = jax.random.split(key)
        return {"w1": 0.3 * jax.random.normal(first, (8, 16)), "w2": 0.3 * jax.random.normal(second, (16, 1))}

    def apply(parameters, x, key):
        return jnp.tanh(x @ parameters["w1"]) @ parameters["w2"]

    def right_to_a_day(outputs, labels):
        """A metric: one number from a clinic's test examples, the share that is predicted to a day."""
        return (abs(outputs - labels) < 1).mean()

    shown = Metric("right_to_a_day", right_to_a_day, percent=True)
    return Model(init, apply, loss=squared_error, metrics=(shown, "mean_squared_error"))


# The server: any optax transformation. Its gradient is minus the noised update. It costs no privacy.
NESTEROV = optax.sgd(0.5, momentum=0.5, nesterov=True)


# The mechanism: a clinic is in the group of its level's name; as these data have no levels, the simulation's seed draws
# who is in which group. `calibrate` computes each group's noise from its epsilon.
groups = [PrivacyGroup(name, 200, 0.0, sampling_rate=0.2, pull=0.1) for name in ("none", "some", "strong")]
mechanism = Mechanism(tuple(groups), clip=AdaptiveClip(initial=1.0))
mechanism = calibrate(mechanism, {"some": 8.0, "strong": 2.0}, ROUNDS, DELTA)


def by_noise(mechanism):
    """Weights of one over the squared noise multiplier, at most 1."""
    weight = {group.name: 1 / max(group.noise_multiplier, 1.0) ** 2 for group in mechanism.groups}
    return replace(mechanism, groups=tuple(replace(group, weight=weight[group.name]) for group in mechanism.groups))


if __name__ == "__main__":
    clinics, net = data(seed=0), model()
    training = LocalTraining(epochs=3, batch_size=10, learning_rate=0.02)
    mechanisms = {"equal": mechanism, "by noise": by_noise(mechanism)}
    for report in epsilon_reports(mechanisms["by noise"], ROUNDS, DELTA).values():
        print(report)
    simulation = Simulation(clinics, net, list(mechanisms.values()), training, NESTEROV)
    simulation.run(ROUNDS)
    for name, rows in zip(mechanisms, simulation.evaluate(), strict=True):
        print(f"{name} weights")
        for row in rows:
            if row.metric == "right_to_a_day":
                print(f"  {row.group:8} {row.model:9} {row.value:.3f}")

    # Each clinic's values, and a personal model as a function.
    scores = simulation.client_scores()
    for number, name in enumerate(mechanisms):
        better = scores["personal/right_to_a_day"][:, number] > scores["global/right_to_a_day"][:, number]
        print(f"{name} weights: the personal model is better for {better.sum()} of {len(better)} clinics")
    theta = simulation.model(client=3, number=1)
    days = net.apply(theta, clinics.train.x_N[clinics.train.start_K[3] :][:3], None)[:, 0]
    print("days that clinic 3 predicts for its first patients:", ", ".join(f"{value:.1f}" for value in days))
