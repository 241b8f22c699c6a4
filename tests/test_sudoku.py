# SPDX-License-Identifier: MIT
"""The Sudoku language from end to end: the quickstart, its exact posterior, the shipped model.

Not here: the grids themselves (test_data.py), counting the right ones (test_eval.py).
"""

import dataclasses
import importlib
import json
import math
import os
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import data
import sudoku
import train
from conftest import ROOT, gen, refused, spy
from data import rng
from eval import bound
from launch import append_jsonl, read_json, read_jsonl
from mdlm import MDLM, ModelConfig
from sample import generate_in_order

MASKS = torch.tensor([256, *[258] * 36, 257, 257])  # a row without its grid
sys.path.insert(0, os.path.join(ROOT, "results"))

import add  # noqa: E402
import sudoku_table  # noqa: E402
from exact import Posterior, posterior  # noqa: E402
from tied import Tied  # noqa: E402


def small(**fields):
    sizes = dict(n_layer=1, n_head=2, n_embd=16, n_cond=8, vocab_size=259, mask_id=258, length=39)
    return ModelConfig(**sizes | fields)


def test_the_posterior_is_that_of_uniform_grids():
    """The chain rule gives ln of the number of grids, in any order; a contradiction is uniform."""
    grids = sudoku.grids().numpy()
    [text] = sudoku.texts(1, gen())
    cells, nats = np.full(36, -1), 0
    for at in torch.randperm(36, generator=data.rng("order")).tolist():
        p = posterior(cells, grids)
        np.testing.assert_allclose(p.sum(1), 1)
        cells[at] = int(text[at]) - 1
        nats -= math.log(p[at, cells[at]])
    assert abs(nats - sudoku.NATS) < 1e-9
    cells[:2] = 0
    assert (posterior(cells, grids) == 1 / 6).all()
    cells = np.full(36, -1)
    cells[[6, 10, 17, 25, 31, 32, 33, 35]] = 0, 3, 0, 5, 4, 0, 5, 2  # shares of 1 + 2e-16
    assert (posterior(cells, grids) >= 0).all()


def test_it_makes_no_mistake_one_token_a_call_and_its_bound_is_the_entropy():
    model, tok = MDLM(small(soft_mask=False)).eval(), data.tokenizer("bytes")
    model.net = Posterior(258, 256, 257)
    for order in "random", "entropy":
        generators = [data.rng("exact", i) for i in range(4)]
        ids, nfe = generate_in_order(model, 4, 39, order, top_p=1.0, generator=generators)
        assert sudoku.right([tok.decode(row) for row in ids.tolist()])["right"] == 1
        assert nfe.tolist() == [39] * 4
    texts = [text.encode() for text in sudoku.texts(200, gen())]
    rows = torch.tensor([[256, *text, 257, 257] for text in texts])
    nats = bound(model, rows, False, floor=0)[0]
    error = nats.std() / math.sqrt(len(nats))
    assert abs(nats.mean() - sudoku.NATS) < 3 * error < 5


def test_tied_layers_read_their_own_hidden_states():
    """At its start the map is 0, and the second pass repeats the first; then it does not."""
    model = Tied(small(dropout=0.0))
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


def test_the_quickstart_shows_the_entropy_omega_and_right_grids(tmp_path, monkeypatch, capsys):
    """Cut short: what it prints, and that it starts where the paper does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(data.PRESETS["sudoku"], "grids", 64)
    monkeypatch.setattr(sudoku.demonstrate, "__defaults__", (3,))
    cut = dict(steps=2, n_layer=1, n_embd=16, n_head=2, eval_rows=4, device="cpu", eval_every=1)
    cfg = train.Config(**train.PRESETS["quickstart"] | cut)
    assert (cfg.omega_s, cfg.omega_a, cfg.omega_b) == (1e-6, 10 / 1.5, -0.75)
    train.train(cfg)
    out = capsys.readouterr().out
    for part in ("nats per grid (the entropy is 17.15)", "with feedback", "without", "ω_s",
                 "3 puzzles, 12 of 36 cells given"):
        assert part in out, part
    assert "\n       2   0.000   6.667  -0.750" in out  # ω's story ends with the last update
    made = os.stat("data/sudoku/train.bin").st_mtime_ns
    data.prepare_preset("data/sudoku")  # there already
    assert os.stat("data/sudoku/train.bin").st_mtime_ns == made


def test_the_shipped_model_is_as_good_as_is_claimed():
    """results/README.md: 0.5318 nats, and 67 % of 1,000 grids right, the surest cell next."""
    path = os.path.join(ROOT, "results", "sudoku.safetensors")
    assert os.path.getsize(path) < 2e6
    model, tok = MDLM.load(path), data.tokenizer("bytes")
    generators = [data.rng("sample", 1, i) for i in range(128)]  # as `sample.py --seed=1`
    ids, _ = generate_in_order(model, 128, 36, "entropy", 1.0, generators, x=MASKS)
    right = sudoku.right([tok.decode(row) for row in ids.tolist()])["right"]
    assert abs(right - 0.671) < 3 * math.sqrt(0.671 * 0.329 / 128)
    texts = sudoku.texts(2000, rng("sudoku", "val"))
    rows = torch.tensor([[256, *text.encode(), 257, 257] for text in texts])    # (2000, 39)
    nll = bound(model, rows, True, seed=1, repeats=2, floor=0.0)[0]
    assert nll.mean() / 39 == pytest.approx(0.5318, abs=2e-4)
    assert model.sm.omega[0] > 0.5 and model.sm.raw_s.dtype == torch.float32


def test_a_mistake_is_named():
    [grid] = sudoku.texts(1, gen())
    assert sudoku.mistake(grid) == "" == sudoku.mistake("." * 36)
    assert sudoku.mistake(grid[:35]) == sudoku.mistake(grid[:35] + "7") == "not 36 digits"
    for cells, name in ((0, 5), "row 1"), ((1, 31), "column 2"), ((16, 21), "box 4"):
        broken = ["5" if i in cells else "." for i in range(36)]
        assert sudoku.mistake("".join(broken)) == f"5 twice in {name}"


def test_a_puzzle_is_possible_if_a_grid_has_its_cells():
    [grid] = sudoku.texts(1, gen())
    some = "".join(digit if i % 3 else "." for i, digit in enumerate(grid))
    assert sudoku.possible(grid) and sudoku.possible(some) and sudoku.possible("." * 36)
    stuck = "12345....6" + 26 * "."  # no digit is left for the last cell of the first row
    assert sudoku.mistake(stuck) == "" and not sudoku.possible(stuck)


def test_the_demonstration_counts_and_shows_where_feedback_matters(monkeypatch, capsys):
    """Of 8 puzzles, and the first on which the two ways differ, if there is one."""
    model = MDLM.load(os.path.join(ROOT, "results", "sudoku.safetensors"))
    shown = spy(monkeypatch, sudoku, "compare")
    sudoku.demonstrate(model, 8)
    out = capsys.readouterr().out
    [(sides, i)] = shown
    wrong = {side: list(map(sudoku.mistake, states[-1][0])) for side, states in sides.items()}
    differ = [j for j, pair in enumerate(zip(*wrong.values())) if len(set(map(bool, pair))) > 1]
    assert re.search("  the surest cell next (.*)", out)[1].split() == [
        str(found.count("")) for found in wrong.values()]
    assert differ and i == differ[0] and f"the two differ in {len(differ)} of 8 puzzles" in out
    assert f"Puzzle {i + 1} is shown, because it is the first of these:" in out
    assert out.count("✓ right") == out.count("✗") == 1 and "\x1b" not in out
    assert next(filter(None, (found[i] for found in wrong.values()))) in out
    for states in sides.values():  # one cell a call
        assert [cells[i].count(".") for cells, _, _ in states] == list(range(23, -1, -1))
    assert not any(np.any(lam) for _, lam, _ in sides["without"])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    sudoku.compare(sides, i)  # on a terminal it appears, call after call
    out = capsys.readouterr().out
    assert out.count("with feedback") == 24 and out.count("\x1b[10F\x1b[J") == 23
    assert out.count("✗") == 1 and "48;2;220;246;220;" in out
    bare = [re.sub("\x1b.*?[mFJ]", "", line) for line in out.splitlines()]
    assert {line.rindex("│") for line in bare if "│" in line} == {35}


def test_the_demonstration_of_a_binary_model_has_one_side(capsys):
    sudoku.demonstrate(MDLM(small(soft_mask=False)), 2)
    out = capsys.readouterr().out
    assert "with feedback" not in out and "the two" not in out and "Puzzle 1 is shown:" in out


def test_a_puzzle_of_the_user_is_filled_or_refused_before_anything_runs(monkeypatch, capsys):
    given = "1..4......2........3.......5......6."
    sudoku.main(sudoku.Config(given=given))
    halves = [line.split("     ")[0] for line in capsys.readouterr().out.splitlines()[1:]]
    cells = re.sub(r"\D", "", "".join(line for line in halves if "│" in line))
    assert len(cells) == 36 and all(c in (".", d) for c, d in zip(given, cells))
    monkeypatch.setattr(MDLM, "load", None)
    for given, why in (("11" + 34 * ".", "1 twice in row 1"), ("12", "not 36 digits"),
                       ("12345....6" + 26 * ".", "no grid has these cells")):
        refused(f"cannot be filled, {why}", sudoku.main, sudoku.Config(given=given))


def test_the_page_of_tables_is_made_of_the_lines_beside_it(capsys):
    sudoku_table.main()
    assert capsys.readouterr().out == Path(ROOT, "results", "sudoku.md").read_text("utf-8")


def test_results_and_logs_are_kept_as_lines(tmp_path, monkeypatch):
    """A result replaces that of its name, a log is made shorter, and unpacked they are files."""
    kept, logs = (str(tmp_path / f"{name}.jsonl") for name in ("sudoku", "sudoku_logs"))
    for nats, step in ((0.7, ""), (0.6, ""), (0.5, ".step-12000")):
        for name, values in (("binary-1", {"binary": {"nats_per_token": nats}}),
                             ("binary-1.random-36-off", {"right": 1 - nats})):
            path = tmp_path / f"{name}{step}.json"
            path.write_text(json.dumps({"values": values}))
            add.add(kept, [str(path)])
    for run in "sm-2", "sm-1":
        (tmp_path / run).mkdir()
        for step in 50, 100:
            append_jsonl(str(tmp_path / run / "log.jsonl"), {"step": step, "loss": 1.23456789})
        add.add(logs, [str(tmp_path / run / "log.jsonl")])
    add.unpack(kept, str(tmp_path / "files"))
    add.unpack(logs, str(tmp_path / "files"))
    assert read_json(str(tmp_path / "files" / "binary-1.json")) == {
        "values": {"binary": {"nats_per_token": 0.6}}}
    assert read_jsonl(str(tmp_path / "files" / "sm-1.jsonl")) == [
        {"step": step, "loss": 1.234568} for step in (50, 100)]
    monkeypatch.setattr(sudoku_table, "lines_of", lambda name: read_jsonl(kept))
    for step, nats in (("", 0.6), ("12000", 0.5)):  # a longer run is another row
        bounds, shares = sudoku_table.read(step)
        assert bounds == {("binary", "1"): {"binary": nats}}
        assert shares == {("binary", "random-36", False): {"1": 1 - nats}}


def test_the_scripts_in_results_use_flags_that_exist():
    found = []
    for path in Path(ROOT, "results").glob("*.sh"):
        text = re.sub(r"\\\n", " ", path.read_text("utf-8"))
        found += re.findall(r"python (?:lab/)?(\w+)\.py (.*)", text)
        found += [("eval", words) for words in re.findall(r"python \S+/eval.py} (.*)", text)]
        if path.name in ("run.sh", "sudoku.sh"):
            words = re.findall(r'\b(?:flags|model|scratch|cont|stdlib|ours|two)=(".*?")', text)
            found += [("train", each.replace('"', " ")) for each in words]
    assert len(found) > 20
    for script, words in found:
        if script in ("train", "sample", "eval", "plot"):
            fields = {f.name for f in dataclasses.fields(importlib.import_module(script).Config)}
            assert set(re.findall(r" --(\w+)", words)) <= fields, words


def test_the_figure_has_the_seeds_and_the_ceiling():
    pytest.importorskip("matplotlib", reason="would draw the shares of right grids")
    shares = {("sm", "mdlm-5", True): {1: 0.5, 2: 0.7}, ("exact", "mdlm-5", False): {"": 0.9},
              ("sm", "mdlm-5", False): {1: 0.1}}
    ax = sudoku_table.draw(shares).axes[1]
    points = [[bar.lines[0].get_ydata()[0], bar.lines[0].get_markerfacecolor() == "white"]
              for bar in ax.containers]
    assert points == [[pytest.approx(60), False], [pytest.approx(10), True]]
    assert ax.collections[0].get_segments()[0][:, 1] == pytest.approx(90)
    [[low, high]] = ax.containers[0].lines[2][0].get_segments()
    assert high[1] - low[1] == pytest.approx(2 * math.sqrt(200))


def test_a_puzzle_keeps_the_given_cells_and_the_ends():
    grids = torch.arange(78).view(2, 39)
    draws = lambda: [gen(i) for i in range(2)]
    for given in (0, 12, 36):
        x = sudoku.puzzles(grids, given, 99, draws())
        kept = x == grids
        assert kept.sum(1).tolist() == [given + 3] * 2 and kept[:, [0, 37, 38]].all()
        assert (x[~kept] == 99).all()
    assert not torch.equal(*(sudoku.puzzles(grids, 12, 99, draws()) == grids))
