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


@pytest.mark.parametrize("sampler", ["mdlm", "entropy"])
def test_the_steps_are_those_of_the_sample(tmp_path, monkeypatch, sampler):
    """Cells are masks with 0 < λ < ω_s, or tokens without λ. Nothing revealed changes."""
    monkeypatch.chdir(tmp_path)
    save_mdlm("sm.pt", random_mdlm(vocab_size=259, mask_id=258, length=12, omega_s=0.5,
                                   omega_a=1.0, omega_b=-5.0))
    words = dict(checkpoint="sm.pt", steps=6, device="cpu", sampler=sampler)
    sample.main(sample.Config(**words, out="s.jsonl"))
    [line] = read_jsonl("s.jsonl")
    steps, plain = trajectory.traces(trajectory.Config(**words)).values()
    texts = [sample.cell_text(data.tokenizer("bytes"), token) for token in line["ids"]]
    assert [cell for cell, _ in steps[-1]] == texts
    assert all(cell[1] in (None, 0) for step in plain for cell in step)
    masks = [cell for step in steps for cell in step if cell[1] is not None]
    assert len(masks) > 12
    for guess, lam, neg_entropy, mixed in masks:
        assert lam == pytest.approx(0.5 / (1 + math.exp(-(neg_entropy + 5))), abs=1e-4)
        assert guess == mixed[0][0] and len(mixed) == 3
        assert sum(share for _, share in mixed) == pytest.approx(1, abs=2e-4)
    for before, after in zip(steps, steps[1:]):
        assert all(new == old for old, new in zip(before, after) if old[1] is None)
    refused("leave --prompt out", trajectory.traces,
            trajectory.Config(**words, given=12 * ".", prompt="a"))


def test_the_page_and_the_picture_of_the_sudoku_are_those_that_it_makes(tmp_path):
    """λ and shares up to the rounding of another machine."""
    [given] = re.findall(r"--given=(\S+)\"", trajectory.__doc__)
    words = [f"--checkpoint={ROOT}/results/sudoku.pt", "--sampler=entropy", "--steps=12",
             "--temperature=0", "--top_p=1", f"--given={given}"]
    for name in "trajectory.html", "figures/sudoku.svg":
        start("trajectory", *words, f"--out={tmp_path}/{name}")
    pages = []
    pictures = []
    for folder in tmp_path, Path(ROOT, "results"):
        page = (folder / "trajectory.html").read_text("utf-8")
        pages.append(json.loads(re.search(r'application/json">(.*?)</script>', page)[1]))
        picture = ElementTree.parse(folder / "figures/sudoku.svg")
        svg = "{http://www.w3.org/2000/svg}"
        pictures.append([text.text for text in picture.iter(svg + "text")])
        red = [len(frame.findall(svg + "rect[@fill='#f99']")) for frame in picture.iter(svg + "g")]
        assert red == 10 * [0] + [2, 4]  # the last two passes without feedback break a rule
    assert pictures[0] == pictures[1]
    for a, b in zip(*(page["traces"] for page in pages), strict=True):
        assert a["name"] == b["name"] and len(a["steps"]) == len(b["steps"]) == 12
        for one, other in zip(sum(a["steps"], []), sum(b["steps"], []), strict=True):
            assert one[0] == other[0] and one[1] == pytest.approx(other[1], abs=2e-3)
