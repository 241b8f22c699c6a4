"""examples/sudoku.py: the grids, the shipped model, the demonstration, the training."""

import os
import re
from pathlib import Path

import pytest
import torch

import data
import sudoku
import trajectory
from data import rng
from mdlm import MDLM
from sudoku import NATS
from test_readme import page


def test_readme_shows_what_the_demonstration_prints(monkeypatch, capsys):
    """Percentages of puzzles solved. lab/trajectory.py draws the same puzzle.

    .ci/run has run all of the demonstration. Otherwise, only README's first numbers are tested.
    """
    claims = {sudoku.SHOWN: r"(\d+)% of 400 puzzles, and (\d+)% with its",
              "1 per pass": r"One cell per pass: (\d+) and (\d+)%",
              "2 per pass: 1, 2, …, 2, 1": r"1, 2, …, 2, 1 cells: (\d+) and (\d+)%"}
    if "DEMONSTRATION" in os.environ:
        out = Path(os.environ["DEMONSTRATION"]).read_text("utf-8")
    else:
        claims = {sudoku.SHOWN: claims[sudoku.SHOWN]}
        monkeypatch.setattr(sudoku, "WAYS", {sudoku.SHOWN: sudoku.WAYS[sudoku.SHOWN]})
        sudoku.main(sudoku.Config())
        out = capsys.readouterr().out
    for way, claim in claims.items():
        printed = re.search(rf"{way} +(\d+) ± \d +(\d+) ± \d\n", out).groups()
        in_readme = re.search(claim, " ".join(page("README.md").split())).groups()
        assert [*map(int, printed)] == pytest.approx([*map(int, in_readme)], abs=1)  # rounding
    assert "Puzzle 5 has 5 solutions. Without feedback, pass 11 fills two cells" in out
    [given] = re.findall(r"--given=(\S+)\"", trajectory.__doc__)
    sudoku.main(sudoku.Config(given=given))
    drawn = capsys.readouterr().out
    assert out.endswith("\n\n" + drawn) and "│ 2  4! 4!  \n" in drawn


def test_the_bound_is_told_with_feedback_and_without(monkeypatch, capsys):
    monkeypatch.setattr(sudoku, "HELD_OUT", 100)
    model = MDLM.load(sudoku.SHIPPED)
    sudoku.print_bound(model)
    with_it, without = re.findall(r"(\d+\.\d) with", capsys.readouterr().out)
    assert NATS < float(with_it) < float(without) - 1
    model.sm = None
    sudoku.print_bound(model)
    assert f"grid: {without} without\n" in capsys.readouterr().out


def brute_force(cells):
    """How many ways there are to fill the first empty cell, and then the others"""
    if sudoku.mistake(cells):
        return 0
    if "." not in cells:
        return 1
    return sum(brute_force(cells.replace(".", digit, 1)) for digit in "123456")


def test_solutions_are_counted_as_a_search_does(tmp_path):
    """Of puzzles with few and with many solutions, with few different digits, and with none"""
    sudoku.prepare(sudoku.Data(str(tmp_path), grids=300))
    tokens, _ = data.open_split(tmp_path, "train")
    rows = data.rows(tokens, torch.arange(data.n_rows(tokens, 39)), 39)
    texts = sudoku.cells_of(rows, 258)
    assert torch.equal(sudoku.ids_of(texts, 258), rows) and len(rows) == 300
    assert not any(map(sudoku.mistake, texts))
    puzzles = ["11" + 34 * ".", re.sub("[3-6]", ".", texts[0])]
    for given in 20, 12, 10:
        draws = [rng("solutions", i) for i in range(6)]
        puzzles += sudoku.cells_of(sudoku.puzzles(rows[:6], given, 258, draws), 258)
    small = [cells for cells in puzzles if sudoku.solutions(cells) < 300]
    counts = [sudoku.solutions(cells) for cells in small]
    assert counts == [*map(brute_force, small)] and len(small) > 15 and len({*counts}) > 6
    assert len(torch.unique(sudoku.canonical(), dim=0)) == 39_168  # as published: all there are
    assert sudoku.solutions(36 * ".") == 720 * 39_168 == 720 * sudoku.solutions("123456" + 30 * ".")
