"""arena.py: two arms are trained, measured and compared. No test depends on a clock."""

import math

import torch

import arena
import sudoku
from conftest import ROOT, dying, gen
from launch import read_jsonl
from softmask import SoftMask
from test_readme import page


def test_each_arm_feeds_back_as_its_name_says():
    """Slerp: sin((1 − λ) θ) / sin θ m + sin(λ θ) / sin θ |m| g / |g|, in float64."""
    close = torch.testing.assert_close
    table, lam = torch.randn(12, 6, generator=gen()), torch.tensor([0.0, 0.3, 1.0])
    ids, pi = torch.randint(11, (3, 2), generator=gen(1)), torch.tensor([[0.7, 0.3]] * 3)
    slerp, additive = (kind(11, 2) for kind, _ in arena.ARMS.values() if kind is not SoftMask)
    found, added = (sm.mix(table, lam, ids, pi) for sm in (slerp, additive))
    m, g, share = table[11].double(), (table.double()[ids] * pi[..., None]).sum(1), lam[:, None]
    theta = torch.acos(g @ m / g.norm(dim=1) / m.norm())[:, None]
    side = m.norm() * g / g.norm(dim=1, keepdim=True)
    expected = (((1 - share) * theta).sin() * m + (share * theta).sin() * side) / theta.sin()
    close(found.double(), expected, rtol=1e-5, atol=1e-5)
    close(added.double(), m + share * g, rtol=1e-5, atol=1e-5)
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


def test_two_arms_in_ten_updates(tmp_path, monkeypatch, capsys):
    """In the time of two binary updates, slerp makes one. A stopped run goes on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sudoku, "HELD_OUT", 20)
    for name, value in dict(
            STEPS=10, KEEP_EVERY=5, PUZZLES=4, SETTINGS=arena.SETTINGS | dict(n_embd=16, n_layer=1),
            interleaved=lambda arms, *_: {a: {"cpu": 100 << (a == "slerp")} for a in arms}).items():
        monkeypatch.setattr(arena, name, value)
    sudoku.prepare(sudoku.Data(grids=400))
    cfg = arena.Config(seeds="7", arms="binary,slerp")
    with dying(arena.MDLM, "load", 5):
        arena.main(cfg)
    arena.main(cfg)
    cpu, binary, slerp = read_jsonl(arena.PATH)
    assert cpu["cpu"] == {arm: 1 + (arm == "slerp") for arm in arena.ARMS}
    assert [line[key] for line in (binary, slerp) for key in ("arm", "in time")] == [
        "binary", 10, "slerp", 5]
    assert binary["updates"] == binary["time"] == binary["off"]
    bounds = [slerp[name]["bound"] for name in ("updates", "time", "off")]
    assert len(set(bounds)) == 3 and 1 <= slerp["off"]["calls"] <= 24
    capsys.readouterr()
    arena.main(arena.Config(table=True))
    assert capsys.readouterr().out.count("\n") == 4


def test_p_values_are_students_and_holms():
    """The t of a printed table, for 5 degrees of freedom at p = 0.1, 0.001, 0.01, 0.5, …"""
    t = {"binary": 2.0150, "slerp": 6.8688, "constant": -4.0321, "additive": 0.7267,
         "always": 4.0321, "frozen": 1.4759, "deep": 2.5706, "sm": 0}
    others, runs = dict.fromkeys((*arena.WAYS, "calls", "bound"), 9.0), {}
    for arm, its in t.items():
        values = [50 + seed**2 + (its / 5**0.5 + (-1)**seed) * (arm != "sm") for seed in range(6)]
        runs[arm] = {seed: {"updates": others | {"2": values[seed]}, "time": others, "off": others}
                     for seed in range(6)}
    runs["sm"] = dict(reversed(runs["sm"].items()))  # pairs are of the same seed
    rows = dict(line[2:-2].split(" | ", 1) for line in arena.table(runs).splitlines()[2:])
    assert rows["sm"].startswith("59.2 ± 9.7 | 9.0 ± 0.0 | 9.0")
    for arm, p in ("binary", 0.3), ("slerp", 0.007), ("constant", 0.06), ("additive", 0.5), (
            "always", 0.06), ("frozen", 0.4), ("deep", 0.2):
        end = f" ({t[arm] / 5**0.5:+.1f}, p = {p}) | 9.0 ± 0.0 (+0.0, p = 1) | 9.0 ± 0.0"
        assert end in rows[arm], arm
    del runs["deep"][0], runs["always"]
    assert arena.table(runs).count("p =") == 10


def test_the_page_shows_the_table(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    arena.main(arena.Config(table=True))
    assert "\n\n" + capsys.readouterr().out + "\n" in page("results/README.md")
