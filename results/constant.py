# SPDX-License-Identifier: MIT
"""A script of this repository, with λ = ω_s for every mask, whatever the entropy; not learned.

    python results/constant.py train.py owt --omega_s=0.3 …

As RECIPES.md shows, another λ is a subclass that overrides `strength`. Here it is set by hand.
"""

import os
import runpy
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import mdlm  # noqa: E402
from softmask import SoftMask  # noqa: E402


class Constant(SoftMask):
    def strength(self, minus_h):
        return self.omega[0].detach() + 0 * minus_h                                # (…)


if __name__ == "__main__":
    mdlm.SoftMask = Constant
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
