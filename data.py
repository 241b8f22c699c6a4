# SPDX-License-Identifier: MIT
"""From text to rows of token ids, in the layout that published OpenWebText numbers use.   App. B.1

    python data.py stdlib                                      # Python's own library, as bytes
    python data.py yours.jsonl.xz more/ --val_docs=300 --out=data/yours
    python data.py openwebtext                                 # needs `pip install datasets`

A corpus is a folder with three files. Every document ends with EOS, unless `held_out` cuts it.

    train.bin    uint16 token ids
    val.bin      the same, for the last documents, which are held out
    meta.json    the tokenizer, the source, and for both splits: documents, tokens, bytes, sha256

A row is BOS, L − 2 tokens of such a file, EOS. Rows do not overlap, and BOS and EOS are masked,
too [code]. Perplexities on rows of another form are not comparable with published ones.
"""

import array
import functools
import gzip
import hashlib
import itertools
import json
import lzma
import math
import os
import re
import sysconfig
import zlib
from collections import Counter
from dataclasses import dataclass
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
    if not os.path.exists(dir):
        raise Refused(f"there is no folder {dir}: give --data, or make it with data.py (data/owt: "
                      f"`python data.py openwebtext`). `python train.py stdlib` needs none")
    if not os.path.exists(f"{dir}/meta.json"):
        raise Refused(f"no data in {dir}, which has no meta.json. If it holds texts: "
                      f"`python data.py {dir} --out=data/NAME`, and then --data=data/NAME")
    meta = read_json(f"{dir}/meta.json")
    path = f"{dir}/{split}.bin"
    ids = np.memmap(path, np.uint16, "r")
    if len(ids) != meta[split]["tokens"]:
        raise Refused(f"{path} is incomplete: prepare {dir} again with data.py")
    return Tokens(ids, meta["tokenizer"], path), meta


def n_rows(tokens, L):
    """How many rows the stream fills. Only its end is dropped [ours]."""
    n = len(tokens.ids)
    if n < L - 2:
        shorter = f", or train with --length={2 ** int(math.log2(n // 100))}" if n >= 3200 else ""
        raise Refused(f"{tokens.name}: {n:,} tokens do not fill one row of length {L:,}: give "
                      f"more text{shorter}")
    return n // (L - 2)


def rows(tokens, index, L):
    """Rows (n, L) int64: BOS, L − 2 tokens, EOS.                                   App. B.1, [code]

    tokens: Tokens.   index: (n,) row numbers, below n_rows(tokens, L).   L: with BOS and EOS.
    """
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


def text_rows(docs, tok, L):
    """A stream of texts as rows (n, L) int64, and its {documents, tokens, bytes}."""
    encoded = list(encode(docs, tok))
    ids = np.concatenate([np.empty(0, np.uint16), *(ids for ids, _ in encoded)])
    tokens = Tokens(ids, describe(tok), "the text")
    x = rows(tokens, range(n_rows(tokens, L)), L)                        # (n, L)
    return x, {"documents": len(encoded), "tokens": len(ids), "bytes": sum(s for _, s in encoded)}


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


def tokenizer(name="gpt2", dir=None):
    """A tiktoken.Encoding: "gpt2", the paper's, or "bytes", with 256 bytes, BOS and EOS.

    dir: folder of GPT-2's vocab.bpe and encoder.json (default: tiktoken's cache, or a download).
    """
    if name == "bytes":
        return tiktoken.Encoding(
            "bytes", pat_str=r"(?s).{1,64}", mergeable_ranks={bytes([i]): i for i in range(256)},
            special_tokens={"<|bos|>": 256, "<|eos|>": 257})
    if not dir:
        try:
            return tiktoken.get_encoding(name)
        except OSError:
            raise Refused("GPT-2's vocabulary cannot be downloaded: copy tiktoken's cache from "
                          "elsewhere, set TIKTOKEN_CACHE_DIR=FOLDER, or give --tokenizer=bytes or "
                          "--tokenizer_dir=FOLDER with vocab.bpe and encoder.json")
    ranks = data_gym_to_mergeable_bpe_ranks(
        os.path.join(dir, "vocab.bpe"), os.path.join(dir, "encoder.json"),
        "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
        "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783")
    return tiktoken.Encoding("gpt2", pat_str=WORDS, mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": 50256})


def describe(tok):
    """{name, vocab_size, mask_id, bos, eos}, as in meta.json. vocab_size includes [MASK]."""
    ends = sorted(map(tok.encode_single_token, tok.special_tokens_set))  # GPT-2 has only one
    return {"name": tok.name, "vocab_size": tok.n_vocab + 1, "mask_id": tok.n_vocab,
            "bos": ends[0], "eos": ends[-1]}


# ---- corpora -------------------------------------------------------------------------------------
MIN_HELD_OUT = 65_536  # tokens, unless --val_docs is given


def prepare(docs, out, tok, val_docs=None, source=""):
    """Write train.bin, val.bin and meta.json into the folder `out`: all of them or none.

    docs: a stream of texts.   source: where they come from.   val_docs: see Config.
    Returns the content of meta.json.
    """
    with (lock(out), atomic(f"{out}/meta.json") as meta_path, atomic(f"{out}/val.bin") as val,
          atomic(f"{out}/train.bin") as train):
        tokens, n_bytes = array.array("q"), array.array("q")  # of each document
        with open(train, "wb") as f:
            for ids, size in encode(docs, tok):
                f.write(ids.tobytes())
                tokens.append(len(ids))
                n_bytes.append(size)
        n, n_tokens = len(tokens), sum(tokens)
        n_whole, val_tokens = held_out(tokens, val_docs)
        start = n_tokens - val_tokens  # of val.bin in the stream
        if not 0 < start < n_tokens:
            raise Refused(f"{n_tokens:,} tokens, {val_tokens:,} of them held out: give more text")
        ids = np.memmap(train, np.uint16, "r")
        ids[start:].tofile(val)
        # val.bin may begin with the end of a document that was cut. cut: this end, without its EOS.
        cut = ids[start:n_tokens - sum(tokens[n - n_whole:])][:-1].tolist()
        if sum(tokens[n - n_whole:]) < val_tokens:
            print("train.bin ends within a document. The rest of it is in val.bin.")
        val_bytes = sum(n_bytes[n - n_whole:]) + len(tok.decode_bytes(cut))
        os.truncate(train, 2 * start)
        train_bytes = sum(n_bytes) - val_bytes
        meta = {"tokenizer": describe(tok), "source": source,
                "train": {"documents": n - n_whole, "tokens": start, "bytes": train_bytes},
                "val": {"documents": n_whole, "tokens": val_tokens, "bytes": val_bytes}}
        for split, path in ("train", train), ("val", val):
            meta[split]["sha256"] = hashlib.sha256(np.memmap(path, np.uint8, "r")).hexdigest()
        Path(meta_path).write_text(json.dumps(meta, indent=2) + "\n")
        # When this block ends, train.bin gets its name first. A kill right after that must not
        # leave it beside the old meta.json.
        Path(out, "meta.json").unlink(missing_ok=True)
    return meta


def held_out(tokens, val_docs=None):
    """(whole documents, tokens) that are held out, at the end of the text

    Without val_docs: 1 % of the documents, but no more than 10,000. If these have fewer than
    MIN_HELD_OUT tokens, too few to say much, more are added until there are enough. Never more than
    a tenth of the text: a document may be cut for that [ours].   tokens: of each document.
    """
    n = len(tokens)
    last = np.concatenate(([0], np.cumsum(tokens[::-1])))  # tokens of the last 0, 1, … documents
    if val_docs:
        held = last[min(val_docs, n)]
    else:
        enough = max(last[min(10_000, n // 100)], MIN_HELD_OUT)
        held = min(last[min(np.searchsorted(last, enough), n)], last[n] // 10)
    return int(np.searchsorted(last, held, "right")) - 1, int(held)


def encode(docs, tok):
    """Yields (uint16 ids, number of bytes) for each text. The last id is EOS [code].

    Empty texts are dropped: a lone EOS would be their only trace [ours].
    """
    docs, eos = filter(None, docs), describe(tok)["eos"]
    while texts := list(itertools.islice(docs, 100)):  # few at a time: lists of ids take memory
        batch = tok.encode_ordinary_batch(texts, num_threads=os.cpu_count())
        for ids, text in zip(batch, texts):
            size = len(text.encode(errors="replace"))  # JSON can hold what UTF-8 cannot
            yield np.array([*ids, eos], np.uint16), size


def documents(paths, field="text"):
    """Yields the texts of all files. Raises Refused for a broken file or a record without text."""
    for path in paths:
        try:
            yield from read_file(path, field)
        except UnicodeDecodeError:
            raise Refused(f"{path} is not UTF-8: convert it, as with `iconv -f latin1 -t utf-8`")
        except (ValueError, TypeError, KeyError, EOFError, gzip.BadGzipFile, lzma.LZMAError,
                zlib.error) as e:  # KeyError: a parquet file lacks the column
            hint = ": data.py takes --field=NAME" if isinstance(e, KeyError) else ""
            raise Refused(f"{path}: {e}{hint}")


def find_files(source):
    """The files of `source`: paths joined by os.pathsep. In a folder: all texts, but no .json."""
    paths = []
    for path in source.split(os.pathsep):
        os.stat(path)  # also raises for "", which Path would take for the current folder
        files = [p for p in sorted(Path(path).rglob("*")) if p.is_file()]
        inside = [p for p in files
                  if re.search(r"(?i)\.(txt|jsonl|ndjson|parquet)(\.gz|\.xz)?$", p.name)]
        if os.path.isdir(path) and not inside:
            raise Refused(f"{path} has no .txt, .jsonl, .ndjson or .parquet in it")
        skipped = Counter(p.suffix or p.name for p in sorted({*files} - {*inside}))
        if skipped:
            kinds = ", ".join(f"{n:,} {kind}" for kind, n in skipped.most_common())
            print(f"{path}: files of other kinds are skipped: {kinds}")
        known = re.search(r"(?i)\.(txt|json|jsonl|ndjson|parquet)(\.gz|\.xz)?$", path)
        if os.path.isfile(path) and not known:
            print(f"{path}: read as one plain text")
        paths += inside or [Path(path)]
    return paths


def read_file(path, field):
    """Yields the texts of one file. `documents` turns what it raises into Refused."""
    name = path.name.lower()
    if name.endswith(".parquet"):
        from pyarrow.parquet import ParquetFile
        for batch in ParquetFile(path).iter_batches(1000, columns=[field]):
            yield from (text + "" for text in batch.column(field).to_pylist())  # fails for null
        return
    unpack = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix.lower(), open)
    # utf-8-sig skips a byte-order mark. With newline="", line ends stay the bytes that they are.
    with unpack(path, "rt", encoding="utf-8-sig", newline="") as f:
        if re.search(r"\.(jsonl|ndjson|json)(\.gz|\.xz)?$", name):
            yield from texts_in(f, field)
        else:
            yield f.read()


def texts_in(f, field):
    """Yields the text in each line of a .jsonl."""
    for n, line in enumerate(f, 1):
        try:
            if line.strip():
                yield json.loads(line)[field] + ""  # fails for what is not text
        except (ValueError, LookupError, TypeError) as e:
            raise ValueError(f'line {n} is not like {{"{field}": "…"}} ({in_short(e)}). If the '
                             f"text is in another field, data.py takes --field=NAME")


def stdlib_files():
    """Python's library without its tests, ordered by a hash, so that a mix is held out [ours]."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    names = [path.relative_to(root).as_posix() for path in root.rglob("*.py")]
    names = [name for name in names if not left_out & set(name.split("/"))]
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    return [root / name for name in names]


# ---- the command ---------------------------------------------------------------------------------
@dataclass
class Config:
    source: str = ""             # stdlib, openwebtext, or PATH PATH …
    out: str = ""                # folder to write (default: data/NAME of the first path)
    tokenizer: Literal["gpt2", "bytes"] = "gpt2"
    tokenizer_dir: str = ""      # folder of GPT-2's vocab.bpe and encoder.json (default: download)
    field: str = "text"          # what holds the text in a JSON line or a parquet file
    # How many documents to hold out, the last ones (default: 1 %, up to 10,000, with at least
    # 65,536 tokens, but at most a tenth of the text).
    val_docs: Size | None = None
    overwrite: bool = False      # replace the corpus in `out`


PRESETS = {
    "stdlib": dict(source="stdlib", out="data/stdlib", tokenizer="bytes", val_docs=40),
    "openwebtext": dict(source="openwebtext", out="data/owt", val_docs=100_000),  # as published
}


def main(cfg):
    first = cfg.source.split(os.pathsep)[0]
    if first not in PRESETS and not os.path.exists(first):
        raise Refused(f"there is no {first or 'text'}: give files or folders, as in `python "
                      f"data.py yours.jsonl`, or one of {', '.join(PRESETS)}")
    out = cfg.out or "data/" + Path(first).name.split(".")[0]
    if os.path.exists(f"{out}/meta.json") and not cfg.overwrite:
        before = read_json(f"{out}/meta.json")["source"]
        raise Refused(f"{out} holds the text of {before}: give another --out, or --overwrite, but "
                      f"then no run on the old text can be resumed")
    tok = tokenizer(cfg.tokenizer, cfg.tokenizer_dir)
    if cfg.source == "openwebtext":
        import datasets  # resumes a broken download
        docs = datasets.load_dataset("Skylion007/openwebtext", split="train")
        docs = (record["text"] for record in progress(docs, desc="tokenizing", unit=" documents"))
    else:
        paths = stdlib_files() if cfg.source == "stdlib" else find_files(cfg.source)
        docs = progress(documents(paths, cfg.field), desc="tokenizing", unit=" documents")
    meta = prepare(docs, out, tok, cfg.val_docs, cfg.source)
    for split in "train", "val":
        print("{}/{}.bin: {documents:,} documents, {tokens:,} tokens, sha256 {sha256}".format(
            out, split, **meta[split]))


if __name__ == "__main__":
    run(main, Config, PRESETS, paths="source")
