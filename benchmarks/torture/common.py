"""What all trials use: what must hold, random damage, and what a ledger says."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from fedhdp.clips import AdaptiveClip
from fedhdp.errors import FedHDPError
from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.privacy.costs import privacy_costs
from fedhdp.privacy.ledger import Ledger

ROUNDS = 60
EXPERIMENT = f"""
rounds = {ROUNDS}
evaluate_every = 4
checkpoint_seconds = 0.0
noise_seed = 3
delta = 1e-3
data = {{ name = "handwriting", clients = 20, samples = 8, test_samples = 4, server_test = 50 }}
model = {{ hidden = 4, basis = {{ name = "cosine", size = 9 }} }}
keep_personal = true
training = {{ epochs = 1, batch_size = 4 }}
variants = [{{ algorithm = "fedhdp" }}, {{ algorithm = "dp_fedavg" }}]
[mechanism]
clip = {{ initial = 0.5 }}
groups = [
  {{ name = "open", clients = 5, sampling_rate = 0.5, noise_multiplier = 0.0 }},
  {{ name = "strict", clients = 15, sampling_rate = 0.5, noise_multiplier = 1.0, weight = 0.1 }},
]
"""
MECHANISM = Mechanism(
    (PrivacyGroup("lax", 60, 1.0, 0.1, weight=0.5), PrivacyGroup("strict", 30, 2.0, 0.1)), clip=AdaptiveClip(1.0)
)
COSTS = privacy_costs(MECHANISM)


class Failure(Exception):
    """Something that must hold does not."""


def hold(condition: bool, what: object) -> None:
    """Raise `Failure` unless the condition holds."""
    if not condition:
        raise Failure(str(what)[-2000:])


def refusal(error: FedHDPError) -> None:
    """An error is one line."""
    hold("\n" not in str(error).strip(), repr(error))


def unexpected(error: Exception, what: object) -> Failure:
    """An error that is no refusal: a user would see a traceback."""
    return Failure(f"{type(error).__name__}: {error} in {what!r}"[:2000])


def mutate(content: bytes, rng: random.Random) -> bytes:
    """Random damage: flipped bits, random bytes, zeroed pages, truncation, a part that is missing or twice there."""
    damaged, kind = bytearray(content), rng.randrange(6)
    place = rng.randrange(max(len(damaged), 1))
    length = 2 ** rng.randrange(10)
    if kind == 0 and damaged:
        damaged[place] ^= 1 << rng.randrange(8)
    elif kind == 1:
        damaged[place : place + length] = rng.randbytes(len(damaged[place : place + length]))
    elif kind == 2:
        start = place // 4096 * 4096
        damaged[start : start + 4096] = bytes(len(damaged[start : start + 4096]))
    elif kind == 3:
        del damaged[place:]
    elif kind == 4:
        del damaged[place : place + length]
    else:
        damaged[place:place] = damaged[place : place + length]
    return bytes(damaged)


def spending(path: Path) -> dict[str, Any]:
    """What a ledger says."""
    with Ledger(path, read_only=True) as ledger:
        groups = {name: (ledger.costs(name), ledger.budget(name), ledger.clients(name)) for name in ledger.groups()}
        return {"groups": groups, "runs": [(run.name, run.charged) for run in ledger.runs()]}


def files_of(folder: Path) -> list[Path]:
    """All files under a folder that have any content."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
