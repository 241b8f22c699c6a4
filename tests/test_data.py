"""data.py: the published row layout, the tokenizers, and what becomes of a corpus."""

import gzip
import hashlib
import itertools
import json
import lzma
import os
import random
import subprocess
import sys
import tracemalloc
import types
from pathlib import Path

import numpy as np
import pytest
import regex
import tiktoken
import torch

import data
from launch import Refused
from data import Config, main, open_split, prepare

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


# the layout -----------------------------------------------------------------------------------------------------------


def test_rows_are_the_recorded_blocks(tmp_path):
    """BOS + L − 2 + EOS over the concatenated documents, remainder dropped: what the authors' code made of the same ids."""
    with open(ROOT / "tests/golden/language_misc.json") as f:
        golden = json.load(f)["packing"]
    ids = np.array(list(itertools.chain(*golden["docs"])), np.uint16)
    gpt2 = {"name": "gpt2", "vocab_size": 50258, "mask_id": 50257, "bos": golden["bos"], "eos": golden["eos"]}
    ids.tofile(tmp_path / "val.bin")
    (tmp_path / "meta.json").write_text(json.dumps({"format": data.FORMAT, "tokenizer": gpt2, "val": {"tokens": len(ids)}}))
    tokens, _ = open_split(tmp_path, "val")
    L, blocks = golden["block_size"], golden["blocks"]
    assert data.n_rows(tokens, L) == len(blocks)
    assert data.rows(tokens, range(len(blocks)), L).tolist() == blocks
    assert data.rows(tokens, torch.tensor([4, 0]), L).tolist() == [blocks[4], blocks[0]]
    assert data.rows(tokens, [1], L).dtype == torch.int64


def test_rows_tile_the_stream(tmp_path):
    tokens, _ = open_split(prepared(tmp_path), "train")
    x = data.rows(tokens, range(data.n_rows(tokens, 7)), 7)
    assert x[:, 1:-1].flatten().tolist() == tokens[:len(tokens) // 5 * 5].tolist()
    assert (x[:, 0] == 256).all() and (x[:, -1] == 257).all()


def test_order_is_a_permutation_of_its_epoch():
    epochs = [data.order(1000, epoch, seed=1) for epoch in (0, 1, 0)]
    assert epochs[0].sort().values.tolist() == list(range(1000))
    assert torch.equal(epochs[0], epochs[2]) and not torch.equal(epochs[0], epochs[1])
    assert not torch.equal(epochs[0], data.order(1000, 0, seed=2))


def test_rng_is_named_by_its_whole_key():
    draw = lambda *key: torch.rand(3, generator=data.rng(*key)).tolist()
    assert draw("t", 1) == draw("t", 1)
    assert len({tuple(draw(*key)) for key in (("t", 1), ("q", 1), ("t", 2), ("t", 1, 0), ("t", "1"))}) == 5


# tokenizers -----------------------------------------------------------------------------------------------------------


def test_byte_tokenizer_is_utf8_and_two_ends():
    for text in TEXTS:
        assert BYTES.encode_ordinary(text) == list(text.encode())
        assert BYTES.decode(BYTES.encode_ordinary(text)) == text
    assert data.describe(BYTES) == {"name": "bytes", "vocab_size": 259, "mask_id": 258, "bos": 256, "eos": 257}


def test_gpt2_tokenizer_is_the_published_one():
    try:
        tok = data.tokenizer("gpt2", os.environ.get("GPT2_DIR"))
    except Refused:
        pytest.skip("needs GPT-2's vocabulary in tiktoken's cache or in $GPT2_DIR: would check ids and special tokens")
    assert tok.encode_ordinary("Hello world,  don't\n\n stop") == [15496, 995, 11, 220, 836, 470, 628, 2245]
    assert data.describe(tok) == {"name": "gpt2", "vocab_size": 50258, "mask_id": 50257, "bos": 50256, "eos": 50256}


def test_pieces_of_a_file_cut_no_word_in_two():
    """However the file is cut, GPT-2's pattern finds the same words in the pieces as in the whole."""
    rand = random.Random(0)
    for _ in range(300):
        text = "".join(rand.choice(["\n", "\n", " ", "\t", "a", "don't", "9", "…", "é"]) for _ in range(60))
        with open_string(text) as f:
            cut = list(data.pieces(f, size=7))
        assert "".join(piece for piece, _ in cut) == text
        assert [last for _, last in cut] == [False] * (len(cut) - 1) + [True]
        words = lambda s: regex.findall(data.WORDS, s)
        assert list(itertools.chain(*(words(piece) for piece, _ in cut))) == words(text)
    for text in ("a\nb" * 1000, "one line of words, " * 200):  # no file is held whole for want of line breaks
        assert max(len(piece) for piece, _ in data.pieces(open_string(text), size=100)) < 200


def open_string(text):
    import io
    return io.StringIO(text)


# preparing ------------------------------------------------------------------------------------------------------------


def test_eos_after_every_document_and_the_last_ones_held_out(tmp_path):
    prepared(tmp_path, val_docs=2)
    flat = lambda texts: list(itertools.chain(*(list(text.encode()) + [257] for text in texts)))
    for split, texts in ("train", TEXTS[:3]), ("val", TEXTS[3:]):
        tokens, meta = open_split(tmp_path, split)
        assert tokens.tolist() == flat(texts)
        assert meta[split] == {"documents": len(texts), "tokens": len(tokens), "bytes": sum(len(t.encode()) for t in texts),
                               "sha256": hashlib.sha256((tmp_path / f"{split}.bin").read_bytes()).hexdigest()}
        assert meta["tokenizer"] == tokens.tokenizer == data.describe(BYTES)


@pytest.mark.parametrize("n, held", [(2, 1), (99, 1), (350, 3)])
def test_default_holds_out_one_percent(tmp_path, n, held):
    meta = prepare(stream(["abc"] * n), tmp_path, BYTES)
    assert (meta["train"]["documents"], meta["val"]["documents"]) == (n - held, held)


def test_a_single_document_is_cut_at_nine_tenths(tmp_path):
    prepare(stream(["0123456789" * 100]), tmp_path, BYTES)
    assert len(open_split(tmp_path, "train")[0]) == 900 and len(open_split(tmp_path, "val")[0]) == 101


def test_every_format_gives_the_same_tokens(tmp_path):
    """JSON lines plain, gzipped and xz-ed, and one text file per document, in the order of their names."""
    (tmp_path / "a.jsonl").write_text(jsonl(TEXTS))
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as f:
        f.write(jsonl(TEXTS))
    with lzma.open(tmp_path / "c.jsonl.xz", "wt") as f:
        f.write(jsonl(TEXTS))
    (tmp_path / "d/sub").mkdir(parents=True)
    for i, text in enumerate(TEXTS):
        (tmp_path / "d" / ("sub" if i == 4 else "") / f"{i}.txt").write_text(text, encoding="utf-8")
    (tmp_path / "d" / "README.md").write_text("is not part of the corpus")
    for name in "a.jsonl", "b.jsonl.gz", "c.jsonl.xz", "d":
        main(Config(source=str(tmp_path / name), out=str(tmp_path / "out"), tokenizer="bytes", val_docs=2))
        tokens = [open_split(tmp_path / "out", split)[0].tolist() for split in ("train", "val")]
        assert tokens[0][-1] == 257 and sum(tokens, []) == list(itertools.chain(*(list(t.encode()) + [257] for t in TEXTS)))


def test_a_long_text_file_is_one_document(tmp_path):
    text = "".join(f"line {i}\n" for i in range(30_000))  # in several pieces
    (tmp_path / "long.txt").write_text(text)
    main(Config(source=str(tmp_path / "long.txt"), out=str(tmp_path / "out"), tokenizer="bytes"))
    tokens = np.concatenate([open_split(tmp_path / "out", split)[0] for split in ("train", "val")])
    assert bytes(tokens[:-1].astype(np.uint8)) == text.encode() and tokens[-1] == 257


def test_parquet_is_read_with_pyarrow(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: would check reading of parquet")
    import pyarrow.parquet
    folder = tmp_path / "plain_text"
    folder.mkdir()
    for i in range(2):
        pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2], "text": [f"{i} one", f"{i} two"]}), folder / f"train-0000{i}-of-00002.parquet")
    assert list(data.documents(data.find(str(tmp_path)))) == [("0 one", True), ("0 two", True), ("1 one", True), ("1 two", True)]
    pyarrow.parquet.write_table(pyarrow.table({"id": [1]}), folder / "no_text.parquet")
    (folder / "cut.parquet").write_bytes((folder / "no_text.parquet").read_bytes()[:-5])
    for name in "no_text.parquet", "cut.parquet":
        with pytest.raises(Refused, match=f"{name} cannot be read"):
            list(data.documents([folder / name]))


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    def peak(n):
        tracemalloc.start()
        prepare(((f"document {i}", True) for i in range(n)), tmp_path, BYTES, val_docs=10)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak
    assert peak(16_000) < 1.3 * peak(2000)


def test_stdlib_is_python_without_its_tests_and_held_out_files_are_mixed():
    paths = data.stdlib()
    assert paths == data.stdlib() and {"ast.py", "threading.py"} <= {p.name for p in paths}
    assert not any({"test", "tests", "site-packages"} & set(p.parts) for p in paths)
    assert 5e6 < sum(p.stat().st_size for p in paths) < 40e6
    held_out, alphabet = paths[-data.PRESETS["stdlib"]["val_docs"]:], sorted(paths)
    assert 10 <= len(set(held_out) & set(alphabet[:len(paths) // 2])) <= 30


def test_openwebtext_comes_through_datasets(tmp_path, monkeypatch, capsys):
    asked = []
    corpus = [{"text": text} for text in TEXTS]
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(
        load_dataset=lambda *args, **kwargs: asked.append((args, kwargs)) or corpus))
    main(Config(**{**data.PRESETS["openwebtext"], "tokenizer": "bytes", "val_docs": 2, "out": str(tmp_path)}))
    assert asked == [(("Skylion007/openwebtext",), {"split": "train", "revision": None})]
    assert open_split(tmp_path, "val")[1]["val"]["documents"] == 2
    assert "not the whole of OpenWebText" in capsys.readouterr().out  # 5 documents are not 8,013,769
    assert data.PRESETS["openwebtext"]["val_docs"] == 100_000


def test_command_line_takes_several_paths(tmp_path):
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i}.txt").write_text(text, encoding="utf-8")
    run = lambda *argv: subprocess.run([sys.executable, ROOT / "data.py", *argv], cwd=tmp_path, capture_output=True, text=True)
    done = run("0.txt", "2.txt", "--tokenizer=bytes", "--val_docs=1", "--out=both")
    assert done.returncode == 0, done.stderr
    assert bytes(open_split(tmp_path / "both", "val")[0][:-1].astype(np.uint8)) == TEXTS[2].encode()
    bad = run("nowhere.txt")
    assert bad.returncode == 2 and "nowhere.txt" in bad.stderr and "Traceback" not in bad.stderr


# bad input ------------------------------------------------------------------------------------------------------------


def test_missing_data_names_the_command_that_makes_it(tmp_path):
    with pytest.raises(Refused, match="python data.py PATH --out="):
        open_split(tmp_path, "train")
    with pytest.raises(Refused, match="`python data.py openwebtext`"):
        open_split("data/owt", "nowhere")


def test_empty_cut_or_foreign_data_is_refused(tmp_path):
    meta = (prepared(tmp_path) / "meta.json").read_text()
    with open(tmp_path / "train.bin", "r+b") as f:
        f.truncate(11)
    with pytest.raises(Refused, match="11 bytes for"):
        open_split(tmp_path, "train")
    for foreign in "{", "[]", '{"format": "other"}', meta.replace('"eos"', '"end"'), meta.replace("data/1", "data/9"):
        (tmp_path / "meta.json").write_text(foreign)
        with pytest.raises(Refused, match="does not describe data"):
            open_split(tmp_path, "val")
    (tmp_path / "val.bin").write_bytes(b"")
    (tmp_path / "meta.json").write_text(json.dumps(json.loads(meta) | {"val": {"tokens": 0}}))
    with pytest.raises(Refused, match="0 bytes"):
        open_split(tmp_path, "val")


def test_an_id_outside_the_vocabulary_is_refused(tmp_path):
    prepared(tmp_path)
    with open(tmp_path / "train.bin", "r+b") as f:
        f.seek(2 * 12)
        f.write(np.uint16(258).tobytes())  # [MASK]: a model has it, no text does
    tokens, _ = open_split(tmp_path, "train")
    assert data.rows(tokens, [0], 12).max() == 257
    with pytest.raises(Refused, match="token id 258 .* the ids of bytes end at 257"):
        data.rows(tokens, [1], 12)


def test_less_than_a_row_is_refused(tmp_path):
    tokens, _ = open_split(prepared(tmp_path), "train")
    with pytest.raises(Refused, match="do not fill one row of length 1,024"):
        data.n_rows(tokens, 1024)


def test_a_vocabulary_beyond_uint16_is_refused(tmp_path):
    big = lambda n: tiktoken.Encoding("big", pat_str=".", mergeable_ranks={bytes([i]): i for i in range(256)}, special_tokens={"<|e|>": n})
    data.encode(stream(["abc"]), tmp_path / "fits", big(65534))  # with [MASK] 65,536 ids
    with pytest.raises(Refused, match="65,537 ids"):
        data.encode(stream(["abc"]), tmp_path / "x", big(65535))


@pytest.mark.parametrize("texts, val_docs, message", [
    ([], None, "0 documents"), (["one"], 1, "1 of 1 documents"), (["a", "b"], 2, "2 of 2"), (["a", "b"], 0, "nothing out"),
    (["a", "b"], -3, "nothing out"), ([""], None, "1 of 1")])
def test_a_split_without_training_text_is_refused(tmp_path, texts, val_docs, message):
    with pytest.raises(Refused, match=message):
        prepare(stream(texts), tmp_path, BYTES, val_docs)
    assert os.listdir(tmp_path) == []


def test_a_broken_source_leaves_the_old_data_alone(tmp_path):
    prepared(tmp_path / "out")
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    broken = {"a.jsonl": '{"text": "fine"}\n{"text": 3}\n', "b.jsonl": '{"txt": "x"}\n', "c.jsonl": "no json\n", "d.jsonl": "[1]\n"}
    for name, content in broken.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "e.txt").write_bytes(b"caf\xe9")
    (tmp_path / "f.jsonl.gz").write_bytes(gzip.compress(jsonl(TEXTS).encode())[:-9])
    (tmp_path / "g.jsonl.xz").write_bytes(lzma.compress(jsonl(TEXTS).encode())[:-9])
    (tmp_path / "h.txt.gz").write_bytes(b"not gzip")
    for name in (*broken, "e.txt", "f.jsonl.gz", "g.jsonl.xz", "h.txt.gz"):
        with pytest.raises(Refused, match=f"{name} cannot be read"):
            main(Config(source=str(tmp_path / name), out=str(tmp_path / "out"), tokenizer="bytes"))
        assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before


def test_unknown_tokenizers_and_wrong_vocabularies_are_refused(tmp_path):
    with pytest.raises(Refused, match="'gpt4' is unknown"):
        data.tokenizer("gpt4")
    with pytest.raises(Refused, match="--tokenizer_dir=FOLDER"):
        data.tokenizer("gpt2", tmp_path)
    (tmp_path / "vocab.bpe").write_text("#version\na b\n")
    (tmp_path / "encoder.json").write_text("{}")
    with pytest.raises(Refused, match="--tokenizer_dir=FOLDER"):
        data.tokenizer("gpt2", str(tmp_path))


def test_missing_packages_are_named(tmp_path, monkeypatch):
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    for package in "datasets", "pyarrow", "pyarrow.parquet":
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(Refused, match="pip install pyarrow"):
        list(data.documents([tmp_path / "x.parquet"]))
    with pytest.raises(Refused, match="pip install datasets"):
        data.openwebtext("hub", None)


def test_openwebtext_out_of_reach_names_the_other_way(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("Dataset scripts are no longer supported")
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=fail))
    with pytest.raises(Refused, match="no longer supported.*refs/convert/parquet.*--val_docs=100000"):
        data.openwebtext("hub", None)
