# SPDX-License-Identifier: MIT
"""From text to rows of token ids, and the text that is held out.                        App. B.1

    python data.py stdlib                                      # Python's own library, as bytes
    python data.py yours.jsonl more/ --val_docs=300 --out=data/yours
    python data.py openwebtext                                 # needs `pip install datasets`

Sources are .txt files (one document each), .jsonl and .parquet files (one document per record, in
one text field), and folders of these, all in UTF-8. What cannot be read is refused, with its file
and record. A corpus is a folder with three files. Every document ends with EOS.

    train.bin    token ids, in uint16, or in uint32 if the tokenizer has more than 65,536
    val.bin      the same, for the end of the text, which is held out
    meta.json    tokenizer, dtype, source, documents; per split: tokens, sha256; of val: bytes

A row is BOS, L − 2 tokens of such a file, EOS. Rows do not overlap. BOS and EOS can be masked,
too [code]. Published perplexities use rows of this form that begin elsewhere (REPRODUCE.md, 16).
"""

import contextlib
import functools
import glob
import hashlib
import itertools
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
import torch
from tiktoken.load import data_gym_to_mergeable_bpe_ranks

from launch import Refused, Size, atomic, lock, progress, read_json, readable, run


# ---- rows ----------------------------------------------------------------------------------------
def prepare_preset(out):
    """Prepare data/stdlib if `out` is this folder and is missing."""
    if out == PRESETS["stdlib"]["out"] and not os.path.exists(f"{out}/meta.json"):
        main(Config(**PRESETS["stdlib"]))


@dataclass
class Tokens:
    """A split as one stream of token ids, its documents joined."""
    ids: np.ndarray  # (n_tokens,) uint16 or uint32
    tokenizer: dict  # see `describe`; `rows` needs BOS and EOS
    name: str        # its path, for error messages


def open_split(folder, split):
    """(Tokens, meta): the "train" or "val" split, memory-mapped, and the content of meta.json."""
    if not os.path.exists(f"{folder}/meta.json"):
        presets = {preset["out"]: name for name, preset in PRESETS.items()}
        words = presets.get(folder, f"yours.jsonl --tokenizer=bytes --out={folder}")
        if os.path.isfile(folder):
            words = f"{folder} --tokenizer=bytes --out=data/yours"
        raise Refused(f"there is no {folder}/meta.json: give the folder of a corpus as --data, or "
                      f"make one: `python data.py {words}`")
    meta = read_json(f"{folder}/meta.json")
    path = f"{folder}/{split}.bin"
    with readable(f"{folder}/meta.json"):
        dtype = np.dtype(meta.get("dtype", "uint16"))
        special = {name: meta["tokenizer"][name] for name in TOKENIZER}
        size = dtype.itemsize * meta[split]["tokens"]
    if os.path.getsize(path) != size:
        raise Refused(f"{path} is incomplete: `rm -r {folder}`, and prepare it again with data.py")
    # A file without tokens cannot be mapped.
    ids = np.memmap(path, dtype, "r") if size else np.empty(0, dtype)
    return Tokens(ids, special, path), meta


def n_rows(tokens, L):
    """How many rows the stream fills. Only its end is dropped [ours]."""
    n = len(tokens.ids)
    if L < 3 or n < L - 2:
        raise Refused(f"{tokens.name}: {n:,} tokens fill no row of length {L:,}: give more "
                      "text, or another --length")
    return n // (L - 2)


def rows(tokens, index, L):
    """Rows (n, L) int64: BOS, L − 2 tokens, EOS [code].   index: (n,) numbers."""
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
KEYS = 1  # a version: a run that began with other keys of `rng` cannot be resumed


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
    """A tiktoken.Encoding: "bytes", with 256 bytes, BOS and EOS, or any other that tiktoken knows.

    tiktoken downloads it once, to TIKTOKEN_CACHE_DIR. For "gpt2", the paper's, GPT2_DIR can name a
    folder with its two files instead.
    """
    if name == "bytes":
        return tiktoken.Encoding(
            "bytes", pat_str=r"(?s).{1,64}", mergeable_ranks={bytes([i]): i for i in range(256)},
            special_tokens={"<|bos|>": 256, "<|eos|>": 257})
    folder = os.environ.get("GPT2_DIR")
    names = ", ".join(tiktoken.list_encoding_names())
    with readable(f"tokenizer {name}", f" (known: bytes, {names}; offline: bytes, or gpt2 with its "
                  "vocab.bpe and encoder.json in a folder GPT2_DIR)"):
        if name != "gpt2" or not folder:
            return tiktoken.get_encoding(name)
        ranks = data_gym_to_mergeable_bpe_ranks(
            os.path.join(folder, "vocab.bpe"), os.path.join(folder, "encoder.json"),
            "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
            "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783")
        return tiktoken.Encoding("gpt2", pat_str=WORDS, mergeable_ranks=ranks,
                                 special_tokens={"<|endoftext|>": 50256})


TOKENIZER = "name", "vocab_size", "mask_id", "bos", "eos"  # its fields in meta.json


def describe(tok):
    """{field: value} of TOKENIZER. vocab_size includes [MASK]."""
    bos = 256
    eos = 257
    if tok.name != "bytes":
        with readable(f"tokenizer {tok.name}"):
            bos = eos = tok.eot_token  # <|endoftext|>
    return dict(zip(TOKENIZER, (tok.name, tok.n_vocab + 1, tok.n_vocab, bos, eos)))


def text_of(tok, ids):
    """The text of token ids. An id without bytes gives nothing: [MASK], and gaps of cl100k_base."""
    parts = []
    for i in ids:
        with contextlib.suppress(KeyError):
            parts.append(tok.decode_single_token_bytes(i))
    return b"".join(parts).decode("utf-8", "replace")


# ---- corpora -------------------------------------------------------------------------------------
def prepare(docs, out, tok, val_docs=None, source=""):
    """Write a corpus: all its files or none. Returns what meta.json holds.

    docs: yields (place, text). The place is for messages.   val_docs, source: see Config.
    """
    with (lock(out), atomic(f"{out}/meta.json") as meta_path, atomic(f"{out}/val.bin") as val,
          atomic(f"{out}/train.bin") as train):
        if os.path.exists(f"{out}/meta.json"):
            raise Refused(f"{out} holds a corpus already: give another --out, or `rm -r {out}`")
        special = describe(tok)
        sizes = []  # tokens of each document
        dtype = "uint16" if special["mask_id"] <= 65_536 else "uint32"
        with open(train, "wb") as f:
            for ids in encode(docs, tok):
                f.write(np.array([*ids, special["eos"]], dtype).tobytes())           # EOS: [code]
                sizes.append(len(ids) + 1)
        n = sum(sizes)
        held_out = sum(sizes[-val_docs:]) if val_docs else min(n // 10, max(n // 100, 65_536))
        if not held_out:
            raise Refused(f"{source}: {n:,} tokens are too few to hold out a tenth of them")
        train_ids, val_ids = np.split(np.memmap(train, dtype, "r"), [-held_out])
        meta = {"tokenizer": special, "dtype": dtype, "source": source, "documents": len(sizes)}
        for split, ids in ("train", train_ids), ("val", val_ids):
            meta[split] = {"tokens": len(ids), "sha256": hashlib.sha256(ids).hexdigest()}
        # Counted by id, to save memory. EOS is not text. Every other id here has bytes.
        meta["val"]["bytes"] = sum(count * len(tok.decode_single_token_bytes(i))
                                   for i, count in enumerate(np.bincount(val_ids).tolist())
                                   if count and i != special["eos"])
        Path(val).write_bytes(val_ids)
        os.truncate(train, train_ids.nbytes)
        Path(meta_path).write_text(json.dumps(meta, indent=2) + "\n")
    return meta


def encode(docs, tok):
    """Yields the token ids of each text that is not empty.   docs: see `prepare`."""
    docs = ((place, text) for place, text in docs if text)  # no lone EOS for an empty one [ours]
    with ThreadPoolExecutor() as pool:
        while batch := list(itertools.islice(docs, 100)):  # few: lists of ids take memory
            encoded = pool.map(tok.encode_ordinary, [text for _, text in batch])
            for place, _ in batch:
                with readable(place):  # tiktoken panics at a million spaces in a row
                    ids = next(encoded)
                yield ids


def documents(paths, field="text"):
    """Yields (place, text) of each document in the files."""
    for path in paths:
        yield from numbered(texts(path, field), path, " (data.py reads UTF-8, and in .jsonl and "
                            f".parquet a text in the field {field!r}: --field=NAME)")


def numbered(values, path, remedy):
    """Yields ("FILE, record 17", value). Whatever `values` raises becomes Refused, with its place.

    values: a generator of values that are not None, one for each record of the file.
    """
    for n in itertools.count(1):
        place = f"{path}, record {n}"
        with readable(place, remedy):
            value = next(values, None)
        if value is None:
            return
        yield place, value


def texts(path, field):
    """Yields the text of each record of a file. Errors are left to `numbered`."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        from pyarrow.parquet import ParquetFile
        batches = ParquetFile(path).iter_batches(1000, columns=[field])
        values = (text for batch in batches for text in batch.column(field).to_pylist())
    elif suffix == ".jsonl":
        values = (record[field] for record in json_lines(path))
    else:
        values = [path.read_bytes().decode("utf-8-sig")]  # line ends stay as they are
    for text in values:
        if not isinstance(text, str) or b"\0" in text.encode():  # half a surrogate pair raises
            raise ValueError("this is not text, or has a NUL in it")
        yield text


def json_lines(path):
    """Yields the value of each line that is not blank. Errors are left to `numbered`."""
    with open(path, "rb") as f:  # decoded line by line, so that errors name the right one
        for line in f:
            if line.strip():
                yield json.loads(line.decode("utf-8-sig"))  # without a byte-order mark


SUFFIXES = ".txt", ".jsonl", ".parquet"


def find_files(sources):
    """All files of the paths, each once. Hidden ones and other formats in a folder are skipped."""
    paths = {}
    for name in sources:
        os.stat(name)  # is it there?
        source = Path(name)
        names = glob.glob("**", root_dir=source, recursive=True)  # without hidden ones
        inside = sorted(path for path in map(source.joinpath, names) if path.is_file())
        files = [path for path in inside or [source] if path.suffix.lower() in SUFFIXES]
        if not files:
            raise Refused(f"{source} is no {', '.join(SUFFIXES)} file, nor a folder of such files")
        if empty := [str(path) for path in files if not path.stat().st_size]:
            raise Refused(f"empty: {', '.join(empty)}")
        if len(files) < len(inside):
            print(f"{source}: skipped {len(inside) - len(files):,} files of other formats")
        paths |= {path.resolve(): path for path in files}
    return [*paths.values()]


def stdlib_files():
    """Python's library without its tests, in hashed order, so that val.bin is a mix [ours]."""
    root = Path(os.__file__).parent
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    names = [path.relative_to(root) for path in root.rglob("*.py")]
    hashed = lambda name: hashlib.sha256(name.as_posix().encode()).digest()
    return [root / name for name in sorted(names, key=hashed) if not left_out & {*name.parts}]


# ---- the command ---------------------------------------------------------------------------------
@dataclass
class Config:
    source: list = ("yours.jsonl",)  # stdlib, openwebtext, PATH …
    out: str = ""                # folder to write (default: data/NAME of the first path)
    tokenizer: str = "gpt2"      # the paper's; bytes; or another name that tiktoken knows
    field: str = "text"          # name of the text field in a .jsonl or .parquet
    # How many of the last documents to hold out, or all if there are fewer (default: the last 1 %
    # of the tokens, or 65,536 if that is more, but at most a tenth [ours]).
    val_docs: Size | None = None


PRESETS = {
    "stdlib": dict(source=["stdlib"], out="data/stdlib", tokenizer="bytes", val_docs=40),
    "openwebtext": dict(source=["openwebtext"], out="data/owt", val_docs=100_000),  # as published
}


def main(cfg):
    out = cfg.out or f"data/{Path(cfg.source[0]).resolve().stem}"
    if cfg.source[0] in PRESETS and cfg.val_docs is None:
        raise Refused(f"{cfg.source[0]} is a preset: make it the first word, or give --val_docs")
    tok = tokenizer(cfg.tokenizer)  # before OpenWebText, which takes hours to download
    if cfg.source == ["openwebtext"]:
        from datasets import load_dataset  # resumes a broken download
        corpus = load_dataset("Skylion007/openwebtext", split="train")
        docs = enumerate(row["text"] for row in corpus)
    else:
        paths = stdlib_files() if cfg.source == ["stdlib"] else find_files(cfg.source)
        docs = documents(paths, cfg.field)
    docs = progress(docs, desc="tokenizing", unit=" documents")
    meta = prepare(docs, out, tok, cfg.val_docs, " ".join(cfg.source))
    print(f"{out}/meta.json: {json.dumps(meta, indent=2)}")


if __name__ == "__main__":
    run(main, Config, PRESETS)
