"""data.py: the published row layout, the tokenizers, and how a corpus is prepared."""

import gzip
import hashlib
import itertools
import json
import lzma
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import data
from conftest import GOLDEN, configure, dying, refused
from data import Config, main, open_split, prepare
from launch import Refused, read_json

BYTES = data.tokenizer("bytes")
TEXTS = ["It was a dark night\r\n", "", "Zoë said: “no”.", "x" * 300, "the end\n\r\n"]


def prepared(folder, texts=TEXTS, val_docs=2):
    prepare(texts, folder, BYTES, val_docs)
    return folder


def jsonl(texts, field="text"):
    return b"".join(json.dumps({"id": "x", field: text}).encode() + b"\n" for text in texts)


def ids_of(texts):
    """The ids of the texts in the files: bytes, with EOS after each text that is not empty."""
    return list(itertools.chain(*(list(text.encode()) + [257] for text in texts if text)))


def test_rows_are_the_recorded_blocks():
    """BOS + L − 2 tokens + EOS. The authors' code cut the same ids into the same blocks."""
    golden = read_json(os.path.join(GOLDEN, "language_misc.json"))["packing"]
    ids = np.array(list(itertools.chain(*golden["docs"])), np.uint16)
    tokens = data.Tokens(ids, {"bos": golden["bos"], "eos": golden["eos"]}, "val.bin")
    L, blocks = golden["block_size"], golden["blocks"]
    assert data.n_rows(tokens, L) == len(blocks)
    assert data.rows(tokens, range(len(blocks)), L).tolist() == blocks
    assert data.rows(tokens, torch.tensor([4, 0]), L).tolist() == [blocks[4], blocks[0]]
    assert data.rows(tokens, [1], L).dtype == torch.int64


def test_gpt2_tokenizer_is_the_published_one():
    try:
        tok = data.tokenizer("gpt2", os.environ.get("GPT2_DIR"))
    except (Refused, ImportError):  # tiktoken downloads it with requests
        pytest.skip("needs GPT-2's vocabulary in tiktoken's cache or $GPT2_DIR: would check ids")
    ids = tok.encode_ordinary("Hello world,  don't\n\n stop")
    assert ids == [15496, 995, 11, 220, 836, 470, 628, 2245]
    assert data.describe(tok) == {"name": "gpt2", "vocab_size": 50258, "mask_id": 50257,
                                  "bos": 50256, "eos": 50256}


def test_eos_after_every_document_and_the_last_ones_held_out(tmp_path):
    prepared(tmp_path)
    for split, texts in ("train", TEXTS[:3]), ("val", TEXTS[3:]):
        tokens, meta = open_split(tmp_path, split)
        assert tokens.ids.tolist() == ids_of(texts)
        sha256 = hashlib.sha256((tmp_path / f"{split}.bin").read_bytes()).hexdigest()
        assert meta[split] == {"documents": len([*filter(None, texts)]), "tokens": len(tokens.ids),
                               "bytes": sum(len(t.encode()) for t in texts), "sha256": sha256}
        assert meta["tokenizer"] == tokens.tokenizer == data.describe(BYTES)


@pytest.mark.parametrize("sizes, whole, tokens", [
    ([1000], 0, 100), ([9] * 464, 46, 464), ([9, 9_000, 9], 1, 902),  # a tenth: one is cut
    ([3] * 170_000, 16_384, 65_536), ([99_999] * 464, 4, 400_000),    # 65,536 tokens; 1 %
    ([9] * 1_010_000, 10_000, 100_000)])                              # at most 10,000 documents
def test_enough_is_held_out_but_at_most_a_tenth(tmp_path, capsys, sizes, whole, tokens):
    """sizes: bytes of the documents. Each has an EOS, too."""
    assert data.held_out([size + 1 for size in sizes]) == (whole, tokens)
    if sum(sizes) < 1e5:  # all bytes are counted once, also those of a document that is cut
        meta = prepare(["é" * (size // 2) + "x" * (size % 2) for size in sizes], tmp_path, BYTES)
        for split, n in ("train", sum(sizes) + len(sizes) - tokens), ("val", tokens):
            ids = open_split(tmp_path, split)[0].ids
            assert len(ids) == n and meta[split]["bytes"] == (ids < 256).sum()
        assert capsys.readouterr().out.startswith("train.bin ends within a document.")


def parquet(path):
    """pyarrow's ParquetFile, as far as it is used, with batches of one row"""
    column = lambda text: types.SimpleNamespace(to_pylist=lambda: [text])
    batch = lambda row: types.SimpleNamespace(column=lambda name: column(row[name]))
    batches = lambda size, columns: [batch(json.loads(line)) for line in open(path)]
    return types.SimpleNamespace(iter_batches=batches)


def test_every_format_gives_the_same_tokens(tmp_path, capsys, monkeypatch):
    for name in "pyarrow", "pyarrow.parquet":
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(ParquetFile=parquet))
    lines, other = jsonl(TEXTS), jsonl(TEXTS, "content")
    files = {"a.jsonl": lines, "b/A.NDJSON.GZ": gzip.compress(b"\xef\xbb\xbf" + lines),
             "c.jsonl": other, "d.parquet": other, "e/sub/4.txt": TEXTS[4].encode()}
    files |= {f"e/{i}.txt": text.encode() for i, text in enumerate(TEXTS[:4])}
    files |= {f"e/{name}": b"no part of the corpus" for name in ("README.md", "x.py", "y.py")}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    out = str(tmp_path / "out")
    for name in "a.jsonl", "b", "c.jsonl", "d.parquet", "e":
        main(Config(source=str(tmp_path / name), out=out, tokenizer="bytes", val_docs=2,
                    overwrite=True, field="content" if name[0] in "cd" else "text"))
        train, val = (open_split(out, split)[0].ids.tolist() for split in ("train", "val"))
        assert train[-1] == 257 and train + val == ids_of(TEXTS)
    assert "skipped: 2 .py, 1 .md\n" in (said := capsys.readouterr().out) and "ends" not in said
    refused("holds the text of .*--overwrite", main, Config(source=str(tmp_path / "e"), out=out))
    refused("c.jsonl: line 1 .*--field=NAME", list, data.documents([tmp_path / "c.jsonl"]))
    refused("d.parquet: .*--field=NAME", list, data.documents([tmp_path / "d.parquet"]))
    assert data.find_files(f"{tmp_path}/e/x.py") == [tmp_path / "e/x.py"]
    assert capsys.readouterr().out.endswith("e/x.py: read as one plain text\n")


def test_a_broken_file_is_refused(tmp_path):
    lines = jsonl(["x" * 99] * 300)
    for name, content, message in (
            ("a.jsonl", b'\n{"text": "a"}\n\n{"text": 3}\n', "line 4 "),
            ("b.jsonl.gz", gzip.compress(lines[:20_000] + b"\xe9" + lines[20_000:]), "not UTF"),
            ("c.txt.gz", gzip.compress(lines)[:-9], "ended before"),
            ("d.txt.xz", lzma.compress(lines)[:-9], "ended before")):
        (tmp_path / name).write_bytes(content)
        refused(f"{name}.* {message}", list, data.documents([tmp_path / name]))


def test_a_text_needs_as_many_tokens_as_a_row_holds():
    for n, L, hint in (0, 10, ""), (7, 10, ""), (3199, 4000, ""), (7001, 8000, ".*--length=64"):
        texts = ["x" * (n - 1)] * min(n, 1)
        refused(f"{n:,} tokens do not .* more text{hint}$", data.text_rows, texts, BYTES, L)
    rows, counts = data.text_rows(["x" * 7, "", "y" * 8], BYTES, 10)
    assert rows.tolist() == [[256, *7 * [120], 257, 257], [256, *8 * [121], 257]]
    assert counts == {"documents": 2, "tokens": 17, "bytes": 15}
    assert data.evenly(7, 3).tolist() == [0, 2, 4] and data.evenly(2, 3).tolist() == [0, 1]


def test_the_published_split_and_the_library_in_the_order_of_a_hash():
    owt, library = (configure("data", [name])[1] for name in ("openwebtext", "stdlib"))
    assert (owt.val_docs, library.val_docs, library.tokenizer) == (100_000, 40, "bytes")
    names = [p.relative_to(Path(os.__file__).parent).as_posix() for p in data.stdlib_files()]
    assert names == sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    assert {"os.py", "json/decoder.py"} <= {*names}
    assert not {"test", "site-packages"} & {part for name in names for part in name.split("/")}


def test_a_stop_between_the_files_never_mixes_two_corpora(tmp_path):
    """The process dies when one or two of the three files have been renamed."""
    for renamed in 1, 2:
        prepared(tmp_path, [text.upper() for text in TEXTS])
        with dying(os, "replace", renamed + 1):
            prepared(tmp_path)
        for split in "train", "val":
            refused("no data in", open_split, tmp_path, split)
    prepared(tmp_path)
    refused("held out: give more text", prepared, tmp_path, val_docs=4)
    refused("0 of them held out", prepare, ["ab"], tmp_path, BYTES)
    assert open_split(tmp_path, "train")[0].ids.tolist() == ids_of(TEXTS[:3])
    os.truncate(tmp_path / "val.bin", 20)
    refused("val.bin is incomplete", open_split, tmp_path, "val")
    assert sorted(os.listdir(tmp_path)) == [".lock", "meta.json", "train.bin", "val.bin"]
