# SPDX-License-Identifier: MIT
"""Text in, rows of token ids out: the published OpenWebText layout, or the same for any text.                  App. B.1

A corpus becomes two flat files of uint16, EOS after every document, and a description:

    train.bin   val.bin (the last documents)   meta.json {tokenizer, train and val: documents, tokens, bytes, sha256}

A row is BOS + L − 2 tokens of that stream + EOS, and rows do not overlap [code]. Another cut gives another perplexity.

    python data.py stdlib                                                # Python's own library as bytes: data/stdlib
    python data.py novels.jsonl.xz more/ --val_docs=300 --out=data/novels
    python data.py openwebtext                                           # needs `pip install datasets`: data/owt

Not here: a DataLoader, workers, shuffling state. A batch is a function of its number, so a run that resumes cannot see
a row twice. Preparing is the one thing that starts over when stopped: it takes seconds to minutes.
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
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
import torch
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from tqdm import tqdm

from launch import Refused, atomic, run

FORMAT = "soft-masked-mdlm-data/1"
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # GPT-2's: no token crosses their bounds
OWT = {"documents": 8_013_769, "tokens": 9_040_017_095}  # its whole in GPT-2's tokens, one EOS each, as nanoGPT counts


def tokenizer(name="gpt2", dir=None):
    """A tiktoken.Encoding. [MASK] is not in it: the model's mask id is the first that is free, tok.n_vocab.

    name: "gpt2", the paper's, or "bytes": 256 bytes, BOS, EOS.   dir: a folder with GPT-2's vocab.bpe and encoder.json;
    without it tiktoken's cache or download. Raises Refused for another name, or when the vocabulary is not to be had.
    """
    if name == "bytes":
        return tiktoken.Encoding("bytes", pat_str=r"(?s).{1,64}", mergeable_ranks={bytes([i]): i for i in range(256)},
                                 special_tokens={"<|bos|>": 256, "<|eos|>": 257})
    if name != "gpt2":
        raise Refused(f"tokenizer {name!r} is unknown: use gpt2 or bytes")
    try:
        if not dir:
            return tiktoken.get_encoding("gpt2")
        ranks = data_gym_to_mergeable_bpe_ranks(os.path.join(dir, "vocab.bpe"), os.path.join(dir, "encoder.json"),
                                                "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
                                                "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783")
    except Exception as e:  # no network, no file, the wrong file: the remedy is one
        raise Refused(f"GPT-2's vocabulary is not in {dir or 'the cache of tiktoken'} ({type(e).__name__}): give "
                      f"--tokenizer_dir=FOLDER with the original vocab.bpe and encoder.json, or use --tokenizer=bytes")
    return tiktoken.Encoding("gpt2", pat_str=WORDS, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256})


def describe(tok):
    """{name, vocab_size, mask_id, bos, eos}, as meta.json and checkpoints keep it; vocab_size is the model's: with [MASK]."""
    ends = sorted(map(tok.encode_single_token, tok.special_tokens_set))  # GPT-2 has one token for both
    return {"name": tok.name, "vocab_size": tok.n_vocab + 1, "mask_id": tok.n_vocab, "bos": ends[0], "eos": ends[-1]}


# ---------------------------------------------------------------------------------------------------------------------
# prepared data


def open_split(dir, split):
    """(tokens, meta): the stream of "train" or "val", memory-mapped, and meta.json. tokens.tokenizer is meta["tokenizer"].

    Raises Refused when a file is missing, empty, or not what meta.json says.
    """
    path, meta_path = Path(dir, f"{split}.bin"), Path(dir, "meta.json")
    if not (path.is_file() and meta_path.is_file()):
        source = next((name for name, fields in PRESETS.items() if fields["out"] == str(dir)), f"PATH --out={dir}")
        raise Refused(f"no {split}.bin with a meta.json in {dir}: prepare them with `python data.py {source}`")
    try:
        meta = json.loads(meta_path.read_text())
        n, special = meta[split]["tokens"], meta["tokenizer"]
        if meta["format"] != FORMAT or not {"name", "vocab_size", "mask_id", "bos", "eos"} <= special.keys():
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Refused(f"{meta_path} does not describe data in the format {FORMAT}: prepare it again with data.py")
    if n == 0 or path.stat().st_size != 2 * n:
        raise Refused(f"{path} has {path.stat().st_size:,} bytes for {n:,} tokens of two: prepare it again with data.py")
    tokens = np.memmap(path, np.uint16, "r")
    tokens.tokenizer = special  # `rows` needs its BOS, EOS and V, and must not guess them
    return tokens, meta


def n_rows(tokens, L):
    """How many whole rows there are; the rest is dropped at the end, once [ours]; once per 1,000 documents [code]."""
    if len(tokens) < L - 2:
        raise Refused(f"{len(tokens):,} tokens do not fill one row of length {L:,}: give more text or a shorter length")
    return len(tokens) // (L - 2)


def rows(tokens, index, L):
    """Rows of the layout that the published perplexities stand on: BOS, L − 2 tokens, EOS                  App. B.1, [code]

    tokens: a stream from `open_split`.   index: row numbers (n,), below n_rows(tokens, L).   L: length, in tokens.
    Returns (n, L) int64. Raises Refused for an id that the stream's vocabulary does not have.
    """
    special, x = tokens.tokenizer, torch.empty(len(index), L, dtype=torch.int64)             # (n, L)
    x[:, 0], x[:, -1] = special["bos"], special["eos"]
    for row, i in zip(x, index):
        row[1:-1] = torch.from_numpy(tokens[int(i) * (L - 2):(int(i) + 1) * (L - 2)].astype(np.int64))
    if len(x) and x.max() >= special["mask_id"]:  # on a GPU the embedding would only say "device-side assert"
        raise Refused(f"token id {x.max()} in {tokens.filename}, but the ids of {special['name']} end at "
                      f"{special['mask_id'] - 1}: the file is damaged or of another tokenizer, prepare it again")
    return x


def rng(*key):
    """The generator of one draw, named by what it is for: nothing to save, nothing to keep in step across ranks."""
    return torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=7).digest(), "big"))


def order(n, epoch, seed):
    """The permutation of n rows in this epoch (n,), the same wherever it is computed."""
    return torch.randperm(n, generator=rng("order", epoch, seed))


# ---------------------------------------------------------------------------------------------------------------------
# preparing it: a corpus is a stream of (text, is_last), the pieces of its documents


def pieces(f, size=2**16):
    """A plain-text file is one document, cut where a word of GPT-2's ends anyway: before a line break or a lone space
    that a non-space follows. Memory stays near `size` wherever the text has either."""
    rest = ""
    while block := f.read(size):
        rest += block
        if cut := max((m.start() for m in re.finditer(r"\n(?=\S)|(?<=\S) (?=\S)", rest)), default=0):
            yield rest[:cut], False
            rest = rest[cut:]
    yield rest, True


def read(path, raw):
    """The stream of one open file: parquet or JSON lines with a "text" each, else plain text; .gz and .xz unpacked."""
    if path.suffix == ".parquet":
        try:
            from pyarrow.parquet import ParquetFile
        except ImportError:
            raise Refused(f"{path} needs pyarrow: pip install pyarrow")
        batches = ParquetFile(raw).iter_batches(1000, columns=["text"])
        return ((text, True) for batch in batches for text in batch[0].to_pylist())
    unpack = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix)
    f = unpack(raw, "rt", encoding="utf-8") if unpack else open(raw.fileno(), encoding="utf-8", closefd=False)
    if (path.stem if unpack else path.name).endswith((".jsonl", ".json")):
        return ((json.loads(line)["text"], True) for line in f if line.strip())
    return pieces(f)


def documents(paths):
    """The stream of all files, behind a progress bar in bytes of file. Raises Refused for one that cannot be read."""
    done = 0
    with tqdm(total=sum(path.stat().st_size for path in paths), unit="B", unit_scale=True, desc="tokenizing") as bar:
        for path in paths:
            try:
                with open(path, "rb") as raw:
                    for text, last in read(path, raw):
                        yield text + "", last  # a "text" that is none is found here, where the file is known
                        bar.update(done + raw.tell() - bar.n)
            except (OSError, EOFError, lzma.LZMAError, ValueError, LookupError, TypeError) as e:
                raise e if isinstance(e, Refused) else Refused(
                    f"{path} cannot be read ({type(e).__name__}: {e}): it must be whole, UTF-8, every record with a \"text\"")
            done += path.stat().st_size


def encode(docs, out, tok, keep=0):
    """Tokenize a stream into one flat uint16 file, EOS after each document [code]. In memory: 1,000 pieces.

    Returns where the last keep + 1 documents end, (documents, tokens, bytes) so far, from (0, 0, 0) on.
    Raises Refused when an id may not fit 16 bits.
    """
    if tok.n_vocab >= 2**16:
        raise Refused(f"{tok.name} and [MASK] have {tok.n_vocab + 1:,} ids, uint16 tells 65,536 apart: use a smaller one")
    eos, at, ends = describe(tok)["eos"], np.zeros(3, np.int64), collections.deque([(0, 0, 0)], maxlen=keep + 1)
    with open(out, "wb") as f:
        while batch := list(itertools.islice(docs, 1000)):
            ids = tok.encode_ordinary_batch([text for text, _ in batch], num_threads=os.cpu_count())
            for piece, (text, last) in zip(ids, batch):
                f.write(np.array(piece + [eos] * last, np.uint16).tobytes())
                at += last, len(piece) + last, len(text.encode(errors="replace"))
                if last:
                    ends.append(tuple(at.tolist()))
    return ends


def prepare(docs, out, tok, val_docs=None):
    """Write train.bin, val.bin and meta.json into `out`, all or none, holding out the last documents. Returns the meta.

    val_docs: how many; None is 1 %, at least 1 and at most 10,000, or the last tenth of a corpus that is one document
    [ours]. Raises Refused when nothing would be left to train on.
    """
    if val_docs is not None and val_docs < 1:
        raise Refused(f"--val_docs={val_docs} holds nothing out: give at least 1")
    with atomic(f"{out}/meta.json") as m, atomic(f"{out}/val.bin") as v, atomic(f"{out}/train.bin") as t:
        ends = encode(docs, t, tok, keep=val_docs or 10_000)
        end = n, *_ = ends[-1]
        held = val_docs or min(10_000, max(1, n // 100))
        cut = ends[-1 - held] if held < n else (n, *(count * 9 // 10 for count in end[1:]))
        if val_docs and held >= n or cut[1] == 0:
            raise Refused(f"holding out {held} of {n} documents leaves nothing to train on: lower --val_docs, or give more")
        with open(t, "r+b") as f, open(v, "wb") as g:
            f.seek(2 * cut[1])
            shutil.copyfileobj(f, g)
            f.truncate(2 * cut[1])
        meta = {"format": FORMAT, "tokenizer": describe(tok)}
        for split, path, counts in ("train", t, cut), ("val", v, [a - b for a, b in zip(end, cut)]):
            digest = hashlib.sha256(np.memmap(path, mode="r")).hexdigest()
            meta[split] = dict(zip(("documents", "tokens", "bytes"), counts), sha256=digest)
        Path(m).write_text(json.dumps(meta, indent=2) + "\n")
    return meta


def stdlib():
    """Python's own library without its tests, sorted by the hash of the name: what is held out is of every kind [ours]."""
    root, tests = Path(sysconfig.get_path("stdlib")), {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    names = [p.relative_to(root).as_posix() for p in root.rglob("*.py") if not tests & {*p.relative_to(root).parts}]
    return [root / name for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())]


def openwebtext(hub, revision):
    """The stream of the hub's copy, by way of its cache: a download that breaks goes on where it was."""
    try:
        import datasets
        corpus = datasets.load_dataset(hub, split="train", revision=revision)
    except ImportError:
        raise Refused("openwebtext needs datasets: pip install datasets")
    except Exception as e:  # network, disk, versions: the ways out are the same
        raise Refused(f"openwebtext cannot be loaded ({type(e).__name__}: {e}): try --revision=refs/convert/parquet, or "
                      f"fetch its parquet files otherwise: python data.py FOLDER --val_docs=100000 --out=data/owt")
    return ((record["text"], True) for record in tqdm(corpus, desc="tokenizing", unit="doc"))


def find(source):
    """The files of PATH…: a file is itself, a folder its .txt, .jsonl and .parquet files in the order of their names."""
    paths = []
    for path in map(Path, source.split(os.pathsep)):
        inside = [p for p in sorted(path.rglob("*")) if re.search(r"\.(txt|jsonl|parquet)(\.gz|\.xz)?$", p.name)]
        if not source or not inside and not path.is_file():
            raise Refused(f"{str(path)!r} is neither a file nor a folder with .txt, .jsonl or .parquet files: give a PATH")
        paths += inside or [path]
    return paths


@dataclass
class Config:
    source: str = ""             # stdlib, openwebtext, or files and folders, joined by the system's path separator
    out: str = ""                # folder to write; data/NAME of the first path
    tokenizer: str = "gpt2"      # or bytes
    tokenizer_dir: str = ""      # GPT-2's vocab.bpe and encoder.json, for machines without a network
    val_docs: int | None = None  # hold out the last that many documents; 1 %
    hub: str = "Skylion007/openwebtext"  # where openwebtext is, or a folder of the same layout
    revision: str | None = None          # of it; refs/convert/parquet while its main is a script


PRESETS = {"stdlib": dict(source="stdlib", out="data/stdlib", tokenizer="bytes", val_docs=40),
           "openwebtext": dict(source="openwebtext", out="data/owt", val_docs=100_000)}  # the published split


def main(cfg):
    docs = (openwebtext(cfg.hub, cfg.revision) if cfg.source == "openwebtext" else
            documents(stdlib() if cfg.source == "stdlib" else find(cfg.source)))
    out = cfg.out or os.path.join("data", Path(cfg.source.split(os.pathsep)[0]).name.split(".")[0])
    meta = prepare(docs, out, tokenizer(cfg.tokenizer, cfg.tokenizer_dir), cfg.val_docs)
    for split in "train", "val":
        print(f"{out}/{split}.bin: {meta[split]['documents']:,} documents, {meta[split]['tokens']:,} tokens, "
              f"sha256 {meta[split]['sha256']}")
    total = {unit: meta["train"][unit] + meta["val"][unit] for unit in OWT}
    if total == OWT or cfg.source == "openwebtext":
        print("the whole of OpenWebText" if total == OWT else
              f"not the whole of OpenWebText, {total} instead of {OWT}: perplexities do not compare with published ones")


def prepare_stdlib(dir="data/stdlib"):
    """What the quickstart trains on: about 12 MB that every machine has."""
    main(Config(**{**PRESETS["stdlib"], "out": str(dir)}))


if __name__ == "__main__":
    words = [arg for arg in sys.argv[1:] if not arg.startswith("-")]  # PATH… are no flags: they become --source
    if words and words != [words[0]] * (words[0] in PRESETS):
        sys.argv[1:] = [f"--source={os.pathsep.join(words)}"] + [arg for arg in sys.argv[1:] if arg.startswith("-")]
    run(main, Config, PRESETS)
