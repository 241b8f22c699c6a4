# SPDX-License-Identifier: MIT
"""Text in, rows of token ids out: the published OpenWebText layout, for any text.         App. B.1

A corpus becomes two flat files of uint16 ids, with EOS after every document, and a description:

    train.bin    val.bin (the last documents)
    meta.json    {format, tokenizer, source, train and val: documents, tokens, bytes, sha256}

A row is BOS + L − 2 tokens of that stream + EOS, and rows do not overlap [code]. Perplexities on
rows that are cut in another way cannot be compared with these.

    python data.py sudoku                                      # 6×6 grids, drawn uniformly
    python data.py stdlib                                      # Python's own library, as bytes
    python data.py novels.jsonl.xz more/ --val_docs=300 --out=data/novels
    python data.py openwebtext                                 # needs `pip install datasets`

Not here: a DataLoader, workers, shuffling state. A batch is a function of its number, so a run
that resumes sees no row twice in an epoch. Preparing data takes seconds to minutes, except for
OpenWebText, and starts again after a stop.
"""

import collections
import gzip
import hashlib
import itertools
import json
import lzma
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
import torch
from tiktoken.load import data_gym_to_mergeable_bpe_ranks

import sudoku
from launch import Refused, Size, atomic, join_values, lock, progress, read_json, run

FORMAT = "soft-masked-mdlm-data/1"

# GPT-2 first splits a text into these words. No token contains parts of two words.
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# All of OpenWebText, with one EOS per document, as nanoGPT reports it.
OWT = {"documents": 8_013_769, "tokens": 9_040_017_095}


def tokenizer(name="gpt2", dir=None):
    """A tiktoken.Encoding. It has no [MASK]: the mask id is the first free one, tok.n_vocab.

    name: "gpt2", the paper's, or "bytes": 256 bytes, BOS and EOS.
    dir: a folder with GPT-2's vocab.bpe and encoder.json (default: tiktoken's cache, or download).
    Raises Refused for another name, and when the vocabulary cannot be read.
    """
    if name == "bytes":
        return tiktoken.Encoding(
            "bytes", pat_str=r"(?s).{1,64}", mergeable_ranks={bytes([i]): i for i in range(256)},
            special_tokens={"<|bos|>": 256, "<|eos|>": 257})
    if name != "gpt2":
        raise Refused(f"tokenizer {name!r} is unknown: use gpt2 or bytes")
    try:
        if not dir:
            return tiktoken.get_encoding("gpt2")
        ranks = data_gym_to_mergeable_bpe_ranks(
            os.path.join(dir, "vocab.bpe"), os.path.join(dir, "encoder.json"),
            "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
            "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783")
    except Exception as e:  # no network, no file, a wrong file: the remedy is the same
        place = dir or "the cache of tiktoken"
        raise Refused(f"GPT-2's vocabulary is not in {place} ({type(e).__name__}): give "
                      f"--tokenizer_dir=FOLDER with the original vocab.bpe and encoder.json, or "
                      f"use --tokenizer=bytes")
    return tiktoken.Encoding("gpt2", pat_str=WORDS, mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": 50256})


def describe(tok):
    """{name, vocab_size, mask_id, bos, eos}, as in meta.json. The vocabulary counts [MASK]."""
    ends = sorted(map(tok.encode_single_token, tok.special_tokens_set))  # GPT-2 has only one
    return {"name": tok.name, "vocab_size": tok.n_vocab + 1, "mask_id": tok.n_vocab,
            "bos": ends[0], "eos": ends[-1]}


# -------------------------------------------------------------------------------------------------
# prepared data


def open_split(dir, split):
    """(tokens, meta): the stream of "train" or "val", memory-mapped, and what meta.json holds.

    tokens: uint16. tokens.tokenizer is meta["tokenizer"].
    Raises Refused when a file is missing, empty, or not what meta.json says.
    """
    path, meta_path = Path(dir, f"{split}.bin"), Path(dir, "meta.json")
    if os.path.isfile(dir):
        raise Refused(f"{dir} is a file, not a folder made by data.py: prepare it with `python "
                      f"data.py {dir}`, then give {folder_of(str(dir))}")
    if not (path.is_file() and meta_path.is_file()):
        presets = [name for name, fields in PRESETS.items() if fields["out"] == str(dir)]
        source = presets[0] if presets else f"PATH --out={dir}"
        raise Refused(f"no {split}.bin with a meta.json in {dir}: prepare them with "
                      f"`python data.py {source}`")
    try:
        meta = read_json(meta_path)
        special, n, n_bytes = meta["tokenizer"], meta[split]["tokens"], meta[split]["bytes"]
        ids = range(special["mask_id"])
        known = (special["vocab_size"] == special["mask_id"] + 1 <= 2**16
                 and special["bos"] in ids and special["eos"] in ids
                 and {type(n), type(n_bytes)} == {int} and min(n, n_bytes) >= 0
                 and {type(special["name"]), type(meta[split]["sha256"])} == {str})
    except Exception:  # it may hold anything
        known = False
    if not known or meta.get("format") != FORMAT:
        raise Refused(f"{meta_path} does not describe data in the format {FORMAT}: prepare it "
                      f"again with data.py")
    size = path.stat().st_size
    if n == 0 or size != 2 * n:
        raise Refused(f"{path} has {size:,} bytes for {n:,} tokens of two: prepare it again with "
                      f"data.py")
    tokens = np.memmap(path, np.uint16, "r")
    tokens.tokenizer = special  # `rows` needs BOS, EOS and the size of the vocabulary
    return tokens, meta


def n_rows(tokens, L):
    """The number of whole rows. Only the end of the stream is dropped [ours].

    The authors drop the remainder of every 1,000 documents [code].
    """
    if len(tokens) < L - 2:
        raise Refused(f"{len(tokens):,} tokens do not fill one row of length {L:,}: give more "
                      f"text or a shorter length")
    return len(tokens) // (L - 2)


def rows(tokens, index, L):
    """Rows as the published perplexities have them: BOS, L − 2 tokens, EOS.      App. B.1, [code]

    tokens: a stream from `open_split`.   index: row numbers (n,), below n_rows(tokens, L).
    L: length, in tokens.
    Returns (n, L) int64. Raises Refused for an id that is not in the vocabulary of the stream.
    """
    special = tokens.tokenizer
    x = torch.empty(len(index), L, dtype=torch.int64)                    # (n, L)
    x[:, 0] = special["bos"]
    x[:, -1] = special["eos"]
    for row, i in zip(x, index):
        start = int(i) * (L - 2)
        row[1:-1] = torch.from_numpy(tokens[start:start + L - 2].astype(np.int64))
    # Without this check, the embedding on a GPU would end in a "device-side assert".
    if len(x) and x.max() >= special["mask_id"]:
        raise Refused(f"token id {x.max()} in {tokens.filename}, but the ids of {special['name']} "
                      f"end at {special['mask_id'] - 1}: the file is damaged or of another "
                      f"tokenizer, prepare it again")
    return x


def text_rows(docs, tok, L):
    """Rows of a text that is not prepared.

    docs: a stream of (text, is_last), such as [("A whole text.", True)].
    Returns them (n, L) int64, and the {documents, tokens, bytes} of the text. Raises Refused for a
    text that does not fill a row.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as tmp:
        path = os.path.join(tmp, "tokens")
        counts = dict(zip(("documents", "tokens", "bytes"), encode(docs, path, tok)[-1]))
        n = n_rows(range(counts["tokens"]), L)
        tokens = np.memmap(path, np.uint16, "r")
        tokens.tokenizer = describe(tok)
        return rows(tokens, range(n), L), counts


KEYS = 1  # version of the keys below: a run that began with other draws cannot be resumed


def seed_of(*key):
    """56 bits that stand for what a draw is for, such as seed_of(seed, "dropout", step, j)."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=7).digest(), "big")


def rng(*key):
    """The generator of one draw, seeded by what the draw is for, such as rng(seed, "t", step).

    So a checkpoint has no random state to save, and ranks need not be kept in step. Torch's CPU
    generator uses the low 32 bits of a seed: one in 2^32 pairs of keys makes the same draws. So of
    5,000 samples, two are copies with a probability of 0.3 %. Of the 16 million micro-batches of
    the paper's run, some 30,000 pairs have the same masks, on other texts.
    """
    return torch.Generator().manual_seed(seed_of(*key))


def order(n, epoch, seed):
    """The permutation (n,) of n rows in this epoch, the same on every rank and machine."""
    return torch.randperm(n, generator=rng("order", epoch, seed))


# -------------------------------------------------------------------------------------------------
# reading a corpus: a stream of (text, is_last), in which is_last marks the end of a document


def parse(path, raw):
    """The stream of a file `raw`: parquet or JSON lines with a "text" each, else one plain text.

    All but parquet may be packed as .gz or .xz. Plain text comes in blocks.
    """
    if path.suffix.lower() == ".parquet":
        try:
            from pyarrow.parquet import ParquetFile
        except ImportError:
            raise Refused(f"{path} needs pyarrow: pip install pyarrow")
        batches = ParquetFile(raw).iter_batches(1000, columns=["text"])
        return ((text, True) for batch in batches for text in batch["text"].to_pylist())
    unpack = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix.lower())
    if unpack:
        f, name = unpack(raw, "rt", encoding="utf-8"), path.stem
    else:
        f, name = open(raw.fileno(), encoding="utf-8", closefd=False), path.name
    if name.lower().endswith((".jsonl", ".ndjson", ".json")):
        return ((json.loads(line)["text"], True) for line in f if line.strip())
    blocks = iter(lambda: f.read(2**16), "")
    return itertools.chain(((block, False) for block in blocks), [("", True)])


def read_file(path):
    """Yields (text, is_last, bytes of the file read so far). Refuses a file that is broken."""
    try:
        with open(path, "rb") as raw:
            for text, last in parse(path, raw):
                if not isinstance(text, str):
                    raise TypeError(f"{text!r} is no text")
                yield text, last, raw.tell()
    except Refused:
        raise
    except Exception as e:  # a broken file can raise anything, and each format has its own errors
        raise Refused(f"{path} cannot be read ({type(e).__name__}: {e}): it must be whole, UTF-8, "
                      f"every record with a \"text\"")


def documents(paths):
    """The stream of all files, with a progress bar that counts bytes of file."""
    size, done = sum(path.stat().st_size for path in paths), 0
    with progress(total=size, unit="B", unit_scale=True, desc="tokenizing") as bar:
        for path in paths:
            for text, last, position in read_file(path):
                yield text, last
                bar.update(done + position - bar.n)
            done += path.stat().st_size


def find_files(source):
    """The paths of all files in `source`, which is PATH… joined by the system's path separator.

    A folder stands for its .txt, .jsonl, .ndjson and .parquet files, in the order of their names.
    """
    paths = []
    for path in map(Path, source.split(os.pathsep)):
        inside = [p for p in sorted(path.rglob("*"))
                  if re.search(r"(?i)\.(txt|jsonl|ndjson|parquet)(\.gz|\.xz)?$", p.name)]
        if not source or not inside and not path.is_file():
            raise Refused(f"{str(path)!r} is neither a file nor a folder with .txt, .jsonl, "
                          f".ndjson or .parquet files: give a PATH")
        paths += inside or [path]
    return paths


def stdlib_files():
    """Python's own library without its tests, sorted by the hash of the names.

    So the last files, which are held out, are of every kind [ours].
    """
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    names = [path.relative_to(root).as_posix() for path in root.rglob("*.py")]
    names = [name for name in names if not left_out & set(name.split("/"))]
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    return [root / name for name in names]


def openwebtext(hub, revision):
    """The stream of OpenWebText from the hub. A download that broke goes on where it was."""
    try:
        import datasets
        corpus = datasets.load_dataset(hub, split="train", revision=revision)
    except ImportError:
        raise Refused("openwebtext needs datasets: pip install datasets")
    except Exception as e:  # the network, the disk, versions: the remedies are the same
        raise Refused(f"openwebtext cannot be loaded ({type(e).__name__}: {e}): try "
                      f"--revision=refs/convert/parquet, or fetch its parquet files otherwise: "
                      f"python data.py FOLDER --val_docs=100000 --out=data/owt")
    records = progress(corpus, desc="tokenizing", unit="doc")
    return ((record["text"], True) for record in records)


# -------------------------------------------------------------------------------------------------
# preparing a corpus


def split_long_texts(docs, size=2**16):
    """The same stream, in which no text is longer than 3 · size characters.

    A text is cut before white space that follows something else, where a word of GPT-2 always ends.
    So the tokens are those of the whole text. A text that has no such place in `size` characters is
    cut too, between two of its characters.
    """
    rest = ""
    for text, last in docs:
        for start in range(0, len(text), size):
            if len(rest) >= size:
                end = re.match(r"(?s).*\S(?=[ \t\r\n])", rest)
                cut = end.end() if end else len(rest)
                yield rest[:cut], False
                rest = rest[cut:]
            rest += text[start:start + size]
        if last:
            yield rest, True
            rest = ""


def encode(docs, out, tok, keep=0):
    """Tokenize a stream into one flat uint16 file, with EOS after each document [code].

    docs: a stream of (text, is_last).   out: path of the file.
    Returns counts (documents, tokens, bytes of text): one at the start of the corpus, and one after
    each document. Only the last keep + 1 are kept. Raises Refused for ids of more than 16 bits.
    """
    if tok.n_vocab >= 2**16:
        raise Refused(f"{tok.name} and [MASK] have {tok.n_vocab + 1:,} ids, and uint16 has "
                      f"65,536: use a smaller one")
    eos, docs = describe(tok)["eos"], split_long_texts(docs)
    counts = np.zeros(3, np.int64)                                       # documents, tokens, bytes
    ends = collections.deque([(0, 0, 0)], maxlen=keep + 1)
    with open(out, "wb") as f:
        while batch := list(itertools.islice(docs, 100)):  # few: these ids take 8 bytes each
            texts = [text for text, _ in batch]
            ids = tok.encode_ordinary_batch(texts, num_threads=os.cpu_count())
            for part, (text, last) in zip(ids, batch):
                f.write(np.array(part + [eos] * last, np.uint16).tobytes())
                counts += last, len(part) + last, len(text.encode(errors="replace"))
                if last:
                    ends.append(tuple(counts.tolist()))
    return ends


def folder_of(source):
    """The folder for a source, unless --out names another: data/NAME of its first path."""
    return os.path.join("data", Path(source.split(os.pathsep)[0]).name.split(".")[0])


def prepare(docs, out, tok, val_docs=None, source=""):
    """Write train.bin, val.bin and meta.json into the folder `out`, all of them or none.

    docs: a stream of (text, is_last).
    val_docs: documents to hold out, the last ones (default: 1 %, at least 1, at most 10,000; of a
        corpus of one document, the last tenth [ours]).
    source: what meta.json says about where the text is from.
    Returns what meta.json holds. Raises Refused when nothing is left to train on.
    """
    if val_docs is not None and val_docs < 1:
        raise Refused(f"--val_docs={val_docs} holds nothing out: give at least 1")
    with (lock(out), atomic(f"{out}/meta.json") as meta_path, atomic(f"{out}/val.bin") as val,
          atomic(f"{out}/train.bin") as train):
        ends = encode(docs, train, tok, keep=val_docs or 10_000)
        n, tokens, size = ends[-1]
        if not size:
            raise Refused(f"{source or 'the source'} holds no text: give another")
        held_out = val_docs or min(10_000, max(1, n // 100))
        cut = ends[-1 - held_out] if held_out < n else (n, tokens * 9 // 10, size * 9 // 10)
        if val_docs and held_out >= n or cut[1] == 0:
            raise Refused(f"holding out {held_out} of {n} documents leaves nothing to train on: "
                          f"lower --val_docs, or give more")
        with open(train, "r+b") as f, open(val, "wb") as g:
            f.seek(2 * cut[1])
            shutil.copyfileobj(f, g)
            f.truncate(2 * cut[1])
        meta = {"format": FORMAT, "tokenizer": describe(tok), "source": source}
        rest = [whole - part for whole, part in zip(ends[-1], cut)]
        for split, path, counts in ("train", train, cut), ("val", val, rest):
            numbers = zip(("documents", "tokens", "bytes"), counts)
            digest = hashlib.sha256(np.memmap(path, np.uint8, "r"))
            meta[split] = dict(numbers, sha256=digest.hexdigest())
        Path(meta_path).write_text(json.dumps(meta, indent=2) + "\n")
        # Three files are renamed now, meta.json last. If the process is killed in between, new and
        # old files must not pass for one corpus.
        Path(out, "meta.json").unlink(missing_ok=True)
    return meta


@dataclass
class Config:
    source: str = ""             # sudoku, stdlib, openwebtext, or PATH…, joined by the separator
    out: str = ""                # folder to write (default: data/NAME of the first path)
    tokenizer: str = "gpt2"      # or bytes
    tokenizer_dir: str = ""      # folder of GPT-2's vocab.bpe and encoder.json
    val_docs: Size | None = None  # documents to hold out, the last ones (default: about 1 %)
    grids: Size = 200_000        # Sudokus to train on
    hub: str = "Skylion007/openwebtext"  # where OpenWebText is, or a folder of the same layout
    revision: str | None = None  # of the hub: refs/convert/parquet if its main branch is a script
    overwrite: bool = False      # replace data of another source


PRESETS = {
    "sudoku": dict(source="sudoku", out="data/sudoku", tokenizer="bytes", val_docs=2000),
    "stdlib": dict(source="stdlib", out="data/stdlib", tokenizer="bytes", val_docs=40),
    # the published split
    "openwebtext": dict(source="openwebtext", out="data/owt", val_docs=100_000),
}


def main(cfg):
    out = cfg.out or folder_of(cfg.source)
    meta_path = os.path.join(out, "meta.json")
    there = read_json(meta_path).get("source") if os.path.exists(meta_path) else cfg.source
    if there != cfg.source and not cfg.overwrite:
        raise Refused(f"{out} holds the text of {there or 'an unknown source'}: give another "
                      f"--out, or --overwrite")
    n_val = cfg.val_docs
    if cfg.source == "openwebtext":
        docs = openwebtext(cfg.hub, cfg.revision)
    elif cfg.source == "sudoku":
        n_val = cfg.val_docs or PRESETS["sudoku"]["val_docs"]
        train, val = (sudoku.texts(n, rng("sudoku", split))
                      for n, split in ((cfg.grids, "train"), (n_val, "val")))
        shared = len(set(train) & set(val))
        print(f"{shared} of {len(val):,} held-out grids stand in the training text")
        docs = ((text, True) for text in train + val)
    else:
        docs = documents(stdlib_files() if cfg.source == "stdlib" else find_files(cfg.source))
    tok = tokenizer(cfg.tokenizer, cfg.tokenizer_dir)
    meta = prepare(docs, out, tok, n_val, cfg.source)
    for split in "train", "val":
        print("{}/{}.bin: {documents:,} documents, {tokens:,} tokens, sha256 {sha256}".format(
            out, split, **meta[split]))
    if meta["val"]["tokens"] < 10_000:
        print("So short a held-out text makes noisy bounds: hold out more with --val_docs, if "
              "there are more documents")
    total = {unit: meta["train"][unit] + meta["val"][unit] for unit in OWT}
    if total == OWT:
        print("the whole of OpenWebText")
    elif cfg.source == "openwebtext":
        print(f"not the whole of OpenWebText, {total} instead of {OWT}: perplexities do not "
              f"compare with published ones")


def prepare_preset(out):
    """Make the corpus of the preset that has this folder, if it needs no download and is missing.

    out: data/sudoku or data/stdlib, which every machine can make. Nothing is done for others.
    """
    preset = next((p for p in PRESETS.values() if p["out"] == out), {})
    there = os.path.exists(os.path.join(out, "meta.json"))
    if preset.get("source") in ("sudoku", "stdlib") and not there:
        main(Config(**preset))


def with_source(argv):
    """The words of a command line, with `--source=PATH…` for its PATH…"""
    argv = join_values(Config, argv)
    paths = [word for word in argv if not word.startswith("-")]
    if not paths or len(paths) == 1 and paths[0] in PRESETS:
        return argv
    source = f"--source={os.pathsep.join(paths)}"
    return [source, *(word for word in argv if word.startswith("-"))]


if __name__ == "__main__":
    sys.argv[1:] = with_source(sys.argv[1:])
    run(main, Config, PRESETS)
