"""More of test_compiled.py, in some minutes: `python -m pytest tests/slow_compiled.py`."""

import shutil

import pytest

from test_compiled import both, compare, prepare

ABLATION = 64, {"k": None, "two_updates": True}, ["--micro_batch=4", "--k=none", "--two_updates"]


@pytest.mark.parametrize("length, fields, flags", [
    (3, {}, ["--micro_batch=1", "--batch_size=4"]),  # 0 to 3 masks, not equally many on both ranks
    ABLATION], ids=["three tokens", "two updates"])
def test_two_compiled_ranks_equal_one_eager_process(length, fields, flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare(length, **fields)
    eager, ranks, counts = both("aot_eager", length, *flags, "--dropout=0")
    compare(eager, ranks)
    for found in counts:
        assert found["graphs"] <= 4 and found["breaks"] == 0, counts


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++: would check what Inductor makes")
def test_two_ranks_by_inductor_equal_one_eager_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare(length=64)
    eager, ranks, counts = both("inductor", 64, "--micro_batch=4", "--dropout=0")
    compare(eager, ranks)
    assert all(found == {"graphs": 4, "breaks": 0} for found in counts)
