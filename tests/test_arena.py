"""arena.py, arena_text.py: arms are trained, measured, compared. No test depends on a clock."""

import math
from pathlib import Path

import pytest
import torch

import arena
import arena_text
import data
import plot
import sudoku
from conftest import ROOT, dying, gen
from launch import append_jsonl, read_jsonl
from mdlm import MDLM
from softmask import SoftMask


def test_each_arm_feeds_back_as_its_name_says():
    """Slerp: sin((1 − λ) θ) / sin θ m + sin(λ θ) / sin θ |m| g / |g|, in float64."""
    table, lam = torch.randn(12, 6, generator=gen()), torch.tensor([0.0, 0.3, 1.0])
    ids, pi = torch.randint(11, (3, 2), generator=gen(1)), torch.tensor([[0.7, 0.3]] * 3)
    slerp = arena.ARMS["slerp"][0](11, 2)
    found = slerp.mix(table, lam, ids, pi)
    m, g, share = table[11].double(), (table.double()[ids] * pi[..., None]).sum(1), lam[:, None]
    theta = torch.acos(g @ m / g.norm(dim=1) / m.norm())[:, None]
    side = m.norm() * g / g.norm(dim=1, keepdim=True)
    expected = (((1 - share) * theta).sin() * m + (share * theta).sin() * side) / theta.sin()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    table[ids[1]] = 2 * table[11]  # parallel
    same = slerp.mix(table, lam.requires_grad_(), ids, pi)
    torch.testing.assert_close(same[1], table[11])
    assert torch.autograd.grad(same.sum(), lam)[0].isfinite().all()
    constant = SoftMask(11, 2, omega_s=0.3, **arena.ARMS["constant"][1])
    assert torch.equal(constant.strength(torch.tensor([-math.log(259)])), constant.omega[0][None])


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
    changed = {"STEPS": 10, "PUZZLES": 8, "SETTINGS": arena.SETTINGS | dict(n_embd=16, n_layer=1),
               "puzzles": arena.puzzles.__wrapped__}  # without its cache
    for name, value in changed.items():
        monkeypatch.setattr(arena, name, value)
    sudoku.prepare(sudoku.Data(grids=400))
    cfg = arena.Config(seeds="7,8", arms="binary,slerp")
    with dying(arena.MDLM, "load", 5):
        arena.main(cfg)
    arena.main(cfg)
    _, *lines = read_jsonl(arena.PATH)
    assert [(line["arm"], line["seed"], line["in time"]) for line in lines] == [
        ("binary", 7, 10), ("slerp", 7, 5), ("binary", 8, 10), ("slerp", 8, 5)]
    binary, slerp = lines[:2]
    assert binary["updates"] == binary["time"] == binary["off"]
    assert len({slerp[name]["bound"] for name in ("updates", "time", "off")}) == 3
    model = MDLM.load("out/arena/slerp-7/step-5.pt", sm_class=arena.Slerp)
    assert arena.measure(model) == slerp["time"] and {*arena.WAYS} < {*slerp["time"]}
    ways = {"2, even": [2, 3, 1], "2, odd": [1, 1, 1], "1": [2, 4, 2]}
    for arm in arena.ARMS:
        deep = {"2, even": [2, 1, 2]} if arm == "deep" else {}
        append_jsonl(arena.PATH, slerp | {"arm": arm, "puzzles": [2, 4, 4],
                                          "updates": slerp["updates"] | ways | deep})
    arena.main(arena.Config(table=True))
    printed = capsys.readouterr().out
    for row in ("| all | 10 | 60 | 0 | 60 | 50 | 80 | 0 |",
                "| 7+ | 4 | 25 | 0 | 25 | 50 | 50 | 0 |",
                "| sm in 12 − binary in 24 | -20.0 |", "| sm | 45.0 |  |",
                "| slerp | 45.0 | 0.0 |", "| deep | 40.0 | +5.0 |"):
        assert row in printed


def test_text_in_ten_updates(short, monkeypatch, capsys):
    """A continuation starts from binary's last file, also if that was lost. Bytes are counted."""
    small = dict(n_layer=1, n_head=2, n_embd=16, n_cond=8, length=32, batch_size=4, micro_batch=4)
    changed = {"ROWS": 6, "WIDTH": 4, "PER_PASS": (1, 4),
               "SETTINGS": arena_text.SETTINGS | small,
               "ARMS": {arm: (kind, 10) for arm, (kind, _) in arena_text.ARMS.items()}}
    for name, value in changed.items():
        monkeypatch.setattr(arena_text, name, value)
    monkeypatch.setattr(data, "stdlib_files", data.stdlib_files()[:60].copy)
    arena_text.main(arena_text.Config(seeds="3", arms="continue-sm"))
    _, line = read_jsonl(arena_text.PATH)
    start = torch.load("out/arena_text/continue-sm-3/last.pt")["config"]
    assert (line["in time"], start["init_from"]) == (5, "out/arena_text/binary-3/last.pt")
    rows, _ = arena_text.held_out()

    def half_right(model, x, *_):  # half of the bytes of three rows are wrong
        wrong = (x == 258) & ((x == 258).cumsum(1) > 2) & (torch.arange(6) % 2 == 1)[:, None]
        return rows.masked_fill(wrong, 300)
    monkeypatch.setattr(arena_text, "decode", half_right)
    found = arena_text.measure(MDLM.load("out/arena_text/binary-3/last.pt"), 3)
    assert found["span, 1"] == [3 * 4 + 3 * 2, 3] == found["random, 4"]
    for arm in arena_text.ARMS:
        ways = line["updates"] | {"letters": "ececec" if arm == "sm" else 6 * "e"}
        ways |= {"span, 4": [6, 0], "random, 4": [12, 0]}
        bound = line["time"]["bound"] + (0.5 if arm == "sm" else 0)
        append_jsonl(arena_text.PATH, line | {
            "arm": arm, "updates": ways, "time": ways | {"bound": bound}})
    arena_text.main(arena_text.Config(table=True))
    printed = capsys.readouterr().out
    bound = line["time"]["bound"]
    assert f"| sm | 50.0 |  | 50.0 |  | 25.0 | {bound + 0.5:.3f} |  |" in printed
    assert f" | 25.0 | {bound:.3f} | 0.500 |" in printed
    assert f"at most {50 * (0.25 / 5) ** 0.5:.2f}" in printed  # 50 points in every other row


# Student's t of printed tables, two-sided: {degrees of freedom: {p: t}}
STUDENT = {1: {0.5: 1.000, 0.1: 6.314, 0.05: 12.706, 0.01: 63.657},
           2: {0.5: 0.816, 0.1: 2.920, 0.05: 4.303, 0.01: 9.925},
           3: {0.5: 0.765, 0.1: 2.353, 0.05: 3.182, 0.01: 5.841},
           4: {0.5: 0.741, 0.1: 2.132, 0.05: 2.776, 0.01: 4.604},
           11: {0.5: 0.697, 0.1: 1.796, 0.05: 2.201, 0.01: 3.106, 0.001: 4.437}}


def with_t(t, n):
    """n differences with this t"""
    x = torch.randn(n, generator=gen(n), dtype=torch.float64)
    return ((x - x.mean()) / x.std() + t / n**0.5).tolist()


def test_p_values_are_those_of_a_printed_table():
    for df, column in STUDENT.items():
        for p, t in column.items():
            found = [plot.p_value(with_t(sign * t, df + 1)) for sign in (1, -1)]
            assert found == pytest.approx([p, p], rel=0.006), (df, p)
    assert plot.p_value([1.0, -1.0, 0.0]) == 1 and plot.p_value([2.0, 2.0, 2.0]) < 1e-9


def test_holm_corrects_for_the_comparisons_of_a_column():
    t = STUDENT[11]
    gaps = {"a": with_t(t[0.1], 12), "b": with_t(t[0.001], 12), "c": with_t(t[0.01], 12),
            "d": with_t(-t[0.01], 12), "e": with_t(t[0.5], 12)}
    expected = {"a": 0.2, "b": 0.005, "c": 0.04, "d": 0.04, "e": 0.5}  # 5, 4, 4, 2, 1 times
    assert plot.holm(gaps) == {arm: pytest.approx(p, rel=0.006) for arm, p in expected.items()}
    pairs = {arm: (x, 12 * [0.0]) for arm, x in gaps.items()}
    # Five tests: p of 0.01 is clear, and its mean difference is that of t for a deviation of 1.
    assert plot.against(pairs, 12)["d"] == f"{-t[0.01] / 12**0.5:+.1f} (p = 0.04, clear from 0.9)"
    assert plot.against(pairs, 13)["d"] == "-0.9"


def test_the_pages_have_the_tables_that_the_command_prints(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    tables = []
    for lab in arena, arena_text:
        lab.main(lab.Config(table=True))
        tables += capsys.readouterr().out.strip().split("\n\n")
    page = Path("results/README.md").read_text("utf-8")
    del tables[4]  # all measures of the other rules: there is no room on the page
    assert len(tables) == 6 and all(table in page for table in tables)
    runs = arena.complete(arena.PATH, arena.ARMS)

    def cells(arm, name):
        ways = "1", "2, even", "2, odd", "3"
        return [f"{arena.mean(arena.values(runs[arm], name, way)):.0f}" for way in ways]
    sides = [("sm", "updates"), ("sm", "time"), ("sm", "off"), ("deep", "updates"),
             ("binary", "updates")]
    rows = [f" | {' | '.join(cells(*side))} |\n" for side in sides]
    assert all(row in Path("README.md").read_text("utf-8") for row in rows)

    def score(arm, name, way, group="all"):
        return arena.mean(arena.values(runs[arm], name, way, group))

    def solved(arm, name, way, group="all"):
        return f"{score(arm, name, way, group):.0f}%"
    ahead = [f"{score('sm', 'updates', way) - score('sm', 'off', way):.0f}"
             for way in ("2, odd", "2, even")]
    tested = [f"{score(*side, '2'):.0f}%" for side in (*sides[:2], sides[4])]
    assert f"{tested[1]} against {tested[2]} in equal" in Path("README.md").read_text("utf-8")
    grown = {way: [] for way in ("2, even", "2, odd")}  # feedback's gain, with 1, 2–6, 7+ solutions
    for way, gains in grown.items():
        for group in ("1", "2–6", "7+"):
            more, less = ([score("sm", side, which, group) for side in ("updates", "off")]
                          for which in (way, "1"))
            gains.append(f"{more[0] - more[1] - less[0] + less[1]:.0f}")
    sm, off, deep = (solved(*side, "random order") for side in sides[:1] + sides[2:4])
    quick = [solved(*side, "p ≥ 0.9") for side in sides[:1] + sides[2:] + sides[1:2]]
    passes = [f"{score(*side, 'passes'):.1f}" for side in sides[:1] + sides[2:]]
    text = arena.complete(arena_text.PATH, [*arena_text.ARMS])

    def right(way):
        return f"{arena.mean(arena_text.values(text['binary'], 'updates', way)):.1f}%"

    def by_feedback(arm, way):
        on, off = (arena_text.values(text[arm], name, way) for name in ("updates", "off"))
        return f"{arena.mean(on) - arena.mean(off):.1f}"
    costs = [by_feedback(arm, way) for arm in ("sm", "continue-sm")
             for way in ("random, 4", "random, 1")]
    gaps = [x - y for x, y in zip(*(arena_text.values(text[arm], "time", "random, 4")
                                    for arm in ("sm", "binary")), strict=True)]

    ends = [arena.mean(arena_text.values(text[arm], "updates", "span, 4"))
            for arm in ("continue-sm", "continue-binary")]
    spans = ends[0] - ends[1]
    ends = [arena.mean(arena_text.values(text[arm], "time", "random, 24"))
            for arm in ("continue-sm", "continue-binary")]
    behind = ends[1] - ends[0]

    def change(arm, base):
        found = arena.mean(one["time"]["bound"] - other["time"]["bound"]
                           for one, other in zip(text[arm], text[base], strict=True))
        return found
    changes = (f"lower by {-change('continue-sm', 'continue-binary'):.3f} nats per byte, and "
               f"higher by {change('sm', 'binary'):.3f} from scratch")
    assert changes in " ".join(Path("README.md").read_text("utf-8").split())
    for words in (  # numbers in sentences that are in no table
            "sm solves {}, *off* {}, deep {}".format(
                *(solved(*side, "3", "1") for side in sides[:1] + sides[2:4])),
            f"sm {sm}, *off* {off}, deep {deep}",
            "grows {1} to {2} points with several solutions, {0} with one. (To 1, 2, …, 2, 1: "
            "{4} to {5}, {3})".format(*sum(grown.values(), [])),
            f"and is {behind:.1f} points behind in equal time",
            "solves {} of the Sudokus in equal updates, {} in equal time, and one trained without "
            "it {} (both".format(*tested),
            f"{ahead[0]} points behind sm, not {ahead[1]}",
            f"sm solves {quick[0]} in {passes[0]} passes ({quick[4]} in equal time), *off* "
            f"{quick[1]} in {passes[1]}, deep {quick[2]} in {passes[2]}, and binary {quick[3]} in "
            f"{passes[3]}",
            f"{right('random, 1')} right at one per pass, {right('random, 24')} at 24",
            "costs sm {} points at four bytes per pass, {} at one (continue-sm: {}, "
            "{})".format(*costs),
            f"sm is ahead by {min(gaps):.1f} to {max(gaps):+.1f} points".replace("-", "−"),
            f"(in spans, {spans:.1f})"):
        assert words in " ".join(page.split())
