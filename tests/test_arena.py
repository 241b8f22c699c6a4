"""arena.py: two arms are trained, measured and compared. No test depends on a clock."""

import json
import math

import pytest
import torch

import arena
import sudoku
from conftest import dying, gen
from launch import read_jsonl
from softmask import SoftMask


def test_slerp_turns_the_mask_towards_the_mean():
    """Against the formula sin((1 − λ) θ) / sin θ m + sin(λ θ) / sin θ |m| g / |g| in float64."""
    table = torch.randn(12, 6, generator=gen())
    lam, ids = torch.tensor([0.0, 0.3, 1.0]), torch.randint(11, (3, 2), generator=gen(1))
    pi = torch.tensor([[0.7, 0.3]] * 3)
    sm = arena.Slerp(11, 2)
    found = sm.mix(table, lam, ids, pi)
    assert torch.equal(found[0], table[11])
    m, g = table[11].double(), (table.double()[ids] * pi[..., None].double()).sum(1)
    theta = torch.acos(g @ m / g.norm(dim=1) / m.norm())[:, None]
    share = lam.double()[:, None]
    expected = (((1 - share) * theta).sin() * m
                + (share * theta).sin() * m.norm() * g / g.norm(dim=1, keepdim=True)) / theta.sin()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    dense = torch.zeros(3, 12).scatter(1, ids, pi)
    torch.testing.assert_close(arena.Slerp(11, None).mix(table, lam, None, dense), found)
    table[ids[1]] = 2 * table[11]  # parallel
    raw = torch.tensor([0.4] * 3, requires_grad=True)
    same = sm.mix(table, raw, ids, pi)
    same.sum().backward()
    assert raw.grad.isfinite().all()
    torch.testing.assert_close(same[1], table[11])


def test_two_arms_in_ten_updates(tmp_path, monkeypatch, capsys):
    """In the time of two binary updates, slerp makes one. A stopped run goes on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(arena.mdlm, "SoftMask", SoftMask)  # put back at the end
    for name, value in dict(STEPS=10, KEEP_EVERY=5, PUZZLES=4).items():
        monkeypatch.setattr(arena, name, value)
    monkeypatch.setattr(sudoku, "HELD_OUT", 20)
    monkeypatch.setattr(arena, "SETTINGS", arena.SETTINGS | dict(n_embd=16, n_layer=1))
    sudoku.prepare(sudoku.Data(grids=400))
    cfg = arena.Config(seeds="7", arms="binary,slerp")
    with pytest.raises(Exception, match="no CPU times"):
        arena.main(cfg)
    cases = []
    monkeypatch.setattr(arena, "interleaved", lambda found, *_: cases.append(found) or {
        arm: {"cpu": 100.0 + 100 * (arm == "slerp")} for arm in found})
    arena.main(arena.Config("time"))
    assert [*cases[0]] == [*arena.ARMS]
    with dying(arena, "measure", 5):
        arena.main(cfg)
    arena.main(cfg)
    cpu, binary, slerp = read_jsonl(arena.PATH)
    assert cpu["cpu"]["slerp"] == 2 and (binary["arm"], slerp["arm"]) == ("binary", "slerp")
    assert (binary["in time"], slerp["in time"]) == (10, 5)
    assert binary["updates"] == binary["time"] == binary["off"]
    bounds = [slerp[name]["bound"] for name in ("updates", "time", "off")]
    assert len(set(bounds)) == 3 and 1 <= slerp["off"]["calls"] <= 24
    capsys.readouterr()
    arena.main(arena.Config("table"))
    assert capsys.readouterr().out.count("\n") == 4


def test_each_arm_feeds_back_as_its_name_says():
    table, lam = torch.randn(5, 4, generator=gen()), torch.tensor([0.25])
    ids, pi = torch.tensor([[2]]), torch.ones(1, 1)
    found = arena.ARMS["additive"][0](4, 1).mix(table, lam, ids, pi)
    torch.testing.assert_close(found[0], table[4] + table[2] / 4)
    constant = arena.ARMS["constant"][0](4, 1, omega_s=0.3).strength(torch.tensor([-2.0, 0.0]))
    torch.testing.assert_close(constant, torch.full((2,), 0.3))
    assert [kind for kind, _ in arena.ARMS.values()].count(SoftMask) == 5


def test_the_table_says_what_a_second_computation_finds(tmp_path, monkeypatch, capsys):
    """p by integrating Student's density; Holm's correction by its definition."""
    monkeypatch.chdir(tmp_path)
    arms = [arm for arm in arena.ARMS if arm != "deep"]  # one has not run yet
    draws = torch.randn(len(arms), 6, generator=gen()).double()
    solved = 50 + 5 * draws + 3 * torch.arange(len(arms))[:, None]
    with open(tmp_path / "lines", "w") as f:
        for arm, values in zip(arms, solved.tolist()):
            for seed, value in enumerate(values):
                ways = dict.fromkeys((*arena.WAYS, "calls", "bound"), 9.0) | {"2": value}
                line = {"arm": arm, "seed": seed, "updates": ways, "time": ways | {"2": 1 + seed},
                        "off": ways | {"2": 1.0}}
                f.write(json.dumps(line) + "\n")
    monkeypatch.setattr(arena, "PATH", str(tmp_path / "lines"))
    arena.main(arena.Config("table"))
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split(" | ")[0].strip("| "): line.split(" | ")[1:] for line in lines[2:]}
    assert len(rows) == 7 and rows["slerp"][1:3] == ["3.5 ± 1.9 (+0.0, p = 1)", "1.0 ± 0.0"]
    x = torch.linspace(0, 400, 800_001, dtype=torch.float64)
    density = 8 / (3 * math.pi * math.sqrt(5)) * (1 + x * x / 5) ** -3
    p = {}
    for arm, values in zip(arms, solved):
        gaps = values - solved[1]
        t = (gaps.mean() / gaps.std() * math.sqrt(6)).abs()
        p[arm] = 2 * torch.trapezoid(density[x >= t], x[x >= t]).item()
    p.pop("sm")
    assert rows["sm"][0] == f"{solved[1].mean():.1f} ± {solved[1].std():.1f}"
    for arm, own in p.items():
        corrected = max(min(1.0, (7 - sum(q < other for q in p.values())) * other)
                        for other in p.values() if other <= own)
        gap = (solved[arms.index(arm)] - solved[1]).mean()
        cell, shown = rows[arm][0].split(" (")[1][:-1].split(", p = ")
        assert cell == f"{gap:+.1f}" and float(shown) == pytest.approx(corrected, rel=0.06)
