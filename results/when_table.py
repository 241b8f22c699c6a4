# SPDX-License-Identifier: MIT
"""When to switch SM on, for text: runs of results/when.sh of 8d152f7, from text.jsonl.

    python results/when_table.py

Nats per token are without the floor of α, on 2,048 held-out rows, with the same masks in all arms.
"off" is an SM model without feedback.
"""

from sudoku_table import lines_of, paired, table

ARMS = {"binary": "binary", "paper": "SM from the start, ω as in App. B.2",
        "ours": "SM from the start", "last50": "SM for the last 50 % of the time",
        "last25": "for the last 25 %", "last10": "for the last 10 %"}
for name in "last50", "last25", "last10":
    ARMS |= {f"{name}-p05": f"{ARMS[name]}, p_sm = 0.5", f"{name}-p10": f"{ARMS[name]}, p_sm = 1"}


def main():
    on, off, steps = {}, {}, {}
    for result in lines_of("text"):
        if result["name"].startswith("when-"):
            arm, _, seed = result["name"].removeprefix("when-").rpartition("-")
            nats = {kind: result["values"][kind]["nats_per_token"] for kind in ("soft", "binary")}
            on.setdefault(arm, {})[seed] = nats["binary" if arm == "binary" else "soft"]
            off.setdefault(arm, {})[seed] = nats["binary"]
            steps[arm] = result["settings"]["step"]
    rows = []
    for arm, name in ARMS.items():
        if arm in on:
            nats, without = (" ".join(f"{x[arm][seed]:.4f}" for seed in sorted(x[arm]))
                             for x in (on, off))
            row = [name, f"{steps[arm]:,}", nats, "", ""]
            if arm != "binary":
                row[3:] = without, paired(on[arm], on["binary"], "+.4f")
            rows.append(row)
    table(["in the time of 5,000 binary updates", "updates", "nats of seeds 21 to 23", "off",
           "above binary [95 %]"], rows)


if __name__ == "__main__":
    main()
