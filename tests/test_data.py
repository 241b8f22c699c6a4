"""data.py: the published row layout, the tokenizers, and how a corpus is prepared."""

import gzip
import hashlib
import json
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import torch

import data
from conftest import GOLDEN, dying, refused, start
from data import open_split, prepare
from launch import Refused, read_json


def words(eos):
    """GPT-2's words, of bytes and é. EOS has the largest id, and there may be a gap before."""
    ranks = {bytes([i]): i for i in range(256)} | {"é".encode(): eos - 1}
    return tiktoken.Encoding("words", pat_str=data.WORDS, mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": eos})


BYTES, WORDS = data.tokenizer("bytes"), words(257)
TEXTS = ["It was a dark night\r\n", "", "Zoë said: “no”.", "x" * 300, "the end\n\r\n"]

jsonl = lambda texts, field="text": "".join(
    json.dumps({"id": "x", field: text}) + "\n" for text in texts).encode()
ids_of = lambda texts: [i for text in texts if text for i in (*text.encode(), 257)]  # 257: EOS


def test_rows_are_the_recorded_blocks():
    """BOS + L − 2 tokens + EOS. The authors' code cut the same ids into the same blocks."""
    golden = read_json(os.path.join(GOLDEN, "language_misc.json"))["packing"]
    ids = np.concatenate(golden["docs"]).astype(np.uint16)
    tokens = data.Tokens(ids, {"bos": golden["bos"], "eos": golden["eos"]}, "val.bin")
    L, blocks = golden["block_size"], golden["blocks"]
    assert data.n_rows(tokens, L) == len(blocks)
    assert data.rows(tokens, range(len(blocks)), L).tolist() == blocks
    assert data.rows(tokens, torch.tensor([4, 0]), L).tolist() == [blocks[4], blocks[0]]
    refused("tokens fill no row of length", data.n_rows, tokens, len(ids) + 3)
    assert data.n_rows(tokens, len(ids) + 2) == 1
    assert data.PRESETS["openwebtext"]["val_docs"] == 100_000  # as published
    refused("is a preset", data.main, data.Config(["openwebtext"]))
    assert data.evenly(7, 3).tolist() == [0, 2, 4] and data.evenly(2, 3).tolist() == [0, 1]


def test_gpt2_tokenizer_is_the_published_one():
    try:
        tok = data.tokenizer("gpt2")
    except (Refused, ImportError):  # tiktoken downloads it with requests
        pytest.skip("needs GPT-2's vocabulary in tiktoken's cache or $GPT2_DIR: would check ids")
    ids = tok.encode_ordinary("Hello world,  don't\n\n stop")
    assert ids == [15496, 995, 11, 220, 836, 470, 628, 2245]
    assert data.describe(tok) == {"name": "gpt2", "vocab_size": 50258, "mask_id": 50257,
                                  "bos": 50256, "eos": 50256}


def test_another_vocabulary_is_not_taken_for_gpt2s(tmp_path, monkeypatch):
    monkeypatch.setenv("GPT2_DIR", str(tmp_path))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    for name in "vocab.bpe", "encoder.json":
        (tmp_path / name).write_text("{}")
    refused("tokenizer gpt2: .*Hash mismatch", data.tokenizer)


@pytest.mark.parametrize("end, dtype", [(65_535, "uint16"), (65_536, "uint32")])
def test_any_tokenizer_that_tiktoken_knows(tmp_path, monkeypatch, end, dtype):
    """The largest id is EOS, and it fits. A gap in the ids has no bytes."""
    ranks = {bytes([i]): i for i in range(256)} | {"é".encode(): end - 9}
    tok = tiktoken.Encoding("many", pat_str=r"(?s).", mergeable_ranks=ranks,
                            special_tokens={"<|fim|>": end - 1, "<|endoftext|>": end})
    monkeypatch.setitem(tiktoken.registry.ENCODINGS, "many", tok)
    (tmp_path / "a.jsonl").write_bytes(jsonl(["abé"] * 5))
    start("data", f"{tmp_path}/a.jsonl", "--tokenizer=many", f"--out={tmp_path}", "--val_docs=2")
    tokens, meta = open_split(tmp_path, "val")
    document = [97, 98, end - 9, end]
    assert tokens.ids.dtype == meta["dtype"] == dtype and tokens.ids.tolist() == 2 * document
    assert meta["val"]["bytes"] == 2 * 4 and meta["train"]["tokens"] == 3 * 4
    assert data.rows(tokens, [1], 5).tolist() == [[end, end, 97, 98, end]]
    assert tokens.tokenizer == {"name": "many", "vocab_size": end + 2, "mask_id": end + 1,
                                "bos": end, "eos": end}
    assert data.text_of(tok, [97, end - 5, end - 9, end + 1]) == "aé"


@pytest.mark.parametrize("sizes, val_docs, n, eos", [
    ([9, 9_000, 9], None, 902, 257), ([99_999] * 7, None, 65_536, 65_535),  # a tenth; 65,536 tokens
    ([99_999] * 70, None, 70_000, 65_536),                                  # 1 %
    ([9, 99, 0, 9], 2, 110, 257), ([9, 9], 99, 20, 257)])                   # documents
def test_whole_documents_or_the_last_tokens_are_held_out(tmp_path, sizes, val_docs, n, eos):
    """sizes: tokens of the documents, without EOS, which fits into the dtype: [MASK] need not"""
    texts = [("x" + size * "é")[:size] for size in sizes]
    id_of = {"x": ord("x"), "é": eos - 1, ".": eos}
    ids = [id_of[letter] for text in texts if text for letter in text + "."]
    meta = prepare(enumerate(texts), tmp_path, words(eos), val_docs)
    assert meta["documents"] == len(sizes) - sizes.count(0)
    assert meta["tokenizer"] == {"name": "words", "vocab_size": eos + 2, "mask_id": eos + 1,
                                 "bos": eos, "eos": eos}
    for split, part in ("train", ids[:-n]), ("val", ids[-n:]):
        tokens, found = open_split(tmp_path, split)
        assert found == meta and tokens.tokenizer == meta["tokenizer"]
        assert tokens.ids.tolist() == part and len(part) == meta[split]["tokens"]
        assert tokens.ids.dtype == meta["dtype"] == ("uint32" if eos > 65_535 else "uint16")
        assert meta[split]["sha256"] == hashlib.sha256(tokens.ids.tobytes()).hexdigest()
    assert meta["val"]["bytes"] == part.count(ord("x")) + 2 * part.count(eos - 1)
    assert data.text_of(words(eos), [97, eos + 1, eos - 1]) == "aé"  # [MASK] has no bytes


@pytest.fixture
def pyarrow(monkeypatch):
    """Its ParquetFile, as far as it is used, with batches of one row"""
    column = lambda text: SimpleNamespace(to_pylist=lambda: [text])
    batch = lambda row: SimpleNamespace(column=lambda name: column(json.loads(row)[name]))
    file = lambda path: SimpleNamespace(iter_batches=lambda size, columns: map(batch, open(path)))
    for name in "pyarrow", "pyarrow.parquet":
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(ParquetFile=file))


def test_a_missing_package_is_no_broken_file(tmp_path, monkeypatch):
    """launch.run adds the pip command to an ImportError."""
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    path = tmp_path / "a.parquet"
    path.write_bytes(b"rows")
    with pytest.raises(ImportError):
        data.main(data.Config([str(path)], str(tmp_path / "out"), "bytes"))


def test_every_format_gives_the_same_tokens(tmp_path, pyarrow):
    lines, other = jsonl(TEXTS), jsonl(TEXTS, "content")
    files = {"a.jsonl": lines, "b/A.JSONL": b"\xef\xbb\xbf" + lines + b"\r\n", "c:d.jsonl": other,
             "d.parquet": other, "e/3.TXT": b"\xef\xbb\xbf" + TEXTS[3].encode()}
    files |= {f"e/{name}.txt": TEXTS[i].encode() for i, name in ((0, "0"), (2, "2"), (4, "a.b/4"))}
    files |= {f"e/{name}": b"\0 no part of the corpus" for name in (
        "x.json", "y.py", "sub/z", "z.txt.gz", ".git/x.txt", "sub/.0.txt", "sub/.x/y.txt")}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    for name in "a.jsonl", "b", "c:d.jsonl", "d.parquet", "e":
        out = str(tmp_path / "out" / name)
        start("data", str(tmp_path / name), f"--out={out}", "--tokenizer=bytes", "--val_docs=2",
              "--field=content" if name[0] in "cd" else "--field=text")
        train, val = (open_split(out, split)[0].ids.tolist() for split in ("train", "val"))
        assert train[-1] == 257 and train + val == ids_of(TEXTS)
    find = lambda *names: data.find_files([tmp_path / name for name in names])
    assert find("d.parquet", "a.jsonl", "b/../d.parquet") == [
        tmp_path / "b/../d.parquet", tmp_path / "a.jsonl"]  # each once
    for name in "e/y.py", "e/sub":
        refused(f"{name} is no .txt, .jsonl, .parquet file", find, "a.jsonl", name)
    (tmp_path / "b" / "x.txt").touch()
    refused("empty: .*b/x.txt$", find, "b")
    with pytest.raises(FileNotFoundError):
        data.find_files([""])  # Path("") is this folder


@pytest.mark.parametrize("name, bad", [
    ("a.jsonl", b'{"text": "b'), ("a.jsonl", b'["b"]'), ("a.jsonl", b'{"body": "b"}'),
    ("a.jsonl", b'{"text": 3}'), ("a.jsonl", b'{"text": "b\\u0000"}'),
    ("a.jsonl", b'{"text": "\\ud83d"}'), ("a.jsonl", b'{"text": "caf\xe9"}'),
    ("a.jsonl", jsonl(["a table" + 10**6 * " " + "end"])),  # tiktoken panics
    ("a.parquet", jsonl([None])), ("a.txt", gzip.compress(b"text")),
    ("a.txt", "text".encode("utf-16-le"))])
def test_a_broken_record_is_named_and_leaves_no_corpus(tmp_path, pyarrow, name, bad):
    path, out, good = tmp_path / name, tmp_path / "out", 0 if name == "a.txt" else 3
    path.write_bytes(jsonl(["a"] * good) + bad)
    refused(f"{name}, record {good + 1}: ", prepare, data.documents([path]), out, WORDS, 1)
    assert os.listdir(out) == [".lock"]


def test_a_stop_leaves_no_corpus_and_one_that_exists_is_refused(tmp_path):
    """The process dies when one or two of the three files have been renamed."""
    for renamed in 1, 2:
        with dying(os, "replace", renamed + 1):
            prepare(enumerate(["other"] * 9), tmp_path, BYTES)
        refused("there is no .*meta.json", open_split, tmp_path, "val")
    refused("too few to hold out", prepare, enumerate(["ab"]), tmp_path, BYTES)
    meta = prepare(enumerate(TEXTS), tmp_path, BYTES, 2)
    refused("holds a corpus already", prepare, enumerate(["other"]), tmp_path, BYTES)
    assert sorted(os.listdir(tmp_path)) == [".lock", "meta.json", "train.bin", "val.bin"]
    del meta["dtype"]  # without one, it is uint16
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    tokens, _ = open_split(tmp_path, "train")
    assert tokens.ids.tolist() == ids_of(TEXTS[:3])
    assert data.rows(tokens, [0], 4)[0, [0, 3]].tolist() == [256, 257]  # BOS, EOS
    os.truncate(tmp_path / "val.bin", 20)
    refused("val.bin is incomplete", open_split, tmp_path, "val")
