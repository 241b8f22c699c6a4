"""arena.py, arena_text.py: arms are trained, measured, compared. No test depends on a clock."""

import json
import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import arena
import arena_text
import data
import plot
import sudoku
from conftest import ROOT, dying, gen, refused
from launch import append_jsonl, read_jsonl
from mdlm import MDLM
from softmask import SoftMask


def test_each_arm_feeds_back_as_its_name_says():
    """Slerp: sin((1 − λ) θ) / sin θ m + sin(λ θ) / sin θ |m| g / |g|, in float64."""
    close = torch.testing.assert_close
    table, lam = torch.randn(12, 6, generator=gen()), torch.tensor([0.0, 0.3, 1.0])
    ids, pi = torch.randint(11, (3, 2), generator=gen(1)), torch.tensor([[0.7, 0.3]] * 3)
    slerp = arena.ARMS["slerp"][0](11, 2)
    found = slerp.mix(table, lam, ids, pi)
    m, g, share = table[11].double(), (table.double()[ids] * pi[..., None]).sum(1), lam[:, None]
    theta = torch.acos(g @ m / g.norm(dim=1) / m.norm())[:, None]
    side = m.norm() * g / g.norm(dim=1, keepdim=True)
    expected = (((1 - share) * theta).sin() * m + (share * theta).sin() * side) / theta.sin()
    close(found.double(), expected, rtol=1e-5, atol=1e-5)
    dense = torch.zeros(3, 12).scatter(1, ids, pi)
    close(arena.Slerp(11, None).mix(table, lam, None, dense), found)
    assert torch.equal(found[0], table[11])
    table[ids[1]] = 2 * table[11]  # parallel
    same = slerp.mix(table, lam.requires_grad_(), ids, pi)
    same.sum().backward()
    assert lam.grad.isfinite().all()
    close(same[1], table[11])
    constant = SoftMask(11, 2, omega_s=0.3, **arena.ARMS["constant"][1])
    constant.strength(torch.tensor([-math.log(259), 0.0])).sum().backward()
    assert [p.grad.item() for p in constant.parameters()][1:] == [0, 0]
    assert torch.equal(constant.strength(torch.tensor([-5.0])), constant.omega[0][None])


@pytest.fixture
def short(tmp_path, monkeypatch):
    """Runs of ten updates of a tiny model, a file every five, and binary's update is the fastest"""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(arena, "KEEP_EVERY", 5)
    monkeypatch.setattr(arena, "interleaved", lambda arms, *_: {
        arm: {"cpu": 100 if arm == "binary" else 200} for arm in arms})


def test_two_arms_in_ten_updates(short, monkeypatch, capsys):
    """In the time of two binary updates, slerp makes one. A stopped run goes on."""
    monkeypatch.setattr(sudoku, "HELD_OUT", 20)
    for name, value in dict(STEPS=10, PUZZLES=8,
                            SETTINGS=arena.SETTINGS | dict(n_embd=16, n_layer=1)).items():
        monkeypatch.setattr(arena, name, value)
    arena.puzzles.cache_clear()
    sudoku.prepare(sudoku.Data(grids=400))
    cfg = arena.Config(seeds="7,8", arms="binary,slerp")
    with dying(arena.MDLM, "load", 5):
        arena.main(cfg)
    arena.main(cfg)
    first, binary, slerp, *_ = lines = read_jsonl(arena.PATH)
    assert first["seconds"] == {arm: 1 + (arm != "binary") for arm in arena.ARMS}
    assert [(line["arm"], line["seed"], line["in time"]) for line in lines[1:]] == [
        ("binary", 7, 10), ("slerp", 7, 5), ("binary", 8, 10), ("slerp", 8, 5)]
    assert binary["updates"] == binary["time"] == binary["off"]
    bounds = [slerp[name]["bound"] for name in ("updates", "time", "off")]
    assert len(set(bounds)) == 3 and 1 <= slerp["off"]["passes"] <= 24
    assert sum(slerp["puzzles"]) == 8 and len({line["sha256"] for line in lines[1:]}) == 4
    assert {*arena.WAYS} < {*slerp["off"]} and slerp["torch"] == torch.__version__ and slerp["cpu"]
    model = MDLM.load("out/arena/slerp-7/step-5.pt", sm=arena.Slerp)
    assert arena.measure(model) == slerp["time"]
    arena.puzzles.cache_clear()
    refused("no seed with all arms", arena.main, arena.Config(table=True))


def test_text_in_ten_updates(short, monkeypatch, capsys):
    """A continuation starts from binary's last file, also if that was lost. Bytes are counted."""
    small = dict(n_layer=1, n_head=2, n_embd=16, n_cond=8, length=32, batch_size=4, micro_batch=4)
    for name, value in dict(
            ROWS=6, WIDTH=4, PER_PASS=(1, 4), SETTINGS=arena_text.SETTINGS | small,
            ARMS={arm: (kind, 10) for arm, (kind, _) in arena_text.ARMS.items()}).items():
        monkeypatch.setattr(arena_text, name, value)
    monkeypatch.setattr(data, "stdlib_files", data.stdlib_files()[:60].copy)
    arena_text.main(arena_text.Config(seeds="3", arms="binary,sm,slerp,continue-binary"))
    before = torch.load("out/arena_text/binary-3/last.pt")["model"]
    shutil.rmtree("out/arena_text/binary-3")
    arena_text.main(arena_text.Config(seeds="3"))
    after = torch.load("out/arena_text/binary-3/last.pt")["model"]
    assert all(torch.equal(before[name], after[name]) for name in before)
    first, *lines = read_jsonl(arena_text.PATH)
    assert {*first["seconds"]} == {"binary", "sm", "slerp"}
    assert [line["arm"] for line in lines] == [*arena_text.ARMS]
    assert [line["in time"] for line in lines] == [10, 5, 5, 10, 5]
    log = read_jsonl("out/arena_text/continue-sm-3/log.jsonl")
    start = torch.load("out/arena_text/continue-sm-3/last.pt")["config"]
    assert log[-1]["step"] == 10 and start["init_from"] == "out/arena_text/binary-3/last.pt"
    rows, text = arena_text.held_out()
    assert lines[1]["text"] == text and len(lines[1]["off"]["letters"]) == len(rows) == 6
    for hole in arena_text.holes(6, 3).values():
        assert hole.sum(1).tolist() == 6 * [4] and not hole[:, [0, -1]].any()
    hole = arena_text.holes(6, 3)["span"]
    assert all(row.nonzero().flatten().diff().eq(1).all() for row in hole)
    assert not torch.equal(hole, arena_text.holes(6, 4)["span"])
    # Half of the bytes of three rows are wrong.
    model = MDLM.load("out/arena_text/sm-3/last.pt")
    monkeypatch.setattr(arena_text, "decode", lambda model, x, *_: oracle(x, rows))
    found = arena_text.measure(model, 3)
    assert found["span, 1"] == [3 * 4 + 3 * 2, 3] == found["random, 4"]
    assert found["letters"] == "ececec"
    line = read_jsonl(arena_text.PATH)[-1] | {"seed": 4, "text": {"train": "", "val": ""}}
    append_jsonl(arena_text.PATH, line)
    refused("other settings: text", arena_text.main, arena_text.Config(seeds="3"))


def oracle(x, rows):
    """x with all masks of even rows filled as in rows, and only two of odd ones, the rest wrong"""
    x = x.clone()
    for i, row in enumerate(x):
        places = (row == 258).nonzero().flatten()
        row[places] = rows[i, places]
        row[places[2 if i % 2 else 4:]] = 300
    return x


# Student's t of printed tables, two-sided: {degrees of freedom: {p: t}}
STUDENT = {1: {0.5: 1.000, 0.1: 6.314, 0.05: 12.706, 0.01: 63.657},
           2: {0.5: 0.816, 0.1: 2.920, 0.05: 4.303, 0.01: 9.925},
           3: {0.5: 0.765, 0.1: 2.353, 0.05: 3.182, 0.01: 5.841},
           4: {0.5: 0.741, 0.1: 2.132, 0.05: 2.776, 0.01: 4.604},
           5: {0.5: 0.727, 0.1: 2.015, 0.05: 2.571, 0.01: 4.032, 0.001: 6.869},
           8: {0.5: 0.706, 0.1: 1.860, 0.05: 2.306, 0.01: 3.355, 0.001: 5.041},
           11: {0.5: 0.697, 0.1: 1.796, 0.05: 2.201, 0.01: 3.106, 0.001: 4.437},
           30: {0.5: 0.683, 0.1: 1.697, 0.05: 2.042, 0.01: 2.750, 0.001: 3.646},
           120: {0.5: 0.677, 0.1: 1.658, 0.05: 1.980, 0.01: 2.617, 0.001: 3.373}}


def with_t(t, n, scale=1.0):
    """n differences with this t"""
    x = torch.randn(n, generator=gen(n), dtype=torch.float64)
    x = (x - x.mean()) / x.std() + t / n**0.5
    return (scale * x).tolist()


def test_p_values_are_those_of_a_printed_table():
    for df, column in STUDENT.items():
        for p, t in column.items():
            for scale in 1.0, -7.0:
                found = plot.p_value(with_t(t, df + 1, scale))
                assert found == pytest.approx(p, rel=0.006), (df, p)
    assert plot.p_value([1.0, -1.0, 0.0]) == 1 and plot.p_value([2.0, 2.0, 2.0]) < 1e-9


def test_holm_corrects_for_the_comparisons_of_a_column():
    t = STUDENT[11]
    gaps = {"a": with_t(t[0.1], 12), "b": with_t(t[0.001], 12), "c": with_t(t[0.01], 12),
            "d": with_t(-t[0.01], 12), "e": with_t(t[0.5], 12)}
    expected = {"a": 0.2, "b": 0.005, "c": 0.04, "d": 0.04, "e": 0.5}  # 5, 4, 4, 2, 1 times
    assert plot.holm(gaps) == {arm: pytest.approx(p, rel=0.006) for arm, p in expected.items()}
    clear = plot.clear_from(gaps["a"], 5)  # t of 11 degrees at 0.01, for a deviation of 1
    assert clear == pytest.approx(t[0.01] / 12**0.5, rel=0.001)
    pairs = {arm: (x, 12 * [0.0]) for arm, x in gaps.items()}
    assert plot.against(pairs, 12)["d"] == f"{-t[0.01] / 12**0.5:+.1f} (p = 0.04, clear from 0.9)"
    assert plot.against(pairs, 13)["d"] == "-0.9"


def fake_line(arm, seed, solved, **others):
    """Solved puzzles at 2 per pass of 100 with one solution, 200 with 2 to 6, and 700 with more"""
    ways = dict.fromkeys(arena.WAYS, [10, 20, 70]) | {"passes": 6.0, "bound": 20.0}
    line = {"arm": arm, "seed": seed, "puzzles": [100, 200, 700], "in time": 250}
    for name in "updates", "time", "off":
        line[name] = ways | {"2, even": [solved, 0, 0], "2, odd": [91, 2 * solved, 0]}
    return line | others


def test_the_tables(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    append_jsonl(arena.PATH, {"seconds": {}})
    for seed in reversed(arena.SEEDS):
        for i, arm in enumerate(arena.ARMS):
            solved = 40 + 2 * i + seed % 3 + (arm == "deep") * (seed % 2)
            append_jsonl(arena.PATH, fake_line(arm, seed, solved))
    append_jsonl(arena.PATH, fake_line("sm", 99, 0))
    arena.main(arena.Config(table=True))
    solutions, secondary, primary, *full = capsys.readouterr().out.strip().split("\n\n")
    lines = solutions.splitlines()
    assert lines[0] == "|  | all (n = 1000) | 1 (n = 100) | 2–6 (n = 200) | 7+ (n = 700) |"
    assert lines[3].startswith("| 2, even | 4 / 4 / 4 | 43 / 43 / 41 |")
    assert "| sm, 12 passes | 4.3 ± 0.1 | 4.3 ± 0.1 |" in secondary
    assert "| sm, 12 − binary, 24 | -5.7 (p = " in secondary
    # (solved / 1000 + (91 + 2 solved) / 1000) / 2 for 43 solved on average
    assert "| sm | 11.0 ± 0.1 |  | 11.0 ± 0.1 |  |" in primary
    row = next(line for line in primary.splitlines() if line.startswith("| deep"))
    assert row.count("+1.3 (p = ") == 2
    assert len(full) == 2 and "| p ≥ 0.9 | 10.0 ± 0.0 | 10.0 ± 0.0 |" in full[0]
    assert "| p ≥ 0.9 | 10.0 / 10.0 | 10.0 / 10.0 |" in full[1]
    assert max(line.count("|") for line in full[0].splitlines()) == 8


def test_the_tables_of_text(tmp_path, monkeypatch, capsys):
    """Binary has 12 or 13 of 24 bytes right, in turn, and sm always 13."""
    monkeypatch.chdir(tmp_path)
    rows = 8
    for seed in arena_text.SEEDS[:2]:
        for arm in arena_text.ARMS:
            letters = rows // 2 * ("nn" if arm.endswith("sm") else "mn")
            right = sum(ord(c) - ord("a") for c in letters)
            ways = {f"{kind}, {n}": [right, 1] for kind in ("random", "span")
                    for n in arena_text.PER_PASS}
            found = ways | {"letters": letters, "bound": 1.5}
            append_jsonl(arena_text.PATH, {"arm": arm, "seed": seed, "rows": rows, "in time": 250}
                         | dict.fromkeys(("updates", "time", "off"), found))
    arena_text.main(arena_text.Config(table=True))
    primary, *full = capsys.readouterr().out.strip().split("\n\n")
    # The difference is 100 / 24 points in every other row.
    error = 100 / 24 * (0.25 * 8 / 7) ** 0.5 / 8**0.5
    assert f"| binary | 52.1 ± 0.0 | -2.1; ± {error:.1f} over rows | 52.1 ± 0.0 |" in primary
    assert "| sm | 54.2 ± 0.0 |  | 54.2 ± 0.0 |  |" in primary and len(full) == 6
    assert "| slerp | 52.1 ± 0.0 |" in full[0] and "| 12.50 | 1.500 |" in full[0]


def test_the_result_file_itself_does_not_make_the_code_dirty(tmp_path, monkeypatch):
    """Of a repository with one script and one result"""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    (tmp_path / "launch.py").write_text("")
    (tmp_path / "lines.jsonl").write_text("1")
    for words in ["init", "-q"], ["add", "."], ["commit", "-qm", "x"]:
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(arena.launch, "__file__", str(tmp_path / "launch.py"))
    (tmp_path / "lines.jsonl").write_text("2")
    assert arena.provenance("lines.jsonl")["git"]["dirty"] is False
    (tmp_path / "launch.py").write_text("2")
    assert arena.provenance("lines.jsonl")["git"]["dirty"] is True
    assert json.dumps(arena.provenance("lines.jsonl"))


def test_the_pages_have_the_tables_that_the_command_prints(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    arena.main(arena.Config(table=True))
    tables = capsys.readouterr().out.strip().split("\n\n")
    page = Path("results/README.md").read_text("utf-8")
    assert len(tables) == 5 and all(table in page for table in tables)
    runs = arena.complete(arena.PATH, arena.ARMS)

    def cells(arm, name):
        ways = "1", "2, even", "2, odd", "3"
        return [f"{arena.mean(arena.values(runs[arm], name, way)):.0f}" for way in ways]
    both = [f"{x} ({y})" for x, y in zip(cells("sm", "updates"), cells("sm", "time"))]
    for row in both, cells("sm", "off"), cells("binary", "updates"):
        assert f" | {' | '.join(row)} |\n" in Path("README.md").read_text("utf-8")
