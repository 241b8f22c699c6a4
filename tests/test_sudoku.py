"""grids.py and sudoku.py: its exact posterior, the shipped model, the demonstration.

Not here: the grids themselves (test_data.py), counting the right ones (test_eval.py).
"""

import math
import os
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import data
import grids
import plot
import sudoku
from conftest import ROOT, gen, random_mdlm, refused
from data import rng
from eval import bound
from mdlm import MDLM, ModelConfig
from sample import generate_in_order

MASKS = torch.tensor([256, *[258] * 36, 257, 257])  # a row without its grid
sys.path.insert(0, os.path.join(ROOT, "results"))

import sudoku_table  # noqa: E402
import surest  # noqa: E402
from exact import Posterior, posterior  # noqa: E402
from tied import Tied  # noqa: E402


def test_the_posterior_is_that_of_uniform_grids():
    """The chain rule gives ln of the number of grids, in any order; a contradiction is uniform."""
    every = grids.canonical().numpy()
    [text] = grids.texts(1, gen())
    cells, nats = np.full(36, -1), 0
    for at in torch.randperm(36, generator=data.rng("order")).tolist():
        p = posterior(cells, every)
        np.testing.assert_allclose(p.sum(1), 1)
        cells[at] = int(text[at]) - 1
        nats -= math.log(p[at, cells[at]])
    assert abs(nats - grids.NATS) < 1e-9
    cells[:2] = 0
    assert (posterior(cells, every) == 1 / 6).all()
    cells = np.full(36, -1)
    cells[[6, 10, 17, 25, 31, 32, 33, 35]] = 0, 3, 0, 5, 4, 0, 5, 2  # shares of 1 + 2e-16
    assert (posterior(cells, every) >= 0).all()


def test_what_is_left_of_a_grid_cell_by_cell_is_what_the_posterior_says():
    """And a grid with a wrong digit counts as right until there, and not after it."""
    [text], left, cells = grids.texts(1, gen()), surest.Completions({}), np.full(36, -1)
    order = torch.randperm(36, generator=rng("order")).tolist()
    picks = [(at, int(text[at]), 0.9, int(text[at]), 0.9) for at in order]
    for at, digit, *_ in picks:
        p = posterior(cells, grids.canonical().numpy())[at]
        assert [left.probability(at, i + 1) for i in range(6)] == pytest.approx(p.tolist())
        left.add(at, digit)
        cells[at] = digit - 1
    assert len(left.fit) == 1
    at, digit, *_ = picks[34]
    wrong = [*picks[:34], (at, digit % 6 + 1, 0.2, digit, 0.3), picks[35]]
    found = surest.judge([{}, {}], [picks, wrong])
    assert found["right"] == 0.5 and found["completable"] == 34 * [1] + [0.5, 0.5]
    assert found["true"][34] == 1 and found["sure"][34] == 0.6 and found["sure_wrong"][34] == 0.2
    assert found["count"] == 35 * [2] + [1]


def test_it_makes_no_mistake_one_token_a_call_and_its_bound_is_the_entropy():
    model, tok = random_mdlm(mask_id=258, soft_mask=False, length=39), data.tokenizer("bytes")
    model.net = Posterior(258, 256, 257)
    for order in "random", "entropy":
        generators = [data.rng("exact", i) for i in range(4)]
        ids, nfe = generate_in_order(model, 4, 39, order, top_p=1.0, generator=generators)
        assert grids.right([tok.decode(row) for row in ids.tolist()])["right"] == 1
        assert nfe.tolist() == [39] * 4
    texts = [text.encode() for text in grids.texts(200, gen())]
    rows = torch.tensor([[256, *text, 257, 257] for text in texts])
    nats = bound(model, rows, False, floor=0)[0]
    error = nats.std() / math.sqrt(len(nats))
    assert abs(nats.mean() - grids.NATS) < 3 * error < 5


def test_tied_layers_read_their_own_hidden_states():
    """At its start the map is 0, and the second pass repeats the first; then it does not."""
    model = Tied(ModelConfig(n_layer=1, n_head=2, n_embd=16, n_cond=8, vocab_size=259, mask_id=258,
                             dropout=0.0))
    torch.nn.init.normal_(model.net.output_layer.linear.weight, generator=data.rng(0))
    x0 = torch.randint(256, (2, 39), generator=data.rng(1))
    xt, t = torch.where(x0 % 2 == 0, 258, x0), torch.full((2,), 0.5)
    plain = model(x0, xt, t, False)
    assert torch.equal(model(x0, xt, t, True), plain)
    torch.nn.init.normal_(model.net.again.weight, generator=data.rng(2))
    changed = model(x0, xt, t, True)
    assert not torch.equal(changed, plain)
    changed.sum().backward()
    assert model.net.again.weight.grad.abs().sum() > 0


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


def test_the_page_of_tables_is_made_of_the_lines_beside_it(capsys):
    sudoku_table.main()
    assert capsys.readouterr().out == Path(ROOT, "results", "sudoku.md").read_text("utf-8")


def test_a_puzzle_keeps_the_given_cells_and_the_ends():
    rows = torch.arange(78).view(2, 39)
    for given in (0, 36, 12):
        x = grids.puzzles(rows, given, 99, [gen(0), gen(1)])
        kept = x == rows
        assert kept.sum(1).tolist() == [given + 3] * 2 and kept[:, [0, 37, 38]].all()
        assert (x[~kept] == 99).all()
    assert not torch.equal(*kept)
