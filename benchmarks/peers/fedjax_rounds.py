"""FedJAX: its federated averaging, unchanged. It has no clipping and no noise, so it does less than the others."""

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
import work as w

task = w.read_task()
if task.options.get("devices", 1) > 1:  # before JAX starts
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={task.options['devices']}"

import fedjax  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import jax_networks as networks  # noqa: E402
import jaxlib  # noqa: E402
import numpy as np  # noqa: E402
from fedjax.algorithms import fed_avg  # noqa: E402

work, data = task.work, task.work.data()
apply = networks.network(work)
steps = 0


class Client(fedjax.ClientDataset):
    """A client whose batches are those of the work: its own batches run on over the ends of epochs."""

    def shuffle_repeat_batch(self, hparams=None, **kwargs) -> Sequence[dict[str, jnp.ndarray]]:
        global steps
        order = np.random.permutation(len(self))
        x, y = (self.raw_examples[name][order] for name in ("x", "y"))
        x = networks.inputs(work, x)
        cuts = range(0, len(self), hparams.batch_size)
        batches = [{"x": x[cut : cut + hparams.batch_size], "y": y[cut : cut + hparams.batch_size]} for cut in cuts]
        if task.options.get("backend") != "pmap":  # that one stacks clients in numpy itself
            batches = jax.device_put(batches)
        steps += hparams.num_epochs * len(batches)
        return [batch for _ in range(hparams.num_epochs) for batch in batches]


def loss(model, batch, rng):
    return networks.loss(apply(model, batch["x"], rng), batch["y"])


def main() -> None:
    x_KM, y_KM = data.x_KM, data.y_KM.astype(np.int32)
    fedjax.set_for_each_client_backend(task.options.get("backend", "jit"))
    algorithm = fed_avg.federated_averaging(
        fedjax.grad(loss),
        fedjax.optimizers.sgd(work.learning_rate),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=work.batch, num_epochs=work.epochs),
    )
    state = algorithm.init({name: jnp.asarray(part) for name, part in w.initial_model(work).items()})

    def run_round(number: int) -> None:
        nonlocal state
        cohort = np.random.default_rng([work.seed, number]).choice(work.clients, work.cohort, replace=False)
        keys = jax.random.split(jax.random.PRNGKey(number), work.cohort)
        clients = [(int(k), Client({"x": x_KM[k], "y": y_KM[k]}), key) for k, key in zip(cohort, keys, strict=True)]
        state, _ = algorithm.apply(state, clients)
        jax.block_until_ready(state.params)

    times = w.time_rounds(task, run_round)
    model = {name: np.asarray(state.params[name]) for name in work.shapes()}
    versions = {"fedjax": version("fedjax"), "jax": jax.__version__, "jaxlib": jaxlib.__version__}
    w.write_result(task, data, times, steps / (task.warm_up + task.rounds), model, versions)


main()
