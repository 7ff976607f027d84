"""The deployment in real processes on the loopback interface: what dies, comes late, sends rubbish or has no key.

Slow by nature: every message to a client is a new process. Everything that is started is stopped.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedhdp[flower]'")

from fedhdp.privacy.ledger import Ledger
from fedhdp.results import store as results
from fedhdp.results.schema import Summary

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples" / "flower_app"))
from demo import Fleet  # noqa: E402

PYPROJECT = """
[project]
name = "processes"
version = "1.0.0"
description = "For tests: a model of six numbers, clients that add a half, and some that misbehave."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedhdp"

[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"

[tool.flwr.app.config]
out = ""
ledger = ""
rounds = 3
clip = 1.0
least-clients = 1
gather-seconds = 30.0
reply-seconds = 20.0
levels.open.sampling-rate = 1.0
levels.open.noise-multiplier = 0.0
levels.strict.sampling-rate = 1.0
levels.strict.noise-multiplier = 1.0
"""
SERVER_APP = """
import numpy as np
from fedhdp.flower.server_app import server_app

app = server_app(lambda deployment: {"w": np.zeros((2, 3), np.float32)})
"""
CLIENT_APP = """
import time
from pathlib import Path
from fedhdp.flower.client_app import Trainer, client_app


def trainer(context):
    def fit(parameters, personal, pull, round):
        with open(Path(context.node_config["directory"]) / "rounds", "a") as heard:
            heard.write(f"{round}\\n")
        time.sleep(context.node_config.get("slow", 0))
        gate, until = context.node_config.get("gate"), time.monotonic() + 60
        while gate and not Path(gate).exists() and time.monotonic() < until:
            time.sleep(0.1)
        step = float("nan") if context.node_config.get("rubbish") else 0.5
        return {"w": parameters["w"] + step}, {"w": personal["w"] + 0.25}

    return Trainer(fit)


app = client_app(trainer)
"""


@pytest.fixture
def app(tmp_path) -> Path:
    folder = tmp_path / "app"
    folder.mkdir()
    for name, text in {"pyproject.toml": PYPROJECT, "server_app.py": SERVER_APP, "client_app.py": CLIENT_APP}.items():
        (folder / name).write_text(text)
    return folder


class Site:
    """One deployment: its processes, its folder, its ledger and its clients' directories."""

    def __init__(self, tmp_path: Path, app: Path, fleet: Fleet):
        self.tmp_path, self.app, self.fleet = tmp_path, app, fleet
        self.out, self.ledger = tmp_path / "run", tmp_path / "population.ledger"

    def node(self, name: str, *options: str, wait: bool = True, **node_config: object) -> Path:
        directory = self.tmp_path / "clients" / name
        self.fleet.supernode(name, *options, wait=wait, directory=str(directory), **node_config)
        return directory

    def submit(self, **run_config: object) -> str:
        run = self.fleet.submit(self.app, out=str(self.out), ledger=str(self.ledger), **run_config)
        self.fleet.follow(run)
        return run

    def summary(self, run: str, seconds: float = 150) -> Summary:
        done = self.out / results.SUMMARY
        try:
            self.fleet.wait_for(run, done, seconds)
        except (TimeoutError, RuntimeError):
            print(self.fleet.log(f"run {run}").read_text())
            raise
        return results.read_value(done, Summary)

    def rounds_done(self) -> int:
        part = self.out / "fedhdp"
        rows = results.VariantDirectory(part).history() if part.exists() else []
        return max((row.round for row in rows), default=0)

    def charged(self) -> int:
        with Ledger(self.ledger, read_only=True) as ledger:
            return sum(run.charged for run in ledger.runs())

    def registered(self) -> list[str]:
        with Ledger(self.ledger, read_only=True) as ledger:
            return list(ledger.registrations().values())


def heard(directory: Path) -> list[int]:
    """The rounds in which a client was asked to train."""
    path = directory / "rounds"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def test_a_round_outlives_clients_that_die_come_late_restart_and_send_rubbish(tmp_path, app):
    with Fleet(tmp_path / "fleet") as fleet:
        fleet.superlink()
        site = Site(tmp_path, app, fleet)
        victim = site.node("victim", wait=False, privacy="open", slow=60)
        vandal = site.node("vandal", wait=False, privacy="open", rubbish=True)
        steady = site.node("steady", privacy="strict")
        run = site.submit(least_clients=3, rounds=6)
        fleet.wait_until(lambda: heard(victim), 90, "the victim to begin")
        fleet.stop("victim", signal.SIGKILL)
        gate = tmp_path / "gate"  # rounds take their time until the other client is back
        late = site.node("late", gate=str(gate))  # and does not say what it wants
        kept = lambda: [results.read_arrays(path)["w"] for path in steady.glob("personal-*.npz")]  # noqa: E731
        fleet.wait_until(lambda: kept() and site.rounds_done() >= 1, 90, "the first round")
        fleet.stop("steady", signal.SIGTERM)
        (before,) = kept()
        identity = (steady / "identity").read_text()
        so_far = len(heard(steady))
        site.node("steady", privacy="strict")
        fleet.wait_until(lambda: len(heard(steady)) > so_far, 120, "the one that was restarted to be asked again")
        gate.touch()
        (variant,) = site.summary(run).variants

    assert variant.rounds == 6
    assert site.charged() == 6
    assert sorted(site.registrations()) == ["open", "open", "strict", "strict"]
    refused = {group.name: group.refused for group in variant.groups}
    assert refused["open"] == len(heard(vandal)) > 0
    assert refused["strict"] == 0
    assert heard(victim) == [0]
    assert heard(late)
    assert (steady / "identity").read_text() == identity
    (after,) = kept()
    np.testing.assert_allclose(after, np.full((2, 3), 0.25 * len(heard(steady))))
    assert (after > before).all()
    model = results.read_arrays(site.out / "fedhdp" / "model.npz")["global/w"]
    assert np.isfinite(model).all()
    assert abs(model).max() > 0


def test_a_server_that_is_killed_goes_on_in_a_new_run_and_the_ledger_never_counts_too_little(tmp_path, app):
    with Fleet(tmp_path / "fleet") as fleet:
        fleet.superlink()
        site = Site(tmp_path, app, fleet)
        clients = [site.node(name, wait=name == "ben", privacy="strict", slow=1) for name in ("anna", "ben")]
        site.submit(least_clients=2, rounds=4)
        fleet.wait_until(lambda: site.rounds_done() >= 1 and len(heard(clients[0])) >= 2, 90, "the second round")
        servers = fleet.all_of("flwr-serverapp")
        assert servers
        for server in servers:
            os.kill(server, signal.SIGKILL)
        done, sent = site.rounds_done(), [heard(client) for client in clients]
        assert site.charged() >= max(map(len, sent)) == 2
        assert done < 4
        run = site.submit(least_clients=2, rounds=4)
        (variant,) = site.summary(run).variants

    assert variant.rounds == 4
    assert site.registrations() == ["strict", "strict"]
    assert site.charged() >= max(len(heard(client)) for client in clients) >= 4
    assert site.charged() >= (5 if done == 1 else 4)  # the round that was under way is charged again
    rows = results.VariantDirectory(site.out / "fedhdp").history()
    assert [row.round for row in rows if row.metric == "clip"] == [1, 2, 3, 4]
    epsilon = [row.value for row in rows if (row.group, row.metric) == ("strict", "epsilon")]
    assert epsilon == sorted(epsilon)
    assert epsilon[-1] >= variant.groups[0].epsilon


def test_with_tls_and_node_keys_an_unregistered_node_gets_nothing(tmp_path, app):
    folder = tmp_path / "fleet"
    folder.mkdir()
    write_certificates(folder)
    for name in ("known", "unknown"):
        write_node_key(folder / name)
    authority = folder / "ca.crt"
    with Fleet(folder, connection=f'root-certificates = "{authority}"') as fleet:
        certificates = ("--ssl-certfile", "server.crt", "--ssl-keyfile", "server.key", "--ssl-ca-certfile", "ca.crt")
        fleet.superlink(
            *(str(folder / word) if word.endswith(("crt", "key")) else word for word in certificates),
            "--enable-supernode-auth",
        )
        site = Site(tmp_path, app, fleet)
        fleet.flwr("supernode", "register", str(folder / "known.pub"), "local")
        trusting = ("--root-certificates", str(authority))
        site.node("known", *trusting, "--auth-supernode-private-key", str(folder / "known"), privacy="open")
        strangers = [
            site.node("unknown", *trusting, "--auth-supernode-private-key", str(folder / "unknown"), wait=False),
            site.node("keyless", *trusting, wait=False),
        ]
        run = site.submit(rounds=2)
        (variant,) = site.summary(run).variants
        assert fleet.processes["known"].poll() is None
        for name in ("unknown", "keyless"):
            assert "SuperNode ID:" not in fleet.log(name).read_text()

    assert variant.rounds == 2
    assert site.registrations() == ["open"]
    assert not any(stranger.exists() for stranger in strangers)


def write_node_key(path: Path) -> None:
    """A node's key as Flower wants it, and its public part beside it."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    private = serialization.PrivateFormat.OpenSSH
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, private, serialization.NoEncryption()))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public)


def write_certificates(folder: Path) -> None:
    """An authority, and a certificate of its for the loopback address."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    now = datetime.datetime.now(datetime.UTC)
    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
    host = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])

    def certificate(subject, public, *extensions):
        made = x509.CertificateBuilder().subject_name(subject).issuer_name(authority).public_key(public)
        made = made.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(hours=1))
        made = made.not_valid_after(now + datetime.timedelta(days=1))
        for extension, critical in extensions:
            made = made.add_extension(extension, critical=critical)
        return made.sign(authority_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")])
    may_sign = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    root = certificate(authority, authority_key.public_key(), (x509.BasicConstraints(True, 0), True), (may_sign, True))
    (folder / "ca.crt").write_bytes(root)
    (folder / "server.crt").write_bytes(certificate(host, key.public_key(), (here, False)))
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "server.key").write_bytes(secret)
