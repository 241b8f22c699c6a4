"""data.py: the published row layout, the tokenizers, and how a corpus is prepared."""

import gzip
import hashlib
import json
import os
import sys
import tarfile
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import torch

import data
from conftest import GOLDEN, configure, dying, refused, start
from data import open_split, prepare
from launch import Refused, read_json

BYTES = data.tokenizer("bytes")
RANKS = {bytes([i]): i for i in range(256)} | {"é".encode(): 256}
WORDS = tiktoken.Encoding("gpt2", pat_str=data.WORDS, mergeable_ranks=RANKS,
                          special_tokens={"<|endoftext|>": 257})
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
    refused("tokens fill no row of length .* more text", data.n_rows, tokens, len(ids) + 3)
    assert data.n_rows(tokens, len(ids) + 2) == 1
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
    refused("no vocabulary of GPT-2 .*No such file.*set GPT2_DIR", data.tokenizer)
    for name in "vocab.bpe", "encoder.json":
        (tmp_path / name).write_text("{}")
    refused("no vocabulary of GPT-2 .*Hash mismatch", data.tokenizer)


@pytest.mark.parametrize("sizes, val_docs, n", [
    ([1000], None, 100), ([9] * 464, None, 464), ([9, 9_000, 9], None, 902),  # a tenth
    ([99_999] * 7, None, 65_536), ([99_999] * 70, None, 70_000),              # 65,536 tokens; 1 %
    ([9, 99, 0, 9], 2, 110), ([9, 9], 99, 20)])                               # documents
def test_whole_documents_or_the_last_tokens_are_held_out(tmp_path, sizes, val_docs, n):
    """sizes: tokens of the documents, without EOS"""
    texts = [("x" + "é" * size)[:size] for size in sizes]
    id_of = {"x": ord("x"), "é": 256, ".": 257}
    ids = [id_of[letter] for text in texts if text for letter in text + "."]
    meta = prepare(texts, tmp_path, WORDS, val_docs)
    assert meta["documents"] == len(sizes) - sizes.count(0)
    for split, part in ("train", ids[:-n]), ("val", ids[-n:]):
        tokens, found = open_split(tmp_path, split)
        assert tokens.ids.tolist() == part and len(part) == meta[split]["tokens"]
        assert meta[split]["sha256"] == hashlib.sha256(tokens.ids.tobytes()).hexdigest()
        assert found == meta and meta["tokenizer"] == tokens.tokenizer == data.describe(WORDS)
    assert meta["val"]["bytes"] == part.count(ord("x")) + 2 * part.count(256)


@pytest.fixture
def pyarrow(monkeypatch):
    """Its ParquetFile, as far as it is used, with batches of one row"""
    column = lambda text: SimpleNamespace(to_pylist=lambda: [text])
    batch = lambda row: SimpleNamespace(column=lambda name: column(json.loads(row)[name]))
    file = lambda path: SimpleNamespace(iter_batches=lambda size, columns: map(batch, open(path)))
    for name in "pyarrow", "pyarrow.parquet":
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(ParquetFile=file))


TEXT, TAR = b"A text of some length. " * 99, tarfile.TarInfo("a.txt").tobuf()  # its header
NO_TEXTS = {
    "gzip": gzip.compress(TAR), "bzip2": b"BZh91AY&SY" + TEXT, "xz": b"\xfd7zXZ" + TEXT,
    "zstd": b"\x28\xb5\x2f\xfd" + TEXT, "zip": b"PK\x03\x04" + TEXT, "tar": TAR + TEXT,
    "UTF-16": b"\xff\xfea\0", "binary or UTF-16": TEXT.decode().encode("utf-16-be")}


def test_every_format_gives_the_same_tokens(tmp_path, capsys, pyarrow):
    lines, other = jsonl(TEXTS), jsonl(TEXTS, "content")
    files = {"a.jsonl": lines, "b/A.NDJSON": b"\xef\xbb\xbf" + lines, "c:d.jsonl": other,
             "d.parquet": other, "e/sub/4.txt": TEXTS[4].encode()}
    files |= {f"e/{i}.txt": text.encode() for i, text in enumerate(TEXTS[:4])}
    files["e/late.TXT"] = TEXT * 9 + b"\0"
    files |= {f"e/{what}.txt": content for what, content in NO_TEXTS.items()}
    files |= {f"e/{name}": b"no part of the corpus" for name in (
        "x.json", "y.py", ".git/x.txt", "sub/.0.txt", "__MACOSX/0.txt", "sub/__MACOSX/4.txt")}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    for name in "a.jsonl", "b", "c:d.jsonl", "d.parquet", "e":
        out = str(tmp_path / "out" / name)
        start("data", str(tmp_path / name), f"--out={out}", "--tokenizer=bytes", "--val_docs=2",
              "--field=content" if name[0] in "cd" else "--field=text")
        train, val = (open_split(out, split)[0].ids.tolist() for split in ("train", "val"))
        assert train[-1] == 257 and train + val == ids_of(TEXTS)
    said = capsys.readouterr().out
    assert said.count("skipped") == len(NO_TEXTS) and "spelled" not in said
    counts = dict.fromkeys(NO_TEXTS, 1) | {"binary or UTF-16": 2}
    assert all(f"e: skipped {n} × {what}\n" in said for what, n in counts.items())
    named = data.find_files([tmp_path / name for name in ("e/y.py", "b/../e/y.py", "e/.git")])
    assert named == [tmp_path / "e/y.py", tmp_path / "e/.git/x.txt"]
    refused("has no .txt", data.find_files, [tmp_path / "out"])


@pytest.mark.parametrize("name, content, message", [
    ("a.jsonl", b'\n{"text": "a"}\n\n{"text": 3}\n', "line 4 has .* int .*--field=NAME"),
    ("b.json", b'{"text": "a"}\n' + b"[" * 10**5, "line 2 has"),
    ("c.jsonl", b'{"text": "a"}\n' * 999 + b'{"text": "\xe9"}', "is not UTF-8"),
    ("d.md", TEXT * 9 + b"\0", "is not UTF-8"),
    ("e.parquet", jsonl(["a", None]), "row 2 has .*NoneType"),
    ("f.parquet", jsonl(["a"], "b"), "row 1 has .*KeyError.*--field=NAME"),
    *((f"{what}.jsonl", content, f"is {what}: ") for what, content in NO_TEXTS.items())])
def test_a_broken_file_or_record_is_refused(tmp_path, pyarrow, name, content, message):
    (tmp_path / name).write_bytes(content)
    refused(f"{name},? {message}", list, data.documents([tmp_path / name]))


def test_texts_that_spell_out_an_end_token_are_counted(tmp_path, capsys):
    prepare(["a<|eos|>", "b", "<|endoftext|>", "c<|eos|><|eos|>"], tmp_path, BYTES, 1)
    said = capsys.readouterr().out
    assert "<|eos|> is spelled out in 2 of 4 documents" in said
    assert "<|endoftext|> is spelled out in 1 of 4 documents" in said


def test_a_run_of_blanks_that_ends_tiktoken_is_refused_with_its_name(tmp_path):
    path, encode = tmp_path / "b.jsonl", lambda docs, tok=WORDS: [*data.encode(docs, tok)]
    path.write_bytes(jsonl(["short", "a table" + 600_000 * "\u3000\n" + "end"]))
    refused("b.jsonl, line 2 has 900,000 blanks", encode, data.documents([path]))
    refused("'a log .*' has 900,000 blanks", encode, ["a log " + 10**6 * "\t"])
    in_parts = (999 * " " + "x") * 2_000
    assert len(encode([in_parts])) == len(encode([10**6 * " "], BYTES)) == 1


def test_the_published_split_and_the_library_in_the_order_of_a_hash():
    owt, library = (configure("data", [name])[1] for name in ("openwebtext", "stdlib"))
    assert (owt.val_docs, library.val_docs, library.tokenizer) == (100_000, 40, "bytes")
    names = [os.path.relpath(path, os.path.dirname(os.__file__)) for path in data.stdlib_files()]
    assert names == sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    assert {"os.py", "json/decoder.py"} <= {*names}
    assert not {"test", "site-packages"} & {part for name in names for part in name.split("/")}


def test_a_stop_leaves_no_corpus_and_one_that_exists_is_refused(tmp_path):
    """The process dies when one or two of the three files have been renamed."""
    for renamed in 1, 2:
        with dying(os, "replace", renamed + 1):
            prepare(["other"] * 9, tmp_path, BYTES)
        refused("there is no .*meta.json", open_split, tmp_path, "val")
    for few in [], ["ab"]:
        refused("too few to hold out", prepare, few, tmp_path, BYTES)
    prepare(TEXTS, tmp_path, BYTES, 2)
    refused("holds a corpus already.*rm -r", prepare, ["other"], tmp_path, BYTES)
    assert open_split(tmp_path, "train")[0].ids.tolist() == ids_of(TEXTS[:3])
    for size in 20, 0, 7:  # an odd one is no number of tokens
        os.truncate(tmp_path / "val.bin", size)
        refused("val.bin is incomplete", open_split, tmp_path, "val")
    assert sorted(os.listdir(tmp_path)) == [".lock", "meta.json", "train.bin", "val.bin"]
