"""fedhdp itself: its server with a fixed and with an adaptive clip, the noise from the operating system."""

from __future__ import annotations

import claims as w
import numpy as np

from fedhdp import Mechanism, PrivacyGroup
from fedhdp.clips import AdaptiveClip
from fedhdp.experiments.audit.system import ServerSystem
from fedhdp.privacy.audit import ReleaseClaim


def release(clip):
    """A release of one group, whose cohort is half of its clients."""
    group = PrivacyGroup("all", 2 * w.COHORT, w.NOISE_MULTIPLIER, 0.5)
    mechanism = Mechanism((group,), clip)
    system = ServerSystem(mechanism, w.PARAMETERS)

    def function(cohort, update_CP, seed):
        group_C = np.zeros(len(cohort), np.int64)
        update_P, next_clip = system.release(mechanism, mechanism.initial_clip, group_C, update_CP)
        return (update_P, float(next_clip)) if mechanism.is_adaptive else update_P

    return function, mechanism.update_noise_multiplier(group)


if __name__ == "__main__":
    for name, clip, adaptive in (
        ("fedhdp, fixed clip", w.CLIP, False),
        ("fedhdp, adaptive clip", AdaptiveClip(w.CLIP, w.QUANTILE, w.CLIP_RATE, w.BIT_NOISE), True),
    ):
        function, noise_multiplier = release(clip)
        w.check(name, function, ReleaseClaim(w.CLIP, noise_multiplier, w.COHORT, adaptive))
