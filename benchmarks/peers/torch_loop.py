"""A plain PyTorch loop over the clients of a round: clip each update, add them up, add noise."""

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import work as w


def main() -> None:
    task = w.read_task()
    work, data = task.work, w.data(task.work)
    threads = task.options.get("threads", 1)
    torch.set_num_threads(threads)
    x_KM = torch.from_numpy(data.x_KM).reshape(work.clients, work.samples, w.INPUTS)
    y_KM = torch.from_numpy(data.y_KM)
    parts = [torch.from_numpy(part) for part in w.initial_model(work)]
    net = torch.nn.Sequential(
        torch.nn.Linear(w.INPUTS, work.hidden), torch.nn.ReLU(), torch.nn.Linear(work.hidden, w.CLASSES)
    )
    theta = [part.T.contiguous() if part.ndim == 2 else part for part in parts]  # torch keeps outputs before inputs
    local = list(net.parameters())
    loss = torch.nn.CrossEntropyLoss()
    steps = 0

    def train(client: int) -> None:
        nonlocal steps
        optimizer = torch.optim.SGD(local, lr=work.learning_rate, fused=True)
        order = torch.randperm(work.samples)
        x, y = x_KM[client][order].float() / 255, y_KM[client][order]
        batches = list(zip(x.split(work.batch), y.split(work.batch), strict=True))
        for _ in range(work.epochs):
            for x_B, y_B in batches:
                optimizer.zero_grad()
                loss(net(x_B), y_B).backward()
                optimizer.step()
                steps += 1

    def run_round(number: int) -> None:
        cohort = np.random.default_rng([work.seed, number]).choice(work.clients, work.cohort, replace=False)
        total = [torch.zeros_like(part) for part in theta]
        for client in cohort:
            with torch.no_grad():
                for parameter, part in zip(local, theta, strict=True):
                    parameter.copy_(part)
            train(int(client))
            with torch.no_grad():
                update = [parameter - part for parameter, part in zip(local, theta, strict=True)]
                norm = torch.sqrt(sum(part.square().sum() for part in update))
                scale = torch.clamp(work.clip / norm, max=1.0)
                for total_part, part in zip(total, update, strict=True):
                    total_part += scale * part
        for part, total_part in zip(theta, total, strict=True):
            part += (total_part + work.clip * work.noise_multiplier * torch.randn_like(part)) / work.cohort

    seconds = w.time_rounds(task, run_round)
    model = [part.numpy().T if part.ndim == 2 else part.numpy() for part in theta]
    peak = w.gemm(lambda a, b: torch.from_numpy(a) @ torch.from_numpy(b))
    steps_per_round, versions = steps / (task.warm_up + task.rounds), {"torch": torch.__version__}
    w.write_result(task, data, seconds, steps_per_round, model, versions, gemm_gflops=peak)


main()
