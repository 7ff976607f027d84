"""Flower's simulation on Ray: its federated averaging in its own wrapper for clipping and noise, a PyTorch client.

The rounds run from Python; the runtime is the one behind ``flwr run``.
"""

import functools
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])  # for the workers
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import torch
import torch_networks as networks
import work as w
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from flwr.simulation import run_simulation

client_app = ClientApp()


@functools.lru_cache(maxsize=1)
def worker(work: w.Work) -> tuple[torch.Tensor, torch.Tensor, torch.nn.Module]:
    """What a worker keeps from client to client."""
    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())
    return *networks.clients(work, work.data()), networks.network(work)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    work = w.from_dict(json.loads(message.content["config"]["work"]))
    x_KM, y_KM, net = worker(work)
    client = int(context.node_config["partition-id"])
    networks.set_parameters(net, message.content["arrays"].to_numpy_ndarrays())
    steps = networks.train(work, net, x_KM[client], y_KM[client])
    arrays = ArrayRecord([parameter.detach().numpy() for parameter in net.parameters()])
    metrics = MetricRecord({"num-examples": work.samples, "steps": steps})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def main() -> None:
    from flower_rounds import client_app  # workers find it by this name

    task = w.read_task()
    work, data = task.work, task.work.data()
    server_app, outcome = ServerApp(), {}

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        average = FedAvg(
            fraction_train=work.cohort / work.clients,
            fraction_evaluate=0.0,
            min_train_nodes=work.cohort,
            min_evaluate_nodes=0,
            min_available_nodes=work.clients,
        )
        strategy = DifferentialPrivacyServerSideFixedClipping(
            average, noise_multiplier=work.noise_multiplier, clipping_norm=work.clip, num_sampled_clients=work.cohort
        )
        times = outcome["times"] = []
        outcome["result"] = strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(networks.to_torch(work, w.initial_model(work))),
            train_config=ConfigRecord({"work": json.dumps(w.as_dict(work))}),
            num_rounds=task.warm_up + task.rounds,
            evaluate_fn=lambda number, arrays: times.append(time.monotonic()),
        )

    workers = task.options.get("workers", 2)
    run_simulation(
        server_app,
        client_app,
        num_supernodes=work.clients,
        backend_config={"init_args": {"num_cpus": workers}, "client_resources": {"num_cpus": 1}},
    )
    import flwr
    import ray

    result = outcome["result"]
    steps = [metrics["steps"] * work.cohort for metrics in result.train_metrics_clientapp.values()]
    model = networks.from_torch(work, iter(result.arrays.to_numpy_ndarrays()))
    versions = {"flwr": flwr.__version__, "ray": ray.__version__, "torch": torch.__version__}
    w.write_result(task, data, outcome["times"], sum(steps) / len(steps), model, versions, workers=workers)


if __name__ == "__main__":
    main()
