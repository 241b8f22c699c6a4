# SPDX-License-Identifier: MIT
"""A placebo at decoding: in a trained model, each mask gets the feedback of another mask.

    python results/permuted.py sample.py --checkpoint=out/sudoku/sm-1/step-6000.pt --out=…

The other mask is mostly one of another sample in the batch, as sure on average (arms.Permuted).
Its samples have the same settings as those of the model itself: give them a file of their own.
"""

import os
import runpy
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import arms  # noqa: E402

if __name__ == "__main__":
    arms.ARMS[""] = arms.Permuted
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
