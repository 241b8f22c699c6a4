"""lab/trajectory.py: the cells of every step (Fig. 7), and the page and picture of the Sudoku."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import data
import sample
import trajectory
from conftest import ROOT, random_mdlm, refused, save_mdlm, start
from launch import read_jsonl
from sample import cell_text


@pytest.fixture
def saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_mdlm("sm.pt", random_mdlm(vocab_size=259, mask_id=258, length=12, omega_s=0.5,
                                   omega_a=1.0, omega_b=-5.0))


@pytest.mark.parametrize("sampler", ["mdlm", "entropy"])
def test_the_steps_are_those_of_the_sample(saved, sampler):
    """Cells are masks with 0 < λ < ω_s, or tokens without λ. Nothing revealed changes."""
    words = dict(checkpoint="sm.pt", steps=6, device="cpu", sampler=sampler)
    sample.main(sample.Config(**words, out="s.jsonl"))
    [line], found = read_jsonl("s.jsonl"), trajectory.traces(trajectory.Config(**words))
    steps, plain = found["with-feedback"], found["without"]
    texts = [cell_text(data.tokenizer("bytes"), token) for token in line["ids"]]
    assert [cell for cell, _ in steps[-1]] == texts
    assert len(steps) in (6, 7) and plain != steps
    assert all(cell[1] in (None, 0) for step in plain for cell in step)
    masks = [cell for step in steps for cell in step if cell[1] is not None]
    assert len(masks) > 12
    for guess, lam, neg_entropy, mixed in masks:
        gate = 0.5 / (1 + math.exp(-(neg_entropy + 5)))
        assert lam == pytest.approx(gate, abs=1e-4) and guess == mixed[0][0]
        shares = [share for _, share in mixed]
        assert len(shares) == 3 and sum(shares) == pytest.approx(1, abs=2e-4)
    for before, after in zip(steps, steps[1:]):
        assert all(new == old for old, new in zip(before, after) if old[1] is None)


def test_a_puzzle_has_the_length_of_a_row_and_something_to_fill(saved):
    words = "trajectory", "--checkpoint=sm.pt"
    for given in "a.b.", "abcdefghi":
        refused("give 9, some of them dots", start, *words, f"--given={given}")
    refused("or in .svg for a 6×6", start, *words, "--given=a.b......", "--out=x.svg")
    start(*words, "--given=a.b......", "--steps=3", "--note=N")
    assert '"columns": 0, "note": "N"' in open("trajectory.html").read()


def held(page):
    return json.loads(re.search(r'application/json">(.*?)</script>', page)[1])


def test_the_page_and_the_picture_of_the_sudoku_are_those_that_it_makes(tmp_path):
    """λ and shares up to the rounding of another machine."""
    [given] = re.findall(r"--given=(\S+)\"", trajectory.__doc__)
    words = [f"--checkpoint={ROOT}/results/sudoku.pt", "--sampler=entropy", "--steps=12",
             "--temperature=0", "--top_p=1", f"--given={given}"]
    for name in "trajectory.html", "figures/sudoku.svg":
        start("trajectory", *words, f"--out={tmp_path}/{name}")
    folders = tmp_path, Path(ROOT, "results")
    ours, theirs = (held((folder / "trajectory.html").read_text("utf-8")) for folder in folders)
    assert "examples/sudoku.py" in theirs["note"] and theirs["columns"] == ours["columns"] == 6
    for a, b in zip(ours["traces"], theirs["traces"], strict=True):
        assert a["name"] == b["name"] and len(a["steps"]) == len(b["steps"]) == 12
        for one, other in zip(sum(a["steps"], []), sum(b["steps"], []), strict=True):
            assert one[0] == other[0] and one[1] == pytest.approx(other[1], abs=2e-3)
    pictures = [ElementTree.parse(folder / "figures/sudoku.svg").getroot() for folder in folders]
    ours, theirs = ([text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
                    for picture in pictures)
    assert ours == theirs and len(pictures[0].findall("{*}g")) == 12
