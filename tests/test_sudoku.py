"""examples/sudoku.py: the grids, the shipped model, the demonstration, the training."""

import re

import pytest
import torch

import data
import sudoku
import trajectory
from conftest import ROOT
from data import rng
from mdlm import MDLM
from sample import Pick, decode, shares_of
from test_readme import page
from train import bound


def test_the_shipped_model_is_as_good_as_is_claimed():
    """A bound of 0.5318 nats per token. Surest first, it fills two thirds of empty grids."""
    model = MDLM.load(f"{ROOT}/results/sudoku.pt")
    empty = torch.tensor([[256, *[258] * 36, 257, 257]]).expand(256, -1)
    pick = Pick(temperature=1.0, generator=rng("sample", 1))
    ids = decode(model, empty, shares_of(36 * [1]), pick)
    right = sum(not sudoku.mistake(cells) for cells in sudoku.cells_of(ids, 258)) / 256
    assert right == pytest.approx(0.667, abs=0.06)  # of 1,024; ± 2 standard errors
    rows = sudoku.ids_of(sudoku.texts(2000, rng("sudoku", "val")), 258)
    nll = bound(model, rows, True, seed=1, repeats=2, floor=0.0)[0]
    assert nll.mean() / 39 == pytest.approx(0.5318, abs=2e-4)


def test_readme_shows_what_the_demonstration_prints(monkeypatch, capsys):
    """How many are solved at two cells per call. lab/trajectory.py draws the same puzzle."""
    monkeypatch.setattr(sudoku, "WAYS", {sudoku.SHOWN: sudoku.WAYS[sudoku.SHOWN]})
    sudoku.main(sudoku.Config())
    out = capsys.readouterr().out
    printed = re.search(r"surest cells first, two per call +(\d+) +(\d+)", out).groups()
    claim = r"solves (\d+) with feedback and (\d+) without"
    in_readme = re.search(claim, page("README.md")).groups()
    assert [*map(int, printed)] == pytest.approx([*map(int, in_readme)], abs=3)  # rounding differs
    assert "puzzle 2:" in out and "✓ no rule broken          ✗ 2 twice in box 1" in out
    [given] = re.findall(r"--given=(\S+)\"", trajectory.__doc__)
    sudoku.main(sudoku.Config(given=given))
    assert out.endswith("\n\n" + capsys.readouterr().out)


def test_sudoku_grids_are_all_of_them_and_rows_hold_one_each(tmp_path):
    every = sudoku.canonical().view(-1, 6, 6)
    assert len(every) == 39_168 == len(torch.unique(every, dim=0))
    boxes = every.view(-1, 3, 2, 2, 3).transpose(2, 3).reshape(-1, 6, 6)
    for units in every, every.transpose(1, 2), boxes:
        assert (units.sort(-1).values == torch.arange(6)).all()
    sudoku.prepare(sudoku.Data(str(tmp_path), grids=300))
    tokens, _ = data.open_split(tmp_path, "train")
    assert data.n_rows(tokens, 39) == 300
    rows = data.rows(tokens, torch.arange(300), 39)
    assert (rows[:, 0] == 256).all() and (rows[:, 37:] == 257).all()
    known = {tuple(grid) for grid in every.flatten(1).tolist()}
    for grid in (rows[:, 1:37] - 49).tolist():
        assert tuple(map(grid[:6].index, grid)) in known  # with other names for the digits


def brute_force(cells):
    """How many ways there are to fill the first empty cell, and then the others"""
    if sudoku.mistake(cells):
        return 0
    if "." not in cells:
        return 1
    return sum(brute_force(cells.replace(".", digit, 1)) for digit in "123456")


def test_solutions_are_counted_as_a_search_does():
    """Of puzzles with few and with many solutions, with few different digits, and with none"""
    grids = sudoku.ids_of(sudoku.texts(6, rng("solutions")), 258)
    found = []
    for given in 20, 12, 10:
        x = sudoku.puzzles(grids, given, 258, [rng("solutions", i) for i in range(6)])
        found += [(sudoku.solutions(cells), cells) for cells in sudoku.cells_of(x, 258)]
    found += [(sudoku.solutions(cells), cells) for cells in (
        "11" + 34 * ".",
        re.sub("[3-6]", ".", sudoku.texts(1, rng("solutions"))[0]))]
    small = [(n, cells) for n, cells in found if n < 300]
    assert len(small) > 15 and len({n for n, _ in small}) > 6
    for n, cells in small:
        assert n == brute_force(cells), cells
    assert sudoku.solutions(36 * ".") == 720 * 39_168 == 720 * sudoku.solutions("123456" + 30 * ".")
