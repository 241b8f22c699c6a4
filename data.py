# SPDX-License-Identifier: MIT
"""From text to rows of token ids, and the text that is held out.                        App. B.1

    python data.py stdlib                                      # Python's own library, as bytes
    python data.py yours.jsonl more/ --val_docs=300 --out=data/yours
    python data.py openwebtext                                 # needs `pip install datasets`

A corpus is a folder with three files. Every document ends with EOS.

    train.bin    uint16 token ids
    val.bin      the same, for the end of the text, which is held out
    meta.json    the tokenizer, the source, the number of documents; of both splits: tokens, sha256

A row is BOS, L − 2 tokens of such a file, EOS. Rows do not overlap, and BOS and EOS are masked,
too [code]. Published perplexities use rows of this form that begin elsewhere (REPRODUCE.md, 16).
"""

import functools
import hashlib
import itertools
import json
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import tiktoken
import torch
from tiktoken.load import data_gym_to_mergeable_bpe_ranks

from launch import Refused, Size, atomic, in_short, lock, progress, read_json, run


# ---- rows ----------------------------------------------------------------------------------------
def prepare_preset(out):
    """Prepare data/stdlib if `out` is this folder and is missing."""
    if out == PRESETS["stdlib"]["out"] and not os.path.exists(f"{out}/meta.json"):
        main(Config(**PRESETS["stdlib"]))


@dataclass
class Tokens:
    """A split as one stream of token ids, its documents joined."""
    ids: np.ndarray  # (n_tokens,) uint16
    tokenizer: dict  # see `describe`; `rows` needs BOS and EOS
    name: str        # for messages


def open_split(dir, split):
    """(Tokens, meta): the "train" or "val" split, memory-mapped, and the content of meta.json."""
    if not os.path.exists(f"{dir}/meta.json"):
        raise Refused(f"there is no {dir}/meta.json: make it, as by `python data.py yours.jsonl "
                      f"--out={dir}`")
    meta = read_json(f"{dir}/meta.json")
    path = f"{dir}/{split}.bin"
    if os.path.getsize(path) != 2 * meta[split]["tokens"]:
        raise Refused(f"{path} is incomplete: `rm -r {dir}`, and prepare it again with data.py")
    # A file without tokens cannot be mapped.
    ids = np.memmap(path, np.uint16, "r") if meta[split]["tokens"] else np.empty(0, np.uint16)
    return Tokens(ids, meta["tokenizer"], path), meta


def n_rows(tokens, L):
    """How many rows the stream fills. Only its end is dropped [ours]."""
    n = len(tokens.ids)
    if n < L - 2:
        raise Refused(f"{tokens.name}: {n:,} tokens fill no row of length {L:,}: give more text")
    return n // (L - 2)


def rows(tokens, index, L):
    """Rows (n, L) int64: BOS, L − 2 tokens, EOS.   index: (n,) numbers.         App. B.1, [code]"""
    x = torch.empty(len(index), L, dtype=torch.int64)                    # (n, L)
    x[:, 0] = tokens.tokenizer["bos"]
    x[:, -1] = tokens.tokenizer["eos"]
    start = np.asarray(index)[:, None] * (L - 2)                         # (n, 1)
    x[:, 1:-1] = torch.from_numpy(tokens.ids[start + np.arange(L - 2)].astype(np.int64))
    return x


def evenly(n, m):
    """m of the numbers 0 to n − 1, evenly spaced, or all if m is 0. Warns if they are few."""
    m = min(m or n, n)
    if m < 100 and os.environ.get("RANK", "0") == "0":
        print(f"only {m} held-out rows: another choice could give quite a different result")
    return torch.arange(m) * n // m


# ---- draws ---------------------------------------------------------------------------------------
KEYS = 1  # version of rng's keys: a run that began with another version cannot be resumed


def rng(*key):
    """A generator seeded by what it draws: no state to save, and ranks need not be in step."""
    return torch.Generator().manual_seed(seed_of(*key))


def seed_of(*key):
    """A 56-bit seed from what a draw is for, such as seed_of(seed, "dropout", step, j)."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=7).digest(), "big")


@functools.lru_cache(2)  # a permutation is slow to draw, and an update may span two epochs
def order(n, key, seed):
    """A permutation (n,), the same on every rank and machine.   key: an epoch, or another use."""
    return torch.randperm(n, generator=rng("order", key, seed))


# ---- tokenizers ----------------------------------------------------------------------------------
# GPT-2 first splits a text into these words. No token crosses from one word into the next.
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def tokenizer(name="gpt2"):
    """A tiktoken.Encoding: "gpt2", the paper's, or "bytes", with 256 bytes, BOS and EOS."""
    if name == "bytes":
        return tiktoken.Encoding(
            "bytes", pat_str=r"(?s).{1,64}", mergeable_ranks={bytes([i]): i for i in range(256)},
            special_tokens={"<|bos|>": 256, "<|eos|>": 257})
    try:
        if not (folder := os.environ.get("GPT2_DIR")):
            return tiktoken.get_encoding(name)  # from tiktoken's cache, or a download
        ranks = data_gym_to_mergeable_bpe_ranks(
            os.path.join(folder, "vocab.bpe"), os.path.join(folder, "encoder.json"),
            "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
            "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783")
    except (OSError, ValueError) as e:  # ValueError: not the files of these hashes
        raise Refused(f"there is no vocabulary of GPT-2 ({in_short(e):.70}): set GPT2_DIR to a "
                      f"folder with vocab.bpe and encoder.json, or use --tokenizer=bytes")
    return tiktoken.Encoding("gpt2", pat_str=WORDS, mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": 50256})


def describe(tok):
    """{name, vocab_size, mask_id, bos, eos}, as in meta.json. vocab_size includes [MASK]."""
    ends = sorted(map(tok.encode_single_token, tok.special_tokens_set))  # GPT-2 has only one
    return {"name": tok.name, "vocab_size": tok.n_vocab + 1, "mask_id": tok.n_vocab,
            "bos": ends[0], "eos": ends[-1]}


# ---- corpora -------------------------------------------------------------------------------------
def prepare(docs, out, tok, val_docs=None, source=""):
    """Write a corpus of the texts `docs`: all its files or none. Returns what meta.json holds."""
    with (lock(out), atomic(f"{out}/meta.json") as meta_path, atomic(f"{out}/val.bin") as val,
          atomic(f"{out}/train.bin") as train):
        if os.path.exists(f"{out}/meta.json"):
            raise Refused(f"{out} holds a corpus already: give another --out, or `rm -r {out}`")
        sizes, spelled = [], Counter()  # tokens of each document; see `encode`
        with open(train, "wb") as f:
            for ids, ends in encode(docs, tok):
                f.write(ids.tobytes())
                sizes.append(len(ids))
                spelled.update(ends)
        n, special = sum(sizes), describe(tok)
        held_out = sum(sizes[-val_docs:]) if val_docs else min(n // 10, max(n // 100, 65_536))
        if not held_out:
            raise Refused(f"{n:,} tokens are too few to hold out a tenth: give more text")
        train_ids, val_ids = np.split(np.memmap(train, np.uint16, "r"), [-held_out])
        meta = {"tokenizer": special, "source": source, "documents": len(sizes)}
        for split, ids in ("train", train_ids), ("val", val_ids):
            meta[split] = {"tokens": len(ids), "sha256": hashlib.sha256(ids).hexdigest()}
        widths = [len(tok.decode_single_token_bytes(i)) for i in range(special["bos"])]
        widths = np.array([*widths, 0, 0], np.uint8)  # BOS and EOS, the last ids, are no text
        meta["val"]["bytes"] = int(widths[val_ids].sum())
        val_ids.tofile(val)
        os.truncate(train, train_ids.nbytes)
        Path(meta_path).write_text(json.dumps(meta, indent=2) + "\n")
    for end, count in spelled.items():
        print(f"{end} is spelled out in {count:,} of {len(sizes):,} documents. It is ordinary text "
              f"here, and ends none: put each document on a line of a .jsonl, without {end}")
    return meta


def encode(docs, tok):
    """Yields the uint16 ids of each text, EOS last [code], and the end tokens it spells out."""
    docs, eos = filter(None, docs), describe(tok)["eos"]  # no lone EOS for an empty text [ours]
    ends = {"<|endoftext|>", *tok.special_tokens_set}
    while texts := list(itertools.islice(docs, 100)):  # few at a time: lists of ids take memory
        for text in texts if tok.name == "gpt2" else ():  # tiktoken panics at a million blanks
            if len(text) > 900_000 and re.search(r"(?<!\s)\s{900000}", text):
                name = getattr(text, "name", repr(text[:40]))
                raise Refused(f"{name} has 900,000 blanks in a row: shorten them")
        for text, ids in zip(texts, tok.encode_ordinary_batch(texts, num_threads=os.cpu_count())):
            yield np.array([*ids, eos], np.uint16), [end for end in ends if end in text]


class Text(str):
    """A text that has a `name`, its file and record."""


def documents(paths, field="text"):
    """Yields the texts of all files. Raises Refused for a broken file or a record without text."""
    units = {".jsonl": "line", ".ndjson": "line", ".json": "line", ".parquet": "row"}
    for path in paths:
        if path.is_file() and (what := no_text(path)):  # a pipe has its first bytes only once
            raise Refused(f"{path} is {what}: data.py reads UTF-8 text, .jsonl and .parquet")
        n, unit = 0, units.get(path.suffix.lower(), "text")
        try:
            for n, text in enumerate(records(path, field, unit), 1):
                text = Text(text)
                text.name = f"{path}, {unit} {n}"
                yield text
        except UnicodeError:
            raise Refused(f"{path} is not UTF-8 text: convert it from the encoding that it has")
        except (ValueError, LookupError, TypeError, RuntimeError, OSError) as e:  # pyarrow's, too
            raise Refused(f"{path}, {unit} {n + 1} has no text in its field {field!r} "
                          f"({in_short(e)}). data.py takes another with --field=NAME")


def records(path, field, unit):
    """Yields the text of each record in a file. `documents` makes its errors Refused."""
    if unit == "row":
        from pyarrow.parquet import ParquetFile
        for batch in ParquetFile(path).iter_batches(1000, columns=[field]):
            yield from ("".join([text]) for text in batch.column(field).to_pylist())
        return
    # utf-8-sig skips a byte-order mark. With newline="", line ends stay the bytes that they are.
    with open(path, encoding="utf-8-sig", newline="") as f:
        if unit == "line":  # "".join fails for what is not text
            yield from ("".join([json.loads(line)[field]]) if line.strip() else "" for line in f)
            return
        text = f.read()
        if "\0" in text:
            raise UnicodeError
        yield text


NO_TEXT = {
    rb"\x1f\x8b": "gzip", rb"BZh\d1AY": "bzip2", rb"\xfd7zXZ": "xz", rb"\(\xb5/\xfd": "zstd",
    rb"\x04\x22M\x18": "LZ4", rb"PK\x03\x04": "zip", rb"7z\xbc\xaf": "7-Zip", rb"Rar!": "RAR",
    rb"(?s).{257}ustar": "tar", rb"\xff\xfe|\xfe\xff": "UTF-16",
    rb"version https://git-lfs": "a pointer of Git LFS", rb"(?s)(?!PAR1).*\0": "binary or UTF-16"}


def no_text(path):
    """What a file is by its first bytes, or by a NUL anywhere in a .txt. None: text or parquet."""
    with open(path, "rb") as f:
        head = f.read(-1 if Path(path).suffix.lower() == ".txt" else 4096)
    return next((what for magic, what in NO_TEXT.items() if re.match(magic, head)), None)


def find_files(sources):
    """All files of the paths, each once. In a folder: all texts, but no .json and no hidden one."""
    paths = []
    for source in map(Path, sources):
        source.stat()  # is it there?
        files = {path: no_text(path) for path in sorted(source.rglob("*")) if path.is_file() and not
                 re.search(r"(^|/)(\.|__MACOSX/)", path.relative_to(source).as_posix())}
        for what, n in Counter(filter(None, files.values())).items():
            print(f"{source}: skipped {n:,} × {what}")
        inside = [path for path, what in files.items() if not what
                  and path.suffix.lower() in (".txt", ".jsonl", ".ndjson", ".parquet")]
        if source.is_dir() and not inside:
            raise Refused(f"{source} has no .txt, .jsonl, .ndjson or .parquet in it")
        paths += inside or [source]
    return [*{path.resolve(): path for path in reversed(paths)}.values()][::-1]


def stdlib_files():
    """Python's library without its tests, ordered by a hash, so that a mix is held out [ours]."""
    root = Path(os.__file__).parent
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    names = [path.relative_to(root) for path in root.rglob("*.py")]
    hashed = lambda name: hashlib.sha256(name.as_posix().encode()).digest()
    return [root / name for name in sorted(names, key=hashed) if not left_out & {*name.parts}]


# ---- the command ---------------------------------------------------------------------------------
@dataclass
class Config:
    source: list = field(default_factory=lambda: ["yours.jsonl"])  # stdlib, openwebtext, PATH …
    out: str = ""                # folder to write (default: data/NAME of the first path)
    tokenizer: Literal["gpt2", "bytes"] = "gpt2"
    field: str = "text"          # what holds the text in a JSON line or a parquet file
    # How many documents to hold out, the last ones, or all if there are fewer (default: the end of
    # the text: 1 % of its tokens, or 65,536 if that is more, but at most a tenth [ours]).
    val_docs: Size | None = None


PRESETS = {
    "stdlib": dict(source=["stdlib"], out="data/stdlib", tokenizer="bytes", val_docs=40),
    "openwebtext": dict(source=["openwebtext"], out="data/owt", val_docs=100_000),  # as published
}


def main(cfg):
    out = cfg.out or f"data/{Path(cfg.source[0]).resolve().stem}"
    if cfg.source == ["openwebtext"]:
        from datasets import load_dataset  # resumes a broken download
        docs = (doc["text"] for doc in load_dataset("Skylion007/openwebtext", split="train"))
    else:
        paths = stdlib_files() if cfg.source == ["stdlib"] else find_files(cfg.source)
        docs = documents(paths, cfg.field)
    docs = progress(docs, desc="tokenizing", unit=" documents")
    meta = prepare(docs, out, tokenizer(cfg.tokenizer), cfg.val_docs, " ".join(cfg.source))
    print(f"{out}/meta.json: {json.dumps(meta, indent=2)}")


if __name__ == "__main__":
    run(main, Config, PRESETS)
