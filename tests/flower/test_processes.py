"""Deployments in real processes on the loopback interface. Every process that is started is stopped.

They are slow: every message to a client starts a process.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedhdp[flower]'")

from flower_apps import write_app
from flower_helpers import open_ledger

from fedhdp.results.schema import Summary
from fedhdp.results.store import VariantDirectory, read_arrays, read_value

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples" / "flower_app"))
from fleet import Fleet  # noqa: E402

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture
def app(tmp_path) -> Path:
    return write_app(tmp_path / "app")


class Site:
    """One deployment: its processes, its run directory, its ledger and its clients' directories."""

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
        file = self.out / "summary.json"
        self.fleet.wait_for(run, file.exists, seconds)
        return read_value(file, Summary)

    def completed_rounds(self) -> int:
        directory = self.out / "fedhdp"
        rows = VariantDirectory(directory).history() if directory.exists() else []
        return max((row.round for row in rows), default=0)

    def charged_rounds(self) -> int:
        with open_ledger(self.ledger) as ledger:
            return sum(run.charged for run in ledger.runs())

    def registered_levels(self) -> list[str]:
        with open_ledger(self.ledger) as ledger:
            return list(ledger.registrations().values())


def trained_rounds(directory: Path) -> list[int]:
    """The rounds in which a client began to train."""
    file = directory / "rounds"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def saved_personal(directory: Path) -> list[np.ndarray]:
    """A client's personal models."""
    return [read_arrays(file)["w"] for file in directory.glob("personal-*.npz")]


def test_run_survives_failing_clients(tmp_path, app):
    """One client is killed, one sends NaN, one is restarted, and one comes late and chooses no level."""
    gate = tmp_path / "gate"
    with Fleet(tmp_path) as fleet:
        fleet.superlink()
        site = Site(tmp_path, app, fleet)
        killed = site.node("killed", wait=False, privacy="open", seconds=60)
        broken = site.node("broken", wait=False, privacy="open", nan=True)
        restarted = site.node("restarted", privacy="strict")
        run = site.submit(min_available_clients=3, rounds=6)
        fleet.wait_until(lambda: trained_rounds(killed), 90, "the first training")
        fleet.stop("killed", signal.SIGKILL)
        late = site.node("late", gate=str(gate))  # rounds last until the gate is open
        fleet.wait_until(lambda: saved_personal(restarted) and site.completed_rounds() >= 1, 90, "the first round")
        fleet.stop("restarted", signal.SIGTERM)
        (personal,) = saved_personal(restarted)
        identity = (restarted / "identity").read_text()
        rounds_before = len(trained_rounds(restarted))
        site.node("restarted", privacy="strict")
        fleet.wait_until(lambda: len(trained_rounds(restarted)) > rounds_before, 120, "training after the restart")
        gate.touch()
        (variant,) = site.summary(run).variants

    refused = {group.name: group.refused for group in variant.groups}
    assert variant.rounds == 6
    assert site.charged_rounds() == 6
    assert sorted(site.registered_levels()) == ["open", "open", "strict", "strict"]
    assert refused["open"] == len(trained_rounds(broken)) > 0
    assert refused["strict"] == 0
    assert trained_rounds(killed) == [0]
    assert trained_rounds(late)
    assert (restarted / "identity").read_text() == identity
    (final_personal,) = saved_personal(restarted)
    np.testing.assert_allclose(final_personal, np.full((2, 3), 0.25 * len(trained_rounds(restarted))))
    assert (final_personal > personal).all()
    model = read_arrays(site.out / "fedhdp" / "model.npz")["global/w"]
    assert np.isfinite(model).all()
    assert abs(model).max() > 0


def test_killed_server_resumes_and_charges_every_round(tmp_path, app):
    with Fleet(tmp_path) as fleet:
        fleet.superlink()
        site = Site(tmp_path, app, fleet)
        clients = [site.node(name, wait=name == "ben", privacy="strict", seconds=1) for name in ("anna", "ben")]
        site.submit(min_available_clients=2, rounds=4)
        fleet.wait_until(
            lambda: site.completed_rounds() >= 1 and len(trained_rounds(clients[0])) >= 2, 90, "the second round"
        )
        servers = fleet.process_ids("flwr-serverapp")
        assert servers
        for process_id in servers:
            os.kill(process_id, signal.SIGKILL)
        completed = site.completed_rounds()
        assert site.charged_rounds() >= max(len(trained_rounds(client)) for client in clients) == 2
        assert completed < 4
        run = site.submit(min_available_clients=2, rounds=4)
        (variant,) = site.summary(run).variants

    rows = VariantDirectory(site.out / "fedhdp").history()
    epsilons = [row.value for row in rows if (row.group, row.metric) == ("strict", "epsilon")]
    assert variant.rounds == 4
    assert site.registered_levels() == ["strict", "strict"]
    assert site.charged_rounds() >= max(len(trained_rounds(client)) for client in clients) >= 4
    assert site.charged_rounds() >= (5 if completed == 1 else 4)  # the interrupted round is charged again
    assert [row.round for row in rows if row.metric == "clip"] == [1, 2, 3, 4]
    assert epsilons == sorted(epsilons)
    assert epsilons[-1] >= variant.groups[0].epsilon


def test_node_without_a_registered_key_gets_nothing(tmp_path, app):
    directory = tmp_path / "fleet"
    directory.mkdir()
    write_certificates(directory)
    for name in ("registered", "unregistered"):
        write_node_key(directory / name)
    authority = directory / "ca.crt"
    certificates = ("--ssl-certfile", "server.crt", "--ssl-keyfile", "server.key", "--ssl-ca-certfile", "ca.crt")
    options = [str(directory / word) if word.endswith((".crt", ".key")) else word for word in certificates]
    tls = ("--root-certificates", str(authority))
    with Fleet(directory, connection=f'root-certificates = "{authority}"') as fleet:
        fleet.superlink(*options, "--enable-supernode-auth")
        site = Site(tmp_path, app, fleet)
        fleet.flwr("supernode", "register", str(directory / "registered.pub"), "local")
        key = ("--auth-supernode-private-key", str(directory / "registered"))
        site.node("registered", *tls, *key, privacy="open")
        unregistered_key = ("--auth-supernode-private-key", str(directory / "unregistered"))
        excluded = [
            site.node("unregistered", *tls, *unregistered_key, wait=False),
            site.node("keyless", *tls, wait=False),
        ]
        run = site.submit(rounds=2)
        (variant,) = site.summary(run).variants
        assert fleet.processes["registered"].poll() is None
        for name in ("unregistered", "keyless"):
            assert "SuperNode ID:" not in fleet.log(name).read_text()

    assert variant.rounds == 2
    assert site.registered_levels() == ["open"]
    assert not any(client.exists() for client in excluded)


def write_node_key(path: Path) -> None:
    """Write a node's key in Flower's format, and its public part beside it."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    private = serialization.PrivateFormat.OpenSSH
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, private, serialization.NoEncryption()))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public)


def write_certificates(folder: Path) -> None:
    """Write the certificates of an authority and of a server at the loopback address."""
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
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(authority).public_key(public)
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(hours=1))
        builder = builder.not_valid_after(now + datetime.timedelta(days=1))
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical=critical)
        return builder.sign(authority_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    loopback = x509.SubjectAlternativeName(
        [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
    )
    signing = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    root = certificate(authority, authority_key.public_key(), (x509.BasicConstraints(True, 0), True), (signing, True))
    (folder / "ca.crt").write_bytes(root)
    (folder / "server.crt").write_bytes(certificate(host, key.public_key(), (loopback, False)))
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "server.key").write_bytes(secret)
