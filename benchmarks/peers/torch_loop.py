"""A plain PyTorch loop over the clients of a round: clip each update, add them up, add noise."""

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
import torch_networks as networks
import work as w


def main() -> None:
    task = w.read_task()
    work, data = task.work, task.work.data()
    torch.set_num_threads(task.options.get("threads", 1))
    torch.manual_seed(work.seed)
    x_KM, y_KM = networks.clients(work, data)
    net = networks.network(work)
    if task.options.get("channels_last"):
        net = net.to(memory_format=torch.channels_last)
    networks.set_parameters(net, networks.to_torch(work, w.initial_model(work)))
    local = list(net.parameters())
    theta = [parameter.detach().clone() for parameter in local]
    steps = 0

    def run_round(number: int) -> None:
        nonlocal steps
        cohort = np.random.default_rng([work.seed, number]).choice(work.clients, work.cohort, replace=False)
        total = [torch.zeros_like(part) for part in theta]
        for client in cohort.tolist():
            with torch.no_grad():
                torch._foreach_copy_(local, theta)
            steps += networks.train(work, net, x_KM[client], y_KM[client])
            with torch.no_grad():
                update = torch._foreach_sub(local, theta)
                norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(update)))
                torch._foreach_add_(total, torch._foreach_mul(update, torch.clamp(work.clip / norm, max=1.0)))
        for part, total_part in zip(theta, total, strict=True):
            part += (total_part + work.clip * work.noise_multiplier * torch.randn_like(part)) / work.cohort

    times = w.time_rounds(task, run_round)
    model = networks.from_torch(work, (part.numpy() for part in theta))
    peak = w.gemm(lambda a, b: torch.from_numpy(a) @ torch.from_numpy(b))
    steps_per_round, versions = steps / (task.warm_up + task.rounds), {"torch": torch.__version__}
    w.write_result(task, data, times, steps_per_round, model, versions, gemm_gflops=peak)


main()
