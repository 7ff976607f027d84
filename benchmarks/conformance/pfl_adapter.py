"""pfl 0.6.0: its Gaussian mechanism and its adaptive clipping, applied centrally as by its simulated backend.

A cohort always has the size that was asked for, so the kit does not try others.
"""

from __future__ import annotations

from types import SimpleNamespace

import claims as w
from pfl.metrics import Metrics
from pfl.privacy.adaptive_clipping import AdaptiveClippingGaussianMechanism
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from pfl.stats import MappedVectorStatistics

from fedhdp.privacy.audit import ReleaseClaim


def aggregate(mechanism, cohort, update_CP, seed):
    """One round: every client's statistics clipped, summed and noised, then averaged."""
    total = None
    for client, update_P in zip(cohort, update_CP, strict=True):
        statistics = MappedVectorStatistics({"model": update_P.astype(float)}, weight=1.0)
        user = SimpleNamespace(seed=seed + int(client))
        statistics, _ = mechanism.postprocess_one_user(stats=statistics, user_context=user)
        total = statistics if total is None else total + statistics
    central = SimpleNamespace(cohort_size=len(cohort), seed=seed)
    total, _ = mechanism.postprocess_server(stats=total, central_context=central, aggregate_metrics=Metrics())
    total.average()
    return total["model"]


def fixed(cohort, update_CP, seed):
    """A release with the fixed clip."""
    mechanism = CentrallyAppliedPrivacyMechanism(GaussianMechanism(w.CLIP, w.NOISE_MULTIPLIER))
    return aggregate(mechanism, cohort, update_CP, seed)


def adaptive(cohort, update_CP, seed):
    """A release with the adaptive clip, and the next clip."""
    mechanism = AdaptiveClippingGaussianMechanism(
        lambda clip: GaussianMechanism(clip, w.NOISE_MULTIPLIER), w.CLIP, 2 * w.BIT_NOISE, w.QUANTILE, w.CLIP_RATE
    )
    return aggregate(mechanism, cohort, update_CP, seed), mechanism.mutable_clipping_bound.value()


if __name__ == "__main__":
    update_noise = (w.NOISE_MULTIPLIER**-2 - (2 * w.BIT_NOISE) ** -2) ** -0.5
    w.check("pfl 0.6.0, fixed", fixed, ReleaseClaim(w.CLIP, w.NOISE_MULTIPLIER, w.COHORT, fixed_cohort=True))
    w.check("pfl 0.6.0, adaptive", adaptive, ReleaseClaim(w.CLIP, update_noise, w.COHORT, True, True))
