"""A public basis from an experiment's file: run, resumed, swept, recorded, and what tables say of it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from experiment_helpers import assert_same_run, command, keep_going, tiny
from helpers import raises_field
from msgspec.structs import replace

from fedhdp.basis import cosine_basis, fingerprint, pca_basis, public_moments
from fedhdp.errors import ConfigError, DataError
from fedhdp.experiments import Experiment, Interrupted, from_toml, read_experiment, resume, run
from fedhdp.experiments.bases import CosineBasis, MatrixBasis, PcaBasis, RandomBasis
from fedhdp.experiments.components import LinearConfig, MlpConfig, PythonModel, count_parameters
from fedhdp.experiments.runner import run_or_resume
from fedhdp.experiments.sweep import expand
from fedhdp.experiments.toml import to_toml
from fedhdp.results import DamagedRunError, load_model
from fedhdp.results.files import write_checksums


def on_basis(basis: object, **changes: object) -> Experiment:
    """The tiny experiment, on a basis."""
    return tiny(model=MlpConfig(8, basis), **({"rounds": 4, "evaluate_every": 2} | changes))


def stop_after(rounds: int):
    return lambda progress: progress.round < rounds


@pytest.mark.parametrize("basis", [CosineBasis(9), PcaBasis(9, exponent=0.3), RandomBasis(9, seed=2)])
def test_a_run_records_its_basis_and_resumes_to_the_bit(tmp_path, basis):
    experiment = on_basis(basis)
    summary = run(experiment, tmp_path / "whole", keep_going)
    with pytest.raises(Interrupted):
        run(experiment, tmp_path / "cut", stop_after(2))
    resume(tmp_path / "cut", keep_going)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    matrix = np.load(tmp_path / "whole" / "basis.npy")
    assert matrix.tobytes() == np.load(tmp_path / "cut" / "basis.npy").tobytes()
    assert load_model(tmp_path / "whole", "FedHDP")["first/w"].shape == (9, 8)
    for variant in summary.variants:
        assert f"sha256 {fingerprint(matrix)[:12]}" in variant.preparation
    assert read_experiment(tmp_path / "whole") == from_toml(to_toml(experiment), "tiny.toml") == experiment


def test_a_resumed_run_has_the_matrix_that_it_began_with(tmp_path):
    with pytest.raises(Interrupted):
        run(on_basis(PcaBasis(9)), tmp_path / "run", stop_after(2))
    stored = np.load(tmp_path / "run" / "basis.npy")
    np.save(tmp_path / "run" / "basis.npy", 2 * stored)  # as another machine's rounding would change it
    with pytest.raises(DamagedRunError):
        resume(tmp_path / "run", keep_going)
    write_checksums(tmp_path / "run", ["basis.npy"])
    summary = resume(tmp_path / "run", keep_going)
    assert f"sha256 {fingerprint(2 * stored)[:12]}" in summary.variants[0].preparation


def test_the_matrices_are_those_of_the_public_functions(tmp_path):
    experiment = on_basis(CosineBasis(9, exponent=0.4))
    run(experiment, tmp_path / "cosine", keep_going)
    np.testing.assert_array_equal(np.load(tmp_path / "cosine" / "basis.npy"), cosine_basis((28, 28), 9, 0.4))
    run(on_basis(PcaBasis(9, exponent=0.4)), tmp_path / "pca", keep_going)
    expected = pca_basis(public_moments(experiment.load_data(), ["opted out"]), 9, 0.4)
    np.testing.assert_array_equal(np.load(tmp_path / "pca" / "basis.npy"), expected)


def test_opted_out_clients_whose_data_are_in_the_basis_have_no_epsilon(tmp_path):
    """DP-FedAvg gives them noise; their second moments are released without."""
    for basis, unprotected in ((PcaBasis(9), True), (CosineBasis(9), False)):
        dp_fedavg, _ = run(on_basis(basis), tmp_path / str(unprotected), keep_going).variants
        opted_out, private = dp_fedavg.groups
        assert opted_out.unprotected == unprotected
        assert (opted_out.epsilon == np.inf) == unprotected
        assert private.epsilon < 8.01


def test_a_ledger_does_not_charge_less_than_the_basis_released(tmp_path):
    experiment = on_basis(PcaBasis(9), noise_seed=None, ledger=str(tmp_path / "ledger.db"))
    with raises_field("variants", ConfigError):
        run(experiment, tmp_path / "run", keep_going)
    assert not (tmp_path / "run").exists()
    run(replace(experiment, variants=experiment.variants[1:]), tmp_path / "run", keep_going)
    opted_out, private = experiment.mechanism.groups  # clients who are in the basis alone would be charged nothing
    absent = replace(experiment.mechanism, groups=(replace(opted_out, sampling_rate=0.0), private))
    with raises_field("variants", ConfigError):
        run(replace(experiment, mechanism=absent, variants=experiment.variants[1:]), tmp_path / "absent", keep_going)


def test_where_nobody_opted_out_pca_is_refused_and_nothing_is_left(tmp_path):
    experiment = on_basis(PcaBasis(9))
    opted_out, private = experiment.mechanism.groups
    groups = (replace(opted_out, noise_multiplier=1.0), private)
    with raises_field("basis", DataError):
        run(replace(experiment, mechanism=replace(experiment.mechanism, groups=groups)), tmp_path / "run", keep_going)
    assert not (tmp_path / "run").exists()


def test_a_matrix_is_a_file_with_a_checksum(tmp_path):
    np.save(tmp_path / "u.npy", cosine_basis((28, 28), 6))
    (tmp_path / "own.toml").write_text(to_toml(on_basis(MatrixBasis("u.npy"))))
    result = command("run", tmp_path / "own.toml", "--out", tmp_path / "run", "--json")
    assert result.code == 0, result.stderr
    assert "the matrix u.npy" in json.loads(result.stdout)["variants"][0]["preparation"]
    pinned = read_experiment(tmp_path / "run").model.basis
    assert pinned.file == str(tmp_path / "u.npy")
    assert pinned.sha256 is not None
    np.save(tmp_path / "u.npy", cosine_basis((28, 28), 7))
    with raises_field("model.basis.sha256", ConfigError):
        run(on_basis(pinned), tmp_path / "other", keep_going)


@pytest.mark.parametrize("matrix", [np.ones((5, 3)), np.ones(784), np.full((784, 2), "a"), None])
def test_a_file_that_is_no_basis_is_one_line(tmp_path, matrix):
    if matrix is None:
        (tmp_path / "u.npy").write_text("no matrix")
    else:
        np.save(tmp_path / "u.npy", matrix)
    with raises_field("model.basis.file", ConfigError):
        run(on_basis(MatrixBasis(str(tmp_path / "u.npy"))), tmp_path / "run", keep_going)
    assert not (tmp_path / "run").exists()


def test_too_large_a_basis_names_the_field(tmp_path):
    with raises_field("model.basis.size", ConfigError):
        run(on_basis(CosineBasis(785)), tmp_path / "run", keep_going)
    with raises_field("model.basis.shape", ConfigError):
        run(on_basis(CosineBasis(9, shape=(10, 10))), tmp_path / "run", keep_going)


def test_sizes_can_be_swept():
    experiment = replace(on_basis(CosineBasis(9)), sweep={"model.basis.size": [4, 16]})
    assert [point.model.basis for point in expand(experiment).values()] == [CosineBasis(4), CosineBasis(16)]


def test_weights_are_the_theorys_for_the_parameters_on_the_basis():
    experiment = on_basis(CosineBasis(9))
    count = count_parameters(experiment.data, experiment.model, experiment.load_data)
    assert count == 9 * 8 + 8 + 8 * 10 + 10


def test_linear_models_and_models_of_a_file_have_one_too(tmp_path):
    run(tiny(model=LinearConfig(CosineBasis(9)), rounds=2), tmp_path / "linear", keep_going)
    assert load_model(tmp_path / "linear", "FedHDP")["first/w"].shape == (9, 10)
    (tmp_path / "own.py").write_text("from fedhdp import mlp\ndef model():\n    return mlp(9, 4, 10)\n")
    own = PythonModel(file=str(tmp_path / "own.py"), basis=CosineBasis(9))
    run_or_resume(tiny(model=own, rounds=2), tmp_path / "own", keep_going)
    assert load_model(tmp_path / "own", "FedHDP")["first/w"].shape == (9, 4)


def test_a_run_that_begins_with_anothers_model_has_its_basis(tmp_path):
    experiment = on_basis(PcaBasis(9), variants=tiny().variants[1:])
    run(experiment, tmp_path / "first", keep_going)
    second = replace(
        experiment, start_from=str(tmp_path / "first"), seed=2
    )  # other clients: their own basis would differ
    run(second, tmp_path / "second", keep_going)
    matrices = [(tmp_path / name / "basis.npy").read_bytes() for name in ("first", "second")]
    assert matrices[0] == matrices[1]
    for other in (PcaBasis(9, exponent=0.5), CosineBasis(9), None):
        with raises_field("model.basis", ConfigError):
            run(replace(second, model=MlpConfig(8, other)), tmp_path / "third", keep_going)
    assert not (tmp_path / "third").exists()
