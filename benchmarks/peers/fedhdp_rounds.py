"""This project, with or without personal models: ``Simulation.run_round`` until its result is computed.

The network is the built-in one, a module of Flax through ``fedhdp.adapters``, or functions of plain JAX.
"""

import sys
from pathlib import Path

import numpy as np

import fedhdp

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
import jax
import jax_networks
import jaxlib
import work as w
from flax.traverse_util import flatten_dict, unflatten_dict

from fedhdp import adapters
from fedhdp.client import LocalTraining
from fedhdp.clips import AdaptiveClip
from fedhdp.data import FederatedData, examples
from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.models import Model, Parameters, cnn, cross_entropy, mlp
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


def mean_cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    """The loss of a sequence: the mean of its tokens'."""
    return cross_entropy(logits, y).mean(axis=-1)


def make_model(work: w.Work, network: str) -> Model:
    """The network as a model: ``built-in``, of ``flax`` or of ``jax``."""
    loss = mean_cross_entropy if isinstance(work, w.Sequence) else cross_entropy
    if network == "built-in":
        if isinstance(work, w.Femnist):
            return cnn(w.SIDE, work.classes, w.KERNEL, work.channels, work.hidden)
        return mlp(w.INPUTS, work.hidden, work.classes)
    if network == "jax":
        return Model(
            lambda key: jax.tree.map(jax.numpy.asarray, w.initial_model(work)), jax_networks.network(work), loss
        )
    from flax_networks import network as module

    example = np.zeros(work.length, np.int32) if isinstance(work, w.Sequence) else np.zeros((w.SIDE, w.SIDE))
    return adapters.from_flax(module(work), example, loss=loss)


class Layout:
    """A work's parameters in the arrays of a model, and back."""

    def __init__(self, work: w.Work, network: str, like: Parameters):
        self.work, self.network = work, network
        self.leaves, self.tree = jax.tree.flatten(like)
        self.is_transposed: dict[str, bool] = {}
        self.place: dict[str, int] = {}
        if network != "built-in":
            return
        for name, shape in work.shapes().items():  # the same arrays, perhaps transposed or with axes merged
            left = [place for place in range(len(self.leaves)) if place not in self.place.values()]
            same = [place for place in left if self.leaves[place].size == np.prod(shape)]
            untransposed = [place for place in same if len(shape) == 1 or self.leaves[place].shape != shape[::-1]]
            self.place[name] = (untransposed or same)[0]
            self.is_transposed[name] = not untransposed

    def to_model(self, parameters: w.Parameters) -> Parameters:
        """The model's arrays."""
        if self.network == "jax":
            return parameters
        if self.network == "flax":
            return unflatten_dict(parameters, sep="/")
        leaves = list(self.leaves)
        for name, place in self.place.items():
            part = parameters[name].T if self.is_transposed[name] else parameters[name]
            leaves[place] = part.reshape(leaves[place].shape)
        return jax.tree.unflatten(self.tree, leaves)

    def from_model(self, parameters: Parameters) -> w.Parameters:
        """The arrays by name."""
        if self.network == "built-in":
            leaves = jax.tree.leaves(parameters)
            parts = {name: np.asarray(leaves[place]) for name, place in self.place.items()}
            transposed = {name: part.T if self.is_transposed[name] else part for name, part in parts.items()}
            return {name: transposed[name].reshape(shape) for name, shape in self.work.shapes().items()}
        flat = parameters if self.network == "jax" else flatten_dict(parameters, sep="/")
        return {name: np.asarray(flat[name]) for name in self.work.shapes()}


def make_simulation(work: w.Work, data: w.Data, options: dict) -> tuple[Simulation, Layout]:
    """The simulation of a work, and how its network's arrays are laid out."""
    personal, network = options.get("personal", False), options.get("network", "built-in")
    x_N, y_N = (a_KM.reshape(-1, *a_KM.shape[2:]) for a_KM in (data.x_KM, data.y_KM.astype(np.int32)))
    train = examples(x_N, y_N, np.full(work.clients, work.samples))
    server = data.server_x_N, data.server_y_N.astype(np.int32)
    scale = None if isinstance(work, w.Sequence) else 1 / 255
    federated = FederatedData("benchmark", train, train, *server, work.classes, input_scale=scale)
    model = make_model(work, network)
    training = LocalTraining(work.epochs, work.batch, work.learning_rate, personalize=personal)
    mechanism = paper_mechanism(work) if personal else peers_mechanism(work)
    layout = Layout(work, network, jax.eval_shape(model.init, jax.random.key(0)))
    initial = layout.to_model(w.initial_model(work))
    return Simulation(federated, model, mechanism, training, seed=work.seed, initial_model=initial), layout


def main() -> None:
    fedhdp.use_cpu_cores()
    task = w.read_task()
    work, data = task.work, task.work.data()
    simulation, layout = make_simulation(work, data, task.options)

    def run_round(number: int) -> None:
        simulation.run_round()
        simulation.wait()

    times = w.time_rounds(task, run_round)
    trained, training = layout.from_model(simulation.model()), simulation.training
    cohort_size = round(simulation.mechanism.expected_cohort_size())
    models = 2 if training.personalize else 1
    steps = cohort_size * training.epochs * -(-work.samples // training.batch_size) * models
    versions = {"fedhdp": fedhdp.__version__, "jax": jax.__version__, "jaxlib": jaxlib.__version__}
    device = f"{len(jax.devices())} × {jax.devices()[0].device_kind}"
    w.write_result(task, data, times, steps, trained, versions, device=device)


if __name__ == "__main__":
    main()
