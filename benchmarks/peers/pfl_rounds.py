"""Apple's pfl: federated averaging in its simulated backend, with its Gaussian mechanism applied centrally.

With two processes it is run as its documentation says: the same script twice, with each other's addresses.
"""

import os
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
import work as w


def rounds() -> None:
    import numpy as np
    import torch
    import torch_networks as networks
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.internal.ops import pytorch_ops
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel
    from pfl.privacy.gaussian_mechanism import GaussianMechanism
    from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
    from pfl.version import __version__

    task = w.read_task()
    work, data = task.work, task.work.data()
    torch.set_num_threads(task.options.get("threads", 1))
    torch.manual_seed(work.seed)
    np.random.seed(work.seed)  # the same in every process, or they would draw different cohorts
    steps = 0

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = networks.network(work)

        def loss(self, x, y):
            nonlocal steps
            steps += 1
            return networks.loss(self.net(x), y)

        def metrics(self, x, y):
            return {}

    class Clock(TrainingProcessCallback):
        """The time at which each round ends."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def on_train_begin(self, *, model):
            self.times.append(time.monotonic())
            return Metrics()

        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            self.times.append(time.monotonic())
            return False, Metrics()

    net = Net()
    networks.set_parameters(net, networks.to_torch(work, w.initial_model(work)))
    model = PyTorchModel(
        net, partial(torch.optim.SGD, fused=True), central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0)
    )
    x_KM, y_KM = networks.clients(work, data)

    def client(number: int) -> Dataset:
        return Dataset((networks.inputs(work, x_KM[number]), y_KM[number]), user_id=str(number))

    train = FederatedDataset(client, get_user_sampler("minimize_reuse", list(range(work.clients))))
    privacy = CentrallyAppliedPrivacyMechanism(GaussianMechanism(work.clip, work.noise_multiplier))
    backend = SimulatedBackend(training_data=train, val_data=train, postprocessors=[privacy])
    total_rounds = task.warm_up + task.rounds
    clock = Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=total_rounds,
            evaluation_frequency=total_rounds + 1,
            train_cohort_size=work.cohort,
            val_cohort_size=0,
        ),
        backend,
        model,
        NNTrainHyperParams(
            local_num_epochs=work.epochs, local_learning_rate=work.learning_rate, local_batch_size=work.batch
        ),
        callbacks=[clock],
    )
    world = pytorch_ops.distributed.world_size
    if world > 1:
        total = torch.tensor(float(steps))
        torch.distributed.all_reduce(total)
        steps = total.item()
    if pytorch_ops.distributed.global_rank == 0:
        model_parts = networks.get_model(work, net)
        versions = {"pfl": __version__, "torch": torch.__version__}
        w.write_result(task, data, clock.times, steps / total_rounds, model_parts, versions, processes=world)


def processes(count: int) -> None:
    """Run this script once for each process."""
    ports = []
    for _ in range(count):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            ports.append(free.getsockname()[1])
    addresses = ",".join(f"localhost:{port}" for port in ports)
    workers = [
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env={**os.environ, "PFL_WORKER_ADDRESSES": addresses, "PFL_WORKER_RANK": str(rank)},
        )
        for rank in range(count)
    ]
    codes = [process.wait() for process in workers]
    if any(codes):
        raise SystemExit("a process failed")


if __name__ == "__main__":
    count = w.read_task().options.get("processes", 1)
    if count > 1 and "PFL_WORKER_RANK" not in os.environ:
        processes(count)
    else:
        rounds()
