"""grids.py and sudoku.py: puzzles, the shipped model, the demonstration.

Not here: the grids themselves (test_data.py), counting the right ones (test_eval.py).
"""

import os
import re
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import data
import grids
import plot
import sudoku
from conftest import ROOT, gen, refused
from data import rng
from eval import bound
from mdlm import MDLM
from sample import generate_in_order

MASKS = torch.tensor([256, *[258] * 36, 257, 257])  # a row without its grid


def test_the_shipped_model_is_as_good_as_is_claimed():
    """results/README.md: 0.5318 nats; of its first 128 grids, surest next, 72 % are right."""
    path = os.path.join(ROOT, "results", "sudoku.safetensors")
    assert os.path.getsize(path) < 2e6
    model, tok = MDLM.load(path), data.tokenizer("bytes")
    generators = [data.rng("sample", 1, i) for i in range(128)]  # as `sample.py --seed=1`
    ids, _ = generate_in_order(model, 128, 36, "entropy", 1.0, generators, x=MASKS)
    right = grids.right([tok.decode(row) for row in ids.tolist()])["right"]
    assert right == pytest.approx(0.719, abs=0.03)
    texts = grids.texts(2000, rng("sudoku", "val"))
    rows = torch.tensor([[256, *text.encode(), 257, 257] for text in texts])    # (2000, 39)
    nll = bound(model, rows, True, seed=1, repeats=2, floor=0.0)[0]
    assert nll.mean() / 39 == pytest.approx(0.5318, abs=2e-4)
    assert model.sm.omega[0] > 0.5 and model.sm.raw_s.dtype == torch.float32


def test_the_demonstration_shows_the_first_puzzle_on_which_the_sides_differ(monkeypatch, capsys):
    """Whichever is right. If they agree, or if there is only one side, it shows the first."""
    [grid], latin = grids.texts(1, gen()), "".join("123456123456"[i:i + 6] for i in range(6))

    def shown(**ends):  # latin: rows and columns are right, and no box
        sides = {side.replace("_", " "): [(cells, torch.zeros(3, 36), cells)]
                 for side, cells in ends.items()}
        monkeypatch.setattr(sudoku, "fill", lambda *_: sides)
        model = types.SimpleNamespace(mask_id=258, sm="with_feedback" in ends)
        sudoku.demonstrate(model, 3)
        return capsys.readouterr().out

    out = shown(with_feedback=[grid, latin, grid], without=[grid, grid, latin])
    assert re.findall("a call +(.*)", out)[:4] == ["2               2"] * 4
    found = "call, 2 puzzles .*puzzle 2:.*\n✗ 2 twice in box 1 +✓ no rule broken"
    assert re.search(found, out, re.DOTALL)
    out = shown(with_feedback=[latin, grid, grid], without=[latin, grid, grid])
    assert re.search("both sides agree .* Puzzle 1:.*\n(✗ 2 twice in box 1 *){2}", out, re.DOTALL)
    out = shown(without=[grid, grid, latin])
    assert re.search("Puzzle 1, two cells a call:.*\n✓ no rule broken *$", out, re.DOTALL)
    assert "feedback" not in out


def test_readme_shows_what_the_demonstration_prints(monkeypatch, capsys):
    """The row of two cells a call, for the shipped model. plot.py draws the puzzle shown."""
    row = r"surest cells first, two a call +(\d+) +(\d+)"
    monkeypatch.setattr(sudoku, "WAYS", {sudoku.SHOWN: sudoku.WAYS[sudoku.SHOWN]})
    sudoku.main(sudoku.Config())
    out = capsys.readouterr().out
    printed, in_readme = (re.search(row, text).groups()
                          for text in (out, Path(ROOT, "README.md").read_text("utf-8")))
    assert [*map(int, printed)] == pytest.approx([*map(int, in_readme)], abs=3)  # other roundings
    assert "puzzle 2:" in out and "✓ no rule broken          ✗ 2 twice in box 1" in out
    [given] = re.findall(r"--given=(\S+)\"", plot.__doc__)
    sudoku.main(sudoku.Config(given=given))
    assert out.endswith("\n\n" + capsys.readouterr().out)


def test_puzzles_are_filled_so_many_cells_a_call_with_feedback_and_without():
    model = MDLM.load(sudoku.SHIPPED)
    x = grids.ids_of(grids.texts(2, gen()), 258)
    puzzles = grids.puzzles(x, 29, 258, [gen(1), gen(2)])
    left = {1: [6, 5, 4, 3, 2, 1, 0], 2: [5, 3, 1, 0], 3: [4, 2, 0]}  # rounded up, then even
    for order, cells_a_call in sudoku.WAYS:
        for side, states in sudoku.fill(model, puzzles, order, cells_a_call).items():
            assert [cells[1].count(".") for cells, _, _ in states] == left[cells_a_call]
            ends = grids.ids_of(states[-1][0], 258)
            assert torch.equal(torch.where(puzzles == 258, 258, ends), puzzles)
            assert any(np.any(lam) for _, lam, _ in states) == (side == "with feedback")


def test_a_model_of_the_user_also_has_its_bound_printed(monkeypatch, capsys):
    model = MDLM.load(sudoku.SHIPPED)
    rows = grids.ids_of(grids.texts(50, rng("sudoku", "val")), 258)
    monkeypatch.setattr(sudoku, "HELD_OUT", 50)
    monkeypatch.setattr(sudoku, "demonstrate", lambda model: None)
    sudoku.main(sudoku.Config(checkpoint=sudoku.SHIPPED))
    on, off = (bound(model, rows, soft, seed=1, floor=0.0)[0].mean() for soft in (True, False))
    out = capsys.readouterr().out
    assert f": {on:.1f} with feedback, {off:.1f} without\n(their entropy is 17.2)" in out


def test_a_puzzle_of_the_user_is_filled_or_refused(capsys):
    given = "1..4......2........3.......5......6."
    sudoku.main(sudoku.Config(given=given))
    halves = [line.split("     ")[0] for line in capsys.readouterr().out.splitlines()[1:]]
    cells = re.sub(r"\D", "", "".join(line for line in halves if "│" in line))
    assert len(cells) == 36 and all(c in (".", d) for c, d in zip(given, cells))
    [grid] = grids.texts(1, gen())
    for given, why in (("11" + 34 * ".", "1 twice in row 1"), ("12", "not 36 digits"),
                       (grid, "no cell is empty")):
        refused(f"cannot be filled, {why}", sudoku.main, sudoku.Config(given=given))


def test_a_puzzle_keeps_the_given_cells_and_the_ends():
    rows = torch.arange(78).view(2, 39)
    for given in (0, 36, 12):
        x = grids.puzzles(rows, given, 99, [gen(0), gen(1)])
        kept = x == rows
        assert kept.sum(1).tolist() == [given + 3] * 2 and kept[:, [0, 37, 38]].all()
        assert (x[~kept] == 99).all()
    assert not torch.equal(*kept)
