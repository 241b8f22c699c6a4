# SPDX-License-Identifier: MIT
"""data.py: the published row layout, the tokenizers, and what becomes of a corpus."""

import gzip
import hashlib
import itertools
import json
import lzma
import os
import random
import re
import sys
import tracemalloc
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import regex
import tiktoken
import torch

import data
import sudoku
from conftest import Killed, kill, refused, spy
from data import Config, main, open_split, prepare
from launch import Refused

ROOT = Path(data.__file__).parent
BYTES = data.tokenizer("bytes")
TEXTS = ["It was a dark night.\n", "", "Zoë said: “no”.", "x" * 300, "the end\n\n"]


def stream(texts):
    return iter([(text, True) for text in texts])


def prepared(folder, texts=TEXTS, val_docs=2):
    prepare(stream(texts), folder, BYTES, val_docs)
    return folder


def jsonl(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def ids_of(texts):
    """What the texts are in the files: their bytes, and EOS after each."""
    return list(itertools.chain(*(list(text.encode()) + [257] for text in texts)))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# the layout -------------------------------------------------------------------------------------


def test_rows_are_the_recorded_blocks(tmp_path):
    """BOS + L − 2 + EOS over the concatenated documents: the authors' code cut the same ids so."""
    golden = json.loads((ROOT / "tests/golden/language_misc.json").read_text())["packing"]
    ids = np.array(list(itertools.chain(*golden["docs"])), np.uint16)
    gpt2 = {"name": "gpt2", "vocab_size": 50258, "mask_id": 50257,
            "bos": golden["bos"], "eos": golden["eos"]}
    ids.tofile(tmp_path / "val.bin")
    val = {"tokens": len(ids), "bytes": 0, "sha256": ""}
    meta = {"format": data.FORMAT, "tokenizer": gpt2, "val": val}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    tokens, _ = open_split(tmp_path, "val")
    L, blocks = golden["block_size"], golden["blocks"]
    assert data.n_rows(tokens, L) == len(blocks)
    assert data.rows(tokens, range(len(blocks)), L).tolist() == blocks
    assert data.rows(tokens, torch.tensor([4, 0]), L).tolist() == [blocks[4], blocks[0]]
    assert data.rows(tokens, [1], L).dtype == torch.int64


def test_draws_are_named_by_their_whole_key_and_an_order_is_a_permutation():
    draw = lambda *key: tuple(torch.rand(3, generator=data.rng(*key)).tolist())
    assert draw("t", 1) == draw("t", 1)
    keys = ("t", 1), ("q", 1), ("t", 2), ("t", 1, 0), ("t", "1")
    assert len({draw(*key) for key in keys}) == 5
    orders = [data.order(1000, *key).tolist() for key in ((0, 1), (1, 1), (0, 2))]
    assert len({*map(tuple, orders)}) == 3 and orders[0] == data.order(1000, 0, 1).tolist()
    assert sorted(orders[0]) == list(range(1000))


# tokenizers -------------------------------------------------------------------------------------


def test_byte_tokenizer_is_utf8_and_two_ends():
    for text in TEXTS:
        assert BYTES.encode_ordinary(text) == list(text.encode())
        assert BYTES.decode(BYTES.encode_ordinary(text)) == text
    assert data.describe(BYTES) == {"name": "bytes", "vocab_size": 259, "mask_id": 258,
                                    "bos": 256, "eos": 257}


def test_gpt2_tokenizer_is_the_published_one():
    try:
        tok = data.tokenizer("gpt2", os.environ.get("GPT2_DIR"))
    except Refused:
        pytest.skip("needs GPT-2's vocabulary in tiktoken's cache or $GPT2_DIR: would check ids")
    words = [15496, 995, 11, 220, 836, 470, 628, 2245]
    assert tok.encode_ordinary("Hello world,  don't\n\n stop") == words
    assert data.describe(tok) == {"name": "gpt2", "vocab_size": 50258, "mask_id": 50257,
                                  "bos": 50256, "eos": 50256}


def test_a_long_text_is_cut_between_words():
    """However it is cut, GPT-2's pattern finds the same words in the parts as in the whole."""
    rand = random.Random(0)
    words = lambda text: regex.findall(data.WORDS, text)
    for _ in range(100):
        characters = ["\n", "\n", " ", "\t", "a", "don't", "9", "…", "é"]
        text = "".join(rand.choice(characters) for _ in range(200))
        blocks = [(text[i:i + 70], False) for i in range(0, len(text), 70)] + [("", True)]
        for docs in [(text, True)], blocks:
            parts, lasts = zip(*data.split_long_texts(docs, size=50))
            assert "".join(parts) == text and len(parts) > 2
            assert list(lasts) == [False] * (len(parts) - 1) + [True]
            assert list(itertools.chain(*map(words, parts))) == words(text)
    for text in "a\nb" * 1000, "one line of words, " * 200, "no_breaks" * 500, " " * 4000:
        parts, _ = zip(*data.split_long_texts([(text, True)], size=100))
        assert "".join(parts) == text and max(map(len, parts)) <= 200
    assert list(data.split_long_texts(stream(TEXTS))) == list(stream(TEXTS))


# preparing --------------------------------------------------------------------------------------


def test_eos_after_every_document_and_the_last_ones_held_out(tmp_path):
    """By default one percent of the documents, or the last tenth of the only one."""
    prepared(tmp_path, val_docs=2)
    for split, texts in ("train", TEXTS[:3]), ("val", TEXTS[3:]):
        tokens, meta = open_split(tmp_path, split)
        assert tokens.tolist() == ids_of(texts)
        sha256 = hashlib.sha256((tmp_path / f"{split}.bin").read_bytes()).hexdigest()
        assert meta[split] == {"documents": len(texts), "tokens": len(tokens),
                               "bytes": sum(len(t.encode()) for t in texts), "sha256": sha256}
        assert meta["tokenizer"] == tokens.tokenizer == data.describe(BYTES)
    for n, held_out in (2, 1), (99, 1), (350, 3):
        meta = prepare(stream(["abc"] * n), tmp_path, BYTES)
        assert [meta[split]["documents"] for split in ("train", "val")] == [n - held_out, held_out]
    prepare(iter([("0123456789" * 50, False), ("0123456789" * 50, True)]), tmp_path, BYTES)
    assert [len(open_split(tmp_path, split)[0]) for split in ("train", "val")] == [900, 101]


def test_every_format_gives_the_same_tokens(tmp_path):
    """JSON lines plain, gzipped and xz-ed, and one text file per document, sorted by name."""
    (tmp_path / "a.jsonl").write_text(jsonl(TEXTS))
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "A.NDJSON.GZ").write_bytes(gzip.compress(jsonl(TEXTS).encode()))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(jsonl(TEXTS).encode()))
    (tmp_path / "c.jsonl.xz").write_bytes(lzma.compress(jsonl(TEXTS).encode()))
    (tmp_path / "d/sub").mkdir(parents=True)
    for i, text in enumerate(TEXTS):
        folder = tmp_path / "d" / ("sub" if i == 4 else "")
        (folder / f"{i}.txt").write_text(text, encoding="utf-8")
    (tmp_path / "d" / "README.md").write_text("is not part of the corpus")
    out = str(tmp_path / "out")
    for name in "a.jsonl", "b.jsonl.gz", "c.jsonl.xz", "d", "e":
        main(Config(source=str(tmp_path / name), out=out, tokenizer="bytes", val_docs=2,
                    overwrite=True))
        train, val = (open_split(out, split)[0].tolist() for split in ("train", "val"))
        assert train[-1] == 257 and train + val == ids_of(TEXTS)


def test_parquet_is_read_with_pyarrow(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: would read parquet")
    from pyarrow.parquet import write_table
    for i in range(2):
        table = pyarrow.table({"id": [1, 2], "text": [f"{i} one", f"{i} two"]})
        write_table(table, tmp_path / f"train-0000{i}-of-00002.parquet")
    expected = [("0 one", True), ("0 two", True), ("1 one", True), ("1 two", True)]
    assert list(data.documents(data.find_files(str(tmp_path)))) == expected
    write_table(pyarrow.table({"id": [1]}), tmp_path / "no_text.parquet")
    refused("no_text.parquet cannot be read", list, data.documents([tmp_path / "no_text.parquet"]))


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    def peak(n):
        tracemalloc.start()
        prepare(((f"document {i}", True) for i in range(n)), tmp_path, BYTES, val_docs=10)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak
    assert peak(16_000) < 1.3 * peak(2000)


def test_stdlib_is_python_without_its_tests_and_held_out_files_are_mixed():
    paths = data.stdlib_files()
    assert {"ast.py", "threading.py"} <= {p.name for p in paths}
    assert not any({"test", "tests", "site-packages"} & set(p.parts) for p in paths)
    assert 5e6 < sum(p.stat().st_size for p in paths) < 40e6
    held_out = set(paths[-data.PRESETS["stdlib"]["val_docs"]:])
    first_half = sorted(paths)[:len(paths) // 2]
    assert 10 <= len(held_out & set(first_half)) <= 30


def test_openwebtext_comes_through_datasets_or_names_the_way_out(tmp_path, monkeypatch, capsys):
    def load_dataset(path, split, revision):
        if revision:
            raise RuntimeError("Dataset scripts are no longer supported")
        assert (path, split) == ("Skylion007/openwebtext", "train")
        return [{"text": text} for text in TEXTS]
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    preset = Config(**data.PRESETS["openwebtext"])
    assert preset.val_docs == 100_000
    main(replace(preset, tokenizer="bytes", val_docs=2, out=str(tmp_path)))
    assert open_split(tmp_path, "val")[1]["val"]["documents"] == 2
    assert "not the whole of OpenWebText" in capsys.readouterr().out
    refused("no longer supported.*refs/convert/parquet.*--val_docs=100000",
            data.openwebtext, "hub", "main")
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused("pip install datasets", data.openwebtext, "hub", None)


def test_the_command_line_takes_several_paths_and_values_after_a_space():
    words = ["0.txt", "--tokenizer", "bytes", "2.txt", "--overwrite", "3.txt"]
    source = os.pathsep.join(("0.txt", "2.txt", "3.txt"))
    assert data.with_source(words) == [f"--source={source}", "--tokenizer=bytes", "--overwrite"]


def test_a_text_becomes_the_rows_that_its_prepared_file_has(tmp_path):
    tokens, meta = open_split(prepared(tmp_path, val_docs=1), "train")
    rows, counts = data.text_rows(stream(TEXTS[:-1]), BYTES, 12)
    assert torch.equal(rows, data.rows(tokens, range(data.n_rows(tokens, 12)), 12))
    assert counts.items() <= meta["train"].items() and counts["documents"] == 4
    for nothing in [], [""]:
        refused("tokens do not fill one row", data.text_rows, stream(nothing), BYTES, 12)


def test_data_of_another_source_are_kept_and_short_held_out_texts_named(
        tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in "own.txt", "own.jsonl":
        Path(name).write_text(jsonl(TEXTS))
    for _ in range(2):
        main(Config(source="own.txt", tokenizer="bytes"))
    assert "noisy bounds" in capsys.readouterr().out
    other = Config(source="own.jsonl", tokenizer="bytes")
    refused("data/own holds the text of own.txt: give another --out, or --overw", main, other)
    assert json.loads(Path("data/own/meta.json").read_text())["source"] == "own.txt"
    main(replace(other, overwrite=True, val_docs=1))
    assert open_split("data/own", "val")[0].tolist() == ids_of(TEXTS[-1:])
    refused("own.txt is a file.*`python data.py own.txt`, then give data/own$",
            open_split, "own.txt", "train")


# bad input --------------------------------------------------------------------------------------


def test_empty_cut_or_foreign_data_is_refused(tmp_path):
    refused("python data.py PATH --out=", open_split, tmp_path, "train")
    refused("`python data.py openwebtext`", open_split, "data/owt", "nowhere")
    meta = (prepared(tmp_path) / "meta.json").read_text()
    os.truncate(tmp_path / "train.bin", 11)
    refused("11 bytes for", open_split, tmp_path, "train")
    for change in (
            ('"eos"', '"end"'), ('"bytes": ', '"bytes": -'), ("data/1", "data/9"),
            ('"mask_id": 258', '"mask_id": null'), ('"eos": 257', '"eos": 258'),
            ('"vocab_size": 259', '"vocab_size": 1000000000'), (meta, "[]"), (meta, "{")):
        assert meta.replace(*change) != meta
        (tmp_path / "meta.json").write_text(meta.replace(*change))
        refused("does not describe data", open_split, tmp_path, "val")
    (tmp_path / "val.bin").write_bytes(b"")
    (tmp_path / "meta.json").write_text(re.sub('"tokens": .*?,', '"tokens": 0,', meta))
    refused("0 bytes", open_split, tmp_path, "val")


def test_ids_outside_the_vocabulary_and_too_few_tokens_are_refused(tmp_path):
    prepared(tmp_path)
    with open(tmp_path / "train.bin", "r+b") as f:
        f.seek(2 * 12)
        f.write(np.uint16(258).tobytes())  # [MASK]: a model has it, no text does
    tokens, _ = open_split(tmp_path, "train")
    assert data.rows(tokens, [0], 12).max() == 257
    refused("token id 258 .* the ids of bytes end at 257", data.rows, tokens, [1], 12)
    refused("do not fill one row of length 1,024", data.n_rows, tokens, 1024)

    def encode(last_id):
        big = tiktoken.Encoding("big", pat_str=".", special_tokens={"<|e|>": last_id},
                                mergeable_ranks={bytes([i]): i for i in range(256)})
        data.encode(stream(["abc"]), tmp_path / "x", big)
    encode(65534)  # with [MASK] 65,536 ids, all that uint16 has
    refused("65,537 ids", encode, 65535)


def test_a_split_without_training_text_is_refused(tmp_path):
    for texts, val_docs, message in [([""], None, "no text"), (["a", "b"], 2, "2 of 2"),
                                     (["a", "b"], 0, "nothing out")]:
        refused(message, prepare, stream(texts), tmp_path, BYTES, val_docs)
        assert os.listdir(tmp_path) == [".lock"]


def test_a_broken_source_leaves_the_old_data_alone(tmp_path, monkeypatch):
    before = contents(prepared(tmp_path / "out"))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    whole = gzip.compress(jsonl(TEXTS).encode())
    damaged = whole[:30] + bytes([whole[30] ^ 255]) + whole[31:]
    for name, content in {
            "a.jsonl": b'{"text": "fine"}\n{"text": 3}\n', "b.jsonl": b'{"txt": "x"}\n',
            "c.jsonl": b"no json\n", "d.jsonl": b"[" * 10**5, "e.txt": b"caf\xe9",
            "f.jsonl.gz": damaged, "g.jsonl.gz": whole[:-9], "h.txt.xz": b"not xz",
            "i.parquet": b"PAR1"}.items():
        (tmp_path / name).write_bytes(content)
        cfg = Config(source=str(tmp_path / name), out=str(tmp_path / "out"), tokenizer="bytes",
                     overwrite=True)
        refused(f"{name} cannot be read|pip install pyarrow", main, cfg)
        assert contents(tmp_path / "out") == before


def test_a_stop_between_the_files_never_mixes_two_corpora(tmp_path, monkeypatch):
    """The process ends when one, or two, of the three files have their names."""
    for renamed in 1, 2:
        prepared(tmp_path, [text.upper() for text in TEXTS])
        with monkeypatch.context() as patch, pytest.raises(Killed):
            spy(patch, os, "replace", renamed + 1, kill)
            prepared(tmp_path)
        for split in "train", "val":
            refused("with a meta.json", open_split, tmp_path, split)
    prepared(tmp_path)
    assert open_split(tmp_path, "train")[0].tolist() == ids_of(TEXTS[:3])
    assert sorted(contents(tmp_path)) == [".lock", "meta.json", "train.bin", "val.bin"]


def test_unknown_tokenizers_and_wrong_vocabularies_are_refused(tmp_path):
    refused("'gpt4' is unknown", data.tokenizer, "gpt4")
    refused("--tokenizer_dir=FOLDER", data.tokenizer, "gpt2", tmp_path)
    (tmp_path / "vocab.bpe").write_text("#version\na b\n")
    (tmp_path / "encoder.json").write_text("{}")
    refused("--tokenizer_dir=FOLDER", data.tokenizer, "gpt2", str(tmp_path))


def test_sudoku_grids_are_all_of_them_and_rows_hold_one_each(tmp_path, capsys):
    """39,168 different grids by the rules; in rows of L = 39, BOS, 36 digits and two EOS."""
    grids = sudoku.grids().view(-1, 6, 6)
    assert len(grids) == 39_168 == len(torch.unique(grids, dim=0))
    boxes = grids.view(-1, 3, 2, 2, 3).transpose(2, 3).reshape(-1, 6, 6)
    for units in (grids, grids.transpose(1, 2), boxes):
        assert (units.sort(-1).values == torch.arange(6)).all()
    main(Config(source="sudoku", out=str(tmp_path), tokenizer="bytes", grids=300, val_docs=9))
    assert "of 9 held-out grids stand in the training text" in capsys.readouterr().out
    tokens, _ = open_split(tmp_path, "train")
    assert data.n_rows(tokens, 39) == 300
    rows = data.rows(tokens, torch.arange(300), 39)
    assert (rows[:, 0] == 256).all() and (rows[:, 37:] == 257).all()
    known = {tuple(grid) for grid in grids.flatten(1).tolist()}
    for grid in (rows[:, 1:37] - 49).tolist():
        assert tuple(map(grid[:6].index, grid)) in known  # digits exchanged
