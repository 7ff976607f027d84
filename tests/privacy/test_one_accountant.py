"""One accountant for a run: what calibrates its noise also enforces its budget."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from helpers import raises_field
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fedhdp.clips import AdaptiveClip, LayerClip
from fedhdp.mechanism import Mechanism, PrivacyGroup
from fedhdp.privacy.accounting import compose, default_accountant, rounds_left
from fedhdp.privacy.budget import Budget, BudgetExhausted, RunBilling
from fedhdp.privacy.calibration import GroupConfig, MechanismConfig, explain_surplus, weight_of_own_noise
from fedhdp.privacy.costs import privacy_costs
from fedhdp.privacy.ledger import Ledger

DELTA = 1e-5


def group_with_epsilon(epsilon: float, rate: float, clip: float | AdaptiveClip, **fields) -> MechanismConfig:
    """A group that asks for an epsilon, beside one that opted out."""
    opted_out = GroupConfig("open", 50, sampling_rate=rate, noise_multiplier=0.0)
    private = GroupConfig("private", 200, sampling_rate=rate, epsilon=epsilon, weight=0.3)
    return MechanismConfig((opted_out, private), clip, **fields)


def billing_of(mechanism: Mechanism, ledger: Ledger, accountant: str = "rdp") -> RunBilling:
    options = {"repeatable": False, "on_exhausted": "stop", "delta_of": lambda name: DELTA, "accountant": accountant}
    return RunBilling(mechanism, ledger, "run", **options)


@settings(max_examples=12, deadline=None)
@given(
    epsilon=st.floats(0.3, 12),
    rounds=st.integers(1, 20),
    rate=st.sampled_from([0.01, 0.1, 0.5, 1.0]),
    clip=st.sampled_from([1.0, AdaptiveClip(0.5), AdaptiveClip(0.5, bit_noise_stddev=400.0)]),
    noise=st.sampled_from(["shared", "per_group"]),
    sampling=st.sampled_from(["poisson", "fixed"]),
)
def test_one_accountant_to_calibrate_and_another_to_enforce(epsilon, rounds, rate, clip, noise, sampling):
    config = group_with_epsilon(epsilon, rate, clip, noise=noise, sampling=sampling)
    accountant = default_accountant(sampling, ledger=True)
    mechanism = config.build(rounds, DELTA, accountant)
    with TemporaryDirectory() as directory, Ledger(Path(directory) / "ledger") as ledger:
        ledger.promise("private", epsilon, DELTA)
        billing = billing_of(mechanism, ledger, accountant)
        for _ in range(rounds):
            billing.charge_next([mechanism])
        assert ledger.costs("private")[0].rounds == rounds
        assert 0.98 * epsilon <= compose(ledger.costs("private"), DELTA) <= epsilon


def test_noise_by_another_accountant_ends_before_the_last_round(tmp_path):
    mechanism = group_with_epsilon(3.0, 0.3, AdaptiveClip(0.5)).build(20, DELTA, "pld")
    with Ledger(tmp_path / "ledger") as ledger:
        ledger.promise("private", 3.0, DELTA)
        billing = billing_of(mechanism, ledger)
        affordable = rounds_left((), privacy_costs(mechanism)["private"], Budget(3.0, DELTA))
        assert affordable < 20
        for _ in range(int(affordable)):
            billing.charge_next([mechanism])
        with pytest.raises(BudgetExhausted):
            billing.charge_next([mechanism])
    with raises_field("accountant"):
        billing_of(mechanism, ledger, "pld")


def test_earlier_runs_count_against_the_budget(tmp_path):
    config = group_with_epsilon(3.0, 0.3, 1.0)
    first, second = config.build(5, DELTA, "rdp"), config.build(20, DELTA, "rdp")
    with Ledger(tmp_path / "ledger") as ledger:
        ledger.promise("private", 3.5, DELTA)
        billing = billing_of(first, ledger)
        for _ in range(5):
            billing.charge_next([first])
        ledger.begin("second", second)
        left = rounds_left(ledger.costs("private"), privacy_costs(second)["private"], Budget(3.5, DELTA))
        for _ in range(int(left)):
            ledger.charge("second", privacy_costs(second))
        assert 0 < left < 20
        assert compose(ledger.costs("private"), DELTA) <= 3.5


COVERED = Mechanism(
    (
        PrivacyGroup("open", 100, 0.0, 0.05),
        PrivacyGroup("relaxed", 900, 0.75, 0.05, 0.002),
        PrivacyGroup("strict", 1000, 3.0, 0.05, 0.005),
    ),
    AdaptiveClip(0.5),
)


@pytest.mark.parametrize("weight", [0.002, 0.0, 1e-9])
@pytest.mark.parametrize("clip", [AdaptiveClip(0.5), 1.0, LayerClip({"a": 0.5, "b": 1.0, "c": 2.0, "d": 1.0})])
def test_the_weight_of_own_noise_uses_all_of_it(weight, clip):
    open_group, relaxed, strict = COVERED.groups
    relaxed = replace(relaxed, weight=weight)
    mechanism = replace(COVERED, groups=(open_group, relaxed, strict), clip=clip)
    assert mechanism.effective_noise_multiplier(relaxed) > 2 * relaxed.noise_multiplier
    assert explain_surplus(mechanism, relaxed) is not None
    changed = replace(relaxed, weight=weight_of_own_noise(mechanism, relaxed))
    mechanism = replace(mechanism, groups=(open_group, changed, strict))
    assert mechanism.effective_noise_multiplier(changed) == pytest.approx(relaxed.noise_multiplier, rel=1e-3)
    assert explain_surplus(mechanism, changed) is None


def test_no_surplus():
    open_group, relaxed, strict = COVERED.groups
    assert explain_surplus(COVERED, open_group) is None
    assert explain_surplus(COVERED, strict) is None
    assert explain_surplus(replace(COVERED, noise="per_group"), relaxed) is None
    alone = replace(COVERED, groups=(open_group, replace(relaxed, weight=0.0)))
    assert "any weight above 0" in explain_surplus(alone, alone.groups[1])
    with raises_field("group"):
        weight_of_own_noise(COVERED, open_group)
