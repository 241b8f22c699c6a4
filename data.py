"""Text in, rows of token ids out: the published OpenWebText layout, or the same for any text.                  App. B.1

A corpus becomes two flat files of uint16, every document followed by EOS, and a description:

    train.bin   val.bin (the last documents)   meta.json {tokenizer, train and val: documents, tokens, sha256}

A row is BOS + L − 2 tokens of that stream + EOS, and rows do not overlap [code]. Another cut gives another perplexity.

    python data.py stdlib                              # Python's own library as bytes, always there: data/stdlib
    python data.py novels.jsonl.xz more/ --val_docs=300 --out=data/novels
    python data.py openwebtext                         # needs `pip install datasets`: data/owt

Not here: a DataLoader, workers, shuffling state. A batch is a function of its number (`order`, `rows`), so a run that
resumes cannot see a row twice.
"""

import collections
import gzip
import hashlib
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
from tqdm import tqdm

from checkpoint import Refused, atomic, run

FORMAT = "soft-masked-mdlm-data/1"
OWT = (8_013_769, 9_040_017_095)  # documents, and GPT-2 tokens with one EOS each, of the whole of OpenWebText


# ---------------------------------------------------------------------------------------------------------------------
# tokenizers


def tokenizer(name="gpt2", dir=None):
    """A tiktoken.Encoding. [MASK] is not in it: the model's mask id is the first free one, tok.n_vocab.

    name: "gpt2", the paper's, or "bytes", 256 bytes + BOS + EOS, which needs no file.
    dir: where GPT-2's encoder.json (or vocab.json) lies; without it tiktoken's cache or, once, its download is used.
    Raises Refused for another name, or when the vocabulary is neither here nor to be had.
    """
    if name == "bytes":
        return tiktoken.Encoding("bytes", pat_str=r"(?s).{1,64}", mergeable_ranks={bytes([i]): i for i in range(256)},
                                 special_tokens={"<|bos|>": 256, "<|eos|>": 257})
    if name != "gpt2":
        raise Refused(f"tokenizer {name!r} is unknown: use gpt2 or bytes")
    if not dir:
        try:
            return tiktoken.get_encoding("gpt2")
        except Exception as e:  # whatever the network raises, the remedy is one
            raise Refused(f"GPT-2's vocabulary is not in tiktoken's cache and cannot be fetched ({type(e).__name__}): "
                          f"give --tokenizer_dir=FOLDER with vocab.bpe and encoder.json, or use --tokenizer=bytes")
    path = next((p for p in (Path(dir, "encoder.json"), Path(dir, "vocab.json")) if p.is_file()), None)
    if path is None:
        raise Refused(f"no encoder.json or vocab.json in {dir}: the folder must hold GPT-2's vocabulary files")
    # The file spells every byte as one printable character. A token's id is also its merge priority, which is all that
    # tiktoken asks for: the merges in vocab.bpe are the same list again.
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    hidden = [b for b in range(256) if b not in printable]
    byte = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(hidden)}
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
        eot = ids.pop("<|endoftext|>")
        ranks = {bytes(byte[c] for c in token): i for token, i in ids.items()}
    except (ValueError, KeyError, AttributeError, TypeError):
        ranks, eot = {}, None
    if eot != 50256 or sorted(ranks.values()) != list(range(50256)):
        raise Refused(f"{path} is not GPT-2's vocabulary of 50,257 tokens: fetch it again, or choose another folder")
    return tiktoken.Encoding("gpt2", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": eot},
                             pat_str=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def describe(tok):
    """{name, vocab_size, mask_id, bos, eos} as meta.json and checkpoints keep it; vocab_size is the model's V, with [MASK]."""
    special = sorted(tok.encode_single_token(name) for name in tok.special_tokens_set)  # GPT-2 has one for both ends
    return {"name": tok.name, "vocab_size": tok.n_vocab + 1, "mask_id": tok.n_vocab, "bos": special[0], "eos": special[-1]}


# ---------------------------------------------------------------------------------------------------------------------
# reading prepared data


def open_split(dir, split):
    """(tokens, meta): the memory-mapped stream of "train" or "val", which knows its tokenizer, and all of meta.json.

    Raises Refused when a file is missing, empty, or not what meta.json says.
    """
    path, meta_path = Path(dir, f"{split}.bin"), Path(dir, "meta.json")
    if not (path.is_file() and meta_path.is_file()):
        raise Refused(f"no {path.name} and meta.json in {dir}: prepare them with `python data.py "
                      f"{ {'data/owt': 'openwebtext', 'data/stdlib': 'stdlib'}.get(str(dir), f'PATH --out={dir}') }`")
    try:
        meta = json.loads(meta_path.read_text())
        n = meta[split]["tokens"]
        assert meta["format"] == FORMAT and meta["tokenizer"]["vocab_size"] > meta["tokenizer"]["mask_id"]
    except (ValueError, KeyError, TypeError, AssertionError):
        raise Refused(f"{meta_path} does not describe data in the format {FORMAT}: prepare it again with data.py")
    if n == 0 or path.stat().st_size != 2 * n:
        raise Refused(f"{path} holds {path.stat().st_size // 2:,} tokens, meta.json says {n:,}: prepare it again with data.py")
    return attach(np.memmap(path, np.uint16, "r"), meta["tokenizer"]), meta


def attach(tokens, tokenizer):
    """The stream keeps its tokenizer's description beside it: `rows` needs BOS, EOS and V, and must not guess them."""
    tokens.tokenizer = tokenizer
    return tokens


def n_rows(tokens, L):
    """How many whole rows there are; what is left over at the end is dropped [code: once per 1,000 documents]."""
    if len(tokens) < L - 2:
        raise Refused(f"{len(tokens):,} tokens do not fill one row of length {L:,}: give more text or a shorter length")
    return len(tokens) // (L - 2)


def rows(tokens, index, L):
    """Rows of the layout that the published perplexities stand on: BOS, L − 2 tokens, EOS                  App. B.1, [code]

    tokens: a stream from `open_split`.   index: row numbers (n,), below n_rows(tokens, L).   L: length, in tokens.
    Returns (n, L) int64. Raises Refused for an id that its vocabulary does not have.
    """
    special = tokens.tokenizer
    x = torch.empty(len(index), L, dtype=torch.int64)                                      # (n, L)
    x[:, 0], x[:, -1] = special["bos"], special["eos"]
    for row, i in zip(x, index):
        row[1:-1] = torch.from_numpy(tokens[int(i) * (L - 2):(int(i) + 1) * (L - 2)].astype(np.int64))
    if len(x) and x.max() >= special["mask_id"]:  # on a GPU the embedding would only say "device-side assert"
        raise Refused(f"token id {x.max()} in {tokens.filename}, but {special['name']} ends at {special['mask_id'] - 1}: "
                      f"the file is damaged or of another tokenizer, prepare it again")
    return x


def rng(*key):
    """The torch.Generator of one draw, named by what it is for: no state to save, nothing to keep in step across ranks."""
    return torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=7).digest(), "big"))


def order(n, epoch, seed):
    """A permutation of n rows (n,), the same wherever it is computed; every epoch has its own."""
    return torch.randperm(n, generator=rng("order", epoch, seed))


# ---------------------------------------------------------------------------------------------------------------------
# preparing it


def pieces(f, size=2**20):
    """A plain-text file, one document, as (text, is_last): no file is too long for memory.

    Cut only before a line break that a word follows: there GPT-2's pattern starts a new word anyway, so the pieces give
    the same tokens as the whole.
    """
    rest = ""
    while block := f.read(size):
        rest += block
        cut = max((m.start() for m in re.finditer(r"\n(?=\S)", rest)), default=0)
        if cut:
            yield rest[:cut], False
            rest = rest[cut:]
    yield rest, True


def texts(path, raw):
    """(text, is_last) of one open file: parquet or JSON lines with a "text" each, else a document; .gz and .xz unpacked."""
    kind, packed = path.suffix, {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix)
    if kind == ".parquet":
        try:
            import pyarrow.parquet
        except ImportError:
            raise Refused(f"{path} needs pyarrow: pip install pyarrow")
        for batch in pyarrow.parquet.ParquetFile(raw).iter_batches(1000, columns=["text"]):
            yield from ((text, True) for text in batch.column("text").to_pylist())
        return
    f = packed(raw, "rt", encoding="utf-8") if packed else open(raw.fileno(), encoding="utf-8", closefd=False)
    if (path.with_suffix("") if packed else path).suffix in (".jsonl", ".json"):
        yield from ((json.loads(line)["text"], True) for line in f if line.strip())
    else:
        yield from pieces(f)


def documents(paths):
    """(text, is_last) of every file in turn, behind a progress bar in bytes of file."""
    with tqdm(total=sum(p.stat().st_size for p in paths), unit="B", unit_scale=True, desc="tokenizing") as bar:
        for done, path in zip(np.cumsum([0] + [p.stat().st_size for p in paths]).tolist(), paths):
            with open(path, "rb") as raw:
                try:
                    for text, last in texts(path, raw):
                        if not isinstance(text, str):
                            raise TypeError
                        yield text, last
                        bar.update(done + raw.tell() - bar.n)
                except (ValueError, KeyError, TypeError, EOFError, OSError, lzma.LZMAError) as e:
                    raise e if isinstance(e, Refused) else Refused(
                        f"{path} cannot be read ({type(e).__name__}: {e}): it must be whole, UTF-8, and JSON lines or "
                        f"parquet must have a string \"text\" in every record")


def batches(docs, size=2**23):
    """Lists of about `size` characters: what the threads share, and all that is in memory."""
    batch, n = [], 0
    for text, last in docs:
        batch.append((text, last))
        n += len(text)
        if n > size:
            yield batch
            batch, n = [], 0
    yield batch


def encode(docs, out, tok, keep=0, threads=None):
    """Tokenize a stream of (text, is_last) into one flat uint16 file, EOS after each document [code].

    Returns (documents, ends): their number, and the last keep + 1 positions at which one ends, 0 being the first.
    Raises Refused when an id may not fit 16 bits.
    """
    if tok.n_vocab >= 2**16:
        raise Refused(f"tokenizer {tok.name} and [MASK] make {tok.n_vocab + 1:,} ids, uint16 can tell 65,536 apart: use a smaller one")
    eos, n_docs, end, ends = describe(tok)["eos"], 0, 0, collections.deque([0], maxlen=keep + 1)
    with open(out, "wb") as f:
        for batch in batches(docs):
            ids = tok.encode_ordinary_batch([text for text, _ in batch], num_threads=threads or os.cpu_count())
            for piece, (_, last) in zip(ids, batch):
                f.write(np.array(piece + [eos] * last, np.uint16).tobytes())
                end += len(piece) + last
                n_docs += last
                if last:
                    ends.append(end)
    return n_docs, ends


def prepare(docs, out, tok, val_docs=None, threads=None):
    """Write train.bin, val.bin and meta.json into `out`, all or none, holding out the last documents. Returns the meta.

    val_docs: how many; None is 1 %, at least 1 and at most 10,000, and the last tenth of a corpus that is one
    document [ours]. Raises Refused when nothing would be left to train on. Stopped half-way, it has to start over.
    """
    out = Path(out)
    with atomic(out / "meta.json") as m, atomic(out / "val.bin") as v, atomic(out / "train.bin") as t:
        n, ends = encode(docs, t, tok, keep=10_000 if val_docs is None else val_docs, threads=threads)
        held = min(10_000, max(1, n // 100)) if val_docs is None else val_docs
        cut = ends[-1] * 9 // 10 if val_docs is None and n == 1 else ends[-1 - held] if 0 < held < n else 0
        if not cut:
            raise Refused(f"cannot hold out {held} of {n} documents: use --val_docs between 1 and {n - 1}, or give more text")
        with open(t, "r+b") as f, open(v, "wb") as g:
            f.seek(2 * cut)
            shutil.copyfileobj(f, g)
            f.truncate(2 * cut)
        meta = {"format": FORMAT, "tokenizer": describe(tok)}
        for split, path, docs, size in ("train", t, max(n - held, 1), cut), ("val", v, held, ends[-1] - cut):
            meta[split] = {"documents": docs, "tokens": size, "sha256": sha256(path)}
        Path(m).write_text(json.dumps(meta, indent=2) + "\n")
    return meta


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def stdlib():
    """The paths of Python's own library without its tests, in an order that is arbitrary but always the same.

    By name, the held-out files would all be of one package; by the hash of the name they are of every kind [ours].
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    names = [p.relative_to(root) for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts)]
    return [root / p for p in sorted(names, key=lambda p: hashlib.sha256(p.as_posix().encode()).digest())]


def openwebtext(revision):
    """(text, is_last) of the hub's copy. Not streamed: 54 GB of cache, but a download that breaks goes on where it was."""
    try:
        import datasets
    except ImportError:
        raise Refused("openwebtext needs datasets: pip install datasets, or give parquet or JSONL files as PATHs")
    try:
        corpus = datasets.load_dataset("Skylion007/openwebtext", split="train", revision=revision)
    except Exception as e:  # network, disk, versions: the way out is the same
        raise Refused(f"openwebtext cannot be loaded ({type(e).__name__}: {e}): try --revision=refs/convert/parquet, or fetch "
                      f"its parquet files by other means and give their folder as PATH with --val_docs=100000 --out=data/owt")
    return ((record["text"], True) for record in tqdm(corpus, desc="tokenizing", unit="doc"))


@dataclass
class Config:
    source: str = ""             # stdlib, openwebtext, or files and folders, joined by the system's path separator
    out: str = ""                # folder for train.bin, val.bin, meta.json; data/NAME of the first path
    tokenizer: str = "gpt2"      # or bytes
    tokenizer_dir: str = ""      # GPT-2's vocabulary, for machines without a network
    val_docs: int | None = None  # hold out the last that many documents; 1 % of them
    threads: int | None = None   # all cores
    revision: str = "main"       # of the hub's OpenWebText; refs/convert/parquet where that is still a script


PRESETS = {"stdlib": dict(source="stdlib", out="data/stdlib", tokenizer="bytes", val_docs=40),
           "openwebtext": dict(source="openwebtext", out="data/owt", val_docs=100_000)}  # the published split


def find(source):
    """The files behind PATH…: a file as it is, a folder as its .txt, .jsonl and .parquet files, sorted by path."""
    found = []
    for path in map(Path, source.split(os.pathsep)):
        inside = sorted(p for p in path.rglob("*") if re.search(r"\.(txt|jsonl|parquet)(\.gz|\.xz)?$", p.name))
        if not (inside or path.is_file()):
            raise Refused(f"{path} is neither a file nor a folder with .txt, .jsonl or .parquet files: python data.py stdlib | PATH…")
        found += inside or [path]
    return found


def main(cfg):
    if cfg.source == "openwebtext":
        docs = openwebtext(cfg.revision)
    else:
        docs = documents(stdlib() if cfg.source == "stdlib" else find(cfg.source))
    out = cfg.out or os.path.join("data", Path(cfg.source.split(os.pathsep)[0]).name.split(".")[0])
    meta = prepare(docs, out, tokenizer(cfg.tokenizer, cfg.tokenizer_dir), cfg.val_docs, cfg.threads)
    for split in "train", "val":
        print(f"{out}/{split}.bin: {meta[split]['documents']:,} documents, {meta[split]['tokens']:,} tokens, "
              f"sha256 {meta[split]['sha256'][:16]}…")
    total = tuple(meta["train"][unit] + meta["val"][unit] for unit in ("documents", "tokens"))
    if cfg.source == "openwebtext" and total != OWT:
        print(f"not the whole of OpenWebText: {total[0]:,} documents and {total[1]:,} tokens where it has {OWT[0]:,} and "
              f"{OWT[1]:,}; perplexities on this split do not compare with published ones")


def prepare_stdlib(dir="data/stdlib"):
    """What the quickstart trains on, about 12 MB: no network, no files of ours."""
    main(Config(**{**PRESETS["stdlib"], "out": str(dir)}))


def command_line(argv):
    """`PATH…` as --source=…, for the flags and presets that every script of ours has."""
    words = [a for a in argv if not a.startswith("-")]
    source = words if len(words) == 1 and words[0] in PRESETS else [f"--source={os.pathsep.join(words)}"] if words else []
    return source + [a for a in argv if a.startswith("-")]


if __name__ == "__main__":
    sys.argv[1:] = command_line(sys.argv[1:])
    run(main, Config, PRESETS)
