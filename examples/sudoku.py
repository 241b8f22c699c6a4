# SPDX-License-Identifier: MIT
"""6×6 Sudokus: a language whose entropy is known, a model that learns it, and what feedback does.

    python examples/sudoku.py                    # the shipped model solves 400 puzzles
    python examples/sudoku.py --given=1..4......2........3.......5......6.   # two cells per pass
    python examples/sudoku.py train              # a model of your own, with any flag of train.py
    python examples/sudoku.py --checkpoint=out/sudoku/last.pt    # its bound, and what it solves
    python examples/sudoku.py data               # the grids alone, into data/sudoku

    the language          canonical, texts, puzzles, mistake, solutions; as ids: ids_of, cells_of
    data and training     prepare, train_model
    the demonstration     fill, contradiction, demonstrate
"""

import functools
import itertools
import math
import os
import re
import sys
import time
from dataclasses import dataclass

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import data
import launch
from data import rng
from launch import Refused, Size, progress, run
from mdlm import MDLM, TwoPass
from sample import Pick, decode, painted, shares_of
from train import Config as TrainConfig
from train import bound, train

# ---- the language --------------------------------------------------------------------------------
# Entropy of a uniform draw: there are 39,168 `canonical` grids, each with 6! = 720 relabelings.
NATS = math.log(39_168 * 720)


@functools.cache
def canonical():
    """All 6×6 Sudoku grids whose first row is 123456: (39168, 36) uint8, with 1 stored as 0."""
    rows = torch.tensor(list(itertools.permutations(range(6))))                      # (720, 6)
    # apart: rows that differ in every column can be in one grid. boxed: they can share boxes if no
    # digit is in both of their left halves. Then none is in both right halves, either.
    apart = (rows[:, None] != rows).all(-1)                                          # (720, 720)
    boxed = (rows[:, None, :3, None] != rows[None, :, None, :3]).flatten(2).all(-1)     # (720, 720)
    found = torch.zeros(1, 1, dtype=torch.long)  # n grids of h rows, as row numbers: (n, h)
    for h in range(1, 6):
        fits = apart[found].all(1)                                                   # (n, 720)
        if h % 2:  # the second row of its boxes
            fits &= boxed[found[:, -1]]
        grid, row = fits.nonzero(as_tuple=True)
        found = torch.cat((found[grid], row[:, None]), dim=1)                        # (n', h + 1)
    return rows[found].flatten(1).to(torch.uint8)


def texts(n, generator):
    """n grids drawn uniformly, as texts of 36 digits. With EOS, each fills a row of L = 39."""
    which = torch.randint(len(canonical()), (n,), generator=generator)               # (n,)
    digits = torch.rand(n, 6, generator=generator).argsort(-1)                       # (n, 6)
    cells = digits.gather(1, canonical()[which].long()) + 1                          # (n, 36)
    return ["".join(map(str, row)) for row in cells.tolist()]


def puzzles(x, given, mask_id, generators):
    """Grids x (n, 39) with all but `given` random cells masked. generators: one per grid."""
    x = x.clone()                                                                    # (n, 39)
    for row, generator in zip(x, generators):
        order = torch.randperm(36, generator=generator)                              # (36,)
        row[1 + order[given:]] = mask_id
    return x


def broken(cells):
    """{broken rule, in words: its cells}.   cells: 36 digits, with dots for empty cells."""
    found = {}
    for i, digit in enumerate(cells):
        row, column = divmod(i, 6)
        box = row // 2 * 2 + column // 3  # boxes have two rows and three columns
        for place in f"row {row + 1}", f"column {column + 1}", f"box {box + 1}":
            if digit != ".":
                found.setdefault(f"{digit} twice in {place}", []).append(i)
    return {rule: where for rule, where in found.items() if len(where) > 1}


def mistake(cells):
    """The first broken rule, in words, or "". cells: 36 digits, with dots for empty cells."""
    if not re.fullmatch("[1-6.]{36}", cells):
        return "not 36 digits"
    return next(iter(broken(cells)), "")


def solutions(cells):
    """How many grids have these digits. cells: 36 digits, with dots for empty cells."""
    given = [(i, digit) for i, digit in enumerate(cells) if digit != "."]
    pairs = list(itertools.combinations(given, 2))
    grids = canonical()                                                              # (39168, 36)
    # A canonical grid can be relabeled to these digits if its cells are equal where the digits are.
    # Pairs of equal digits come first, because few grids are left after them.
    for (i, a), (j, b) in sorted(pairs, key=lambda pair: pair[0][1] != pair[1][1]):
        grids = grids[(grids[:, i] == grids[:, j]) == (a == b)]                      # (n, 36)
    unseen = 6 - len({digit for _, digit in given})  # these can be named in any way
    return len(grids) * math.factorial(unseen)


def ids_of(cells, mask_id):
    """Ids (n, 39) of n texts of 36 cells: BOS, the cells, two EOS. A dot becomes a mask."""
    x = torch.tensor([[256, *text.encode(), 257, 257] for text in cells])            # (n, 39)
    return x.masked_fill(x == ord("."), mask_id)


def cells_of(x, mask_id):
    """The reverse of `ids_of`, for x (n, 39). A ? is neither a digit nor a mask."""
    cells = {mask_id: "."} | {ord(digit): digit for digit in "123456"}
    return ["".join(cells.get(i, "?") for i in row) for row in x[:, 1:37].tolist()]


# ---- data and training ---------------------------------------------------------------------------
HELD_OUT = 2000  # grids

# ω starts as in the paper. Eight heads, because with four, some seeds get stuck on a plateau for
# thousands of updates, having learned only digit frequencies.
SETTINGS = dict(
    data="data/sudoku", out_dir="out/sudoku",
    n_layer=2, n_head=8, n_embd=128, n_cond=32, length=39, dropout=0.0,
    steps=3500, batch_size=32, micro_batch=32, eta_bb=1e-3, warmup=200, ema=0.995,
    log_every=50, eval_every=3500, eval_rows=2000, save_every=500, keep_every=0)


@dataclass
class Data:
    out: str = "data/sudoku"
    grids: Size = 200_000  # to train on


def prepare(cfg):
    """Write grids as data.py would. Under 1 % of the held-out ones are trained on, too."""
    grids = texts(cfg.grids, rng("sudoku", "train")) + texts(HELD_OUT, rng("sudoku", "val"))
    data.prepare(enumerate(grids), cfg.out, data.tokenizer("bytes"), HELD_OUT, "sudoku")


def train_model(cfg, sm_class=None):
    """Write the grids, then run train.py. With --data, use the grids of that folder."""
    here = launch.machine(cfg.device, cfg.dtype)
    if cfg.data == SETTINGS["data"] and not os.path.exists(f"{cfg.data}/meta.json"):
        launch.join(here)
        launch.first_rank(here, lambda: prepare(Data()))
    train(cfg, sm_class)
    if here.rank == 0:
        code = f" --code={cfg.code}" if cfg.code else ""
        print(f"Try it: python examples/sudoku.py --checkpoint={cfg.out_dir}/last.pt{code}")


# ---- the demonstration ---------------------------------------------------------------------------
SHIPPED = os.path.join(os.path.dirname(launch.__file__), "results", "sudoku.pt")
SHOWN = "2 per pass: 2, 2, …, 2"  # the way in which a puzzle is shown
# How many of 24 empty cells each pass fills, surest first
WAYS = {"1 per pass": 24 * [1],
        SHOWN: 12 * [2],
        "2 per pass: 1, 2, …, 2, 1": [1, *11 * [2], 1],
        "3 per pass": 8 * [3]}
GROUPS = {"1 solution": (1, 1), "2 to 6 solutions": (2, 6), "7 or more": (7, math.inf)}


def sides_of(model):
    """{title: TwoPass}, the columns of the table. A binary model has only one."""
    without = {"without": TwoPass(model.net, None, model.mask_id)}
    return {"with feedback": model} | without if model.sm else without


def fill(model, x, way):
    """Fill puzzles x (n, 39) with 24 empty cells with the likeliest digits: n texts a side."""
    found = []
    for title, side in sides_of(model).items():
        parts = progress(x.split(100), desc=f"{way}, {title}", leave=False)
        ids = [decode(side, part, shares_of(WAYS[way]), Pick()) for part in parts]
        found.append(cells_of(torch.cat(ids), model.mask_id))
    return found


def trace(model, given):
    """A puzzle as it is filled, two cells per pass: {title: [(cells, λ, guesses) after each pass]}

    given, cells, guesses: texts of 36.   λ: a list of 36.
    """
    mask = model.mask_id
    counts = math.ceil(given.count(".") / 2) * [2]
    sides = {title: [] for title in sides_of(model)}
    for title, side in sides_of(model).items():

        def on_step(x, lam, masks, h, revealed, states=sides[title]):
            guess = x.index_put(masks, model.net.head(h).argmax(-1))                 # (1, 39)
            cells, guesses = cells_of(torch.cat((x, guess)), mask)
            states.append((cells, lam[0, 1:37].tolist(), guesses))
        decode(side, ids_of([given], mask), shares_of(counts), Pick(), on_step=on_step)
    return sides


def contradiction(given, states):
    """The number of the first pass that breaks a rule, if it mixes two solutions. Else 0.

    A pass mixes solutions if each cell that it fills is right in some solution of the puzzle as it
    was before the pass, but no solution has all of them.   states: of one side, from `trace`.
    """
    boards = [given, *(cells for cells, _, _ in states)]
    for number, (before, after) in enumerate(itertools.pairwise(boards), start=1):
        if mistake(after):
            filled = [i for i in range(36) if before[i] != after[i]]
            alone = [before[:i] + after[i] + before[i + 1:] for i in filled]
            return number if all(map(solutions, alone)) else 0
    return 0


def picture(title, cells, lam, guesses):
    """A grid in lines of 21 characters, and its mistake. Guesses are darker for larger λ.

    A ! follows each digit that breaks a rule.
    """
    marked = set().union(*broken(cells).values())
    parts = []
    lines = [f"{title:21}"]
    for i, (cell, strength, guess) in enumerate(zip(cells, lam, guesses)):
        digit = f" {cell}!" if i in marked else f" {cell} "
        parts.append(painted(f" {guess} ", strength) if cell == "." else digit)
    for i in range(0, 36, 6):
        lines.append("{}{}{}│{}{}{}  ".format(*parts[i:i + 6]))
        if i in (6, 18):
            lines.append("─────────┼─────────  ")
    wrong = mistake(cells)
    verdict = f"✗ {wrong}" if wrong else "✓ no rule broken"
    return [*lines, f"{verdict:21}"]


def compare(sides):
    """Draw the sides of `trace` beside each other: every pass on a terminal, else the last."""
    passes = list(zip(*sides.values()))
    if sys.stdout.isatty():
        print("Empty cells are green, darker for larger λ. The next pass sees the guesses in them.")
    else:
        passes = passes[-1:]
    for number, states in enumerate(passes):
        columns = [picture(title, *state) for title, state in zip(sides, states)]
        lines = ["     ".join(parts) for parts in zip(*columns)]
        if number:
            time.sleep(0.4)
            print(f"\x1b[{len(lines)}F\x1b[J", end="")  # over the picture before
        print("\n".join(lines), flush=True)


def print_bound(model):
    """Print the bound on held-out grids in nats per grid, and their entropy.               Eq. 2"""
    rows = ids_of(texts(HELD_OUT, rng("sudoku", "val")), model.mask_id)              # (n, 39)
    bounds = []
    for title, side in sides_of(model).items():
        nats, *_ = bound(model, rows, bool(side.sm), seed=1, batch_size=100, floor=0.0)
        bounds.append(f"{nats.mean():.1f} {title}")
    print(f"Bound on {HELD_OUT:,} held-out grids, in nats per grid: {', '.join(bounds)}\n"
          f"(their entropy is {NATS:.1f})\n")


def print_row(name, solved):
    """Print the percentage of puzzles that each side solves.   solved: a list of bools for each"""
    cells = []
    for side in solved:
        p = sum(side) / len(side)
        cells.append(f"{100 * p:.0f} ± {100 * math.sqrt(p * (1 - p) / len(side)):.0f}")
    print(f"  {name:44}" + "".join(f"{cell:>16}" for cell in cells))


REASON = """  Surest cells first. ±: standard error over puzzles, for one model

Most puzzles have several solutions. Cells that one pass fills do not see each other, so
each may be right in another solution. With feedback, each has at least seen what the
previous pass predicted for the others. With an even schedule, the last passes fill two
cells of what is often a 2×2 rectangle with two solutions. With the odd one, the last
pass fills one. So feedback matters more with the even schedule.
"""


def show_one(model, given, n_solutions, solved):
    """Draw a puzzle that only feedback solves, because else a pass contradicts itself.

    given: n texts.   n_solutions: n numbers.   solved: a list of n bools for each side.
    """
    for i, sides in enumerate(zip(*solved)):
        if sides == (True, False):
            traced = trace(model, given[i])
            number = contradiction(given[i], traced["without"])
            if number:
                print(f"Puzzle {i + 1} has {n_solutions[i]} solutions. Without feedback, pass "
                      f"{number} fills two cells that are each right in one\nof them, but not "
                      f"together. A ! marks cells that break a rule.\n")
                return compare(traced)
    print("Puzzle 1, two cells per pass. A ! marks cells that break a rule.\n")
    compare(trace(model, given[0]))


def demonstrate(model, count=400):
    """Print how many puzzles a model trained on data/sudoku solves, and show one of them."""
    held_out = ids_of(texts(HELD_OUT, rng("sudoku", "val"))[:count], model.mask_id)  # (count, 39)
    draws = [rng("puzzle", i) for i in range(count)]
    x = puzzles(held_out, 12, model.mask_id, draws)                                  # (count, 39)
    given = cells_of(x, model.mask_id)
    n_solutions = [*map(solutions, given)]
    title = f"% of {count} puzzles solved, 12 of 36 cells given"
    print(f"{title:46}" + "".join(f"{side:>16}" for side in sides_of(model)))
    for way in WAYS:
        solved = [[not mistake(cells) for cells in side] for side in fill(model, x, way)]
        print_row(way, solved)
        if way == SHOWN:
            shown = solved
            for name, (least, most) in GROUPS.items():
                group = [i for i, n in enumerate(n_solutions) if least <= n <= most]
                if group:
                    name = f"  {name} (n = {len(group)})"
                    print_row(name, [[side[i] for i in group] for side in solved])
    print(REASON)
    show_one(model, given, n_solutions, shown)


@dataclass
class Config:
    given: str = ""       # your own puzzle: 36 characters, row by row, with dots for empty cells
    checkpoint: str = ""  # a model of yours (default: the shipped one)
    code: str = ""        # a Python file to run first: its SoftMask replaces ours


def main(cfg):
    own = launch.soft_mask_class(cfg.code)
    with launch.input_errors():
        model = MDLM.load(cfg.checkpoint or SHIPPED, sm_class=own)
    if model.cfg.length != 39:
        raise Refused(f"{cfg.checkpoint} is not a model of Sudokus: its rows have "
                      f"{model.cfg.length} tokens, not 39")
    if cfg.given:
        wrong = mistake(cfg.given) or ("" if "." in cfg.given else "no cell is empty")
        if wrong:
            raise Refused(f"--given={cfg.given} cannot be filled, {wrong}: give 36 digits from 1 "
                          f"to 6, row by row, with dots for empty cells")
        return compare(trace(model, cfg.given))
    if cfg.checkpoint:
        print_bound(model)
    demonstrate(model)


# For each first word: its function, its flags, and their defaults, as launch.run takes them.
COMMANDS = {"train": (train_model, TrainConfig, {"train": SETTINGS}),
            "data": (prepare, Data, {"data": {}})}

if __name__ == "__main__":
    word = "".join(sys.argv[1:2])  # "" if there is none
    shown = main, Config, {"train": SETTINGS, "data": {}}  # presets for --help and its messages
    run(*COMMANDS.get(word, shown), ranks=word == "train")
