# SPDX-License-Identifier: MIT
"""Sixty slips that a refactoring could make: single changes that change a run or a number.

    python slips.py check --tree=PATH                # is each old text there exactly once?
    python slips.py base --tree=PATH --python=PY     # do the tests pass without any slip?
    python slips.py run --tree=PATH --python=PY --only=NAME,NAME --log=FILE --jobs=2

The list was written before the tests that are to catch it, by somebody who had not read any test.
None is equivalent, none changes only a speed, a bar or a wording, and none needs a GPU to show.
`run` applies one slip at a time to a copy of the tree, and runs the tests that name the file's
module until one fails. It appends to the log as it goes, and skips names that are in it.
"""

import argparse
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# (name, file, old text, new text, what it would change)
SLIPS = [
    # ---- softmask.py
    ("softmask-shares", "softmask.py",
     "return lam, ids, top.softmax(-1) ",
     "return lam, ids, logp.gather(-1, ids).exp() ",
     "π are no longer shares of the top k: they sum to less than 1, so the mix is too short"),
    ("softmask-parenthesis", "softmask.py",
     "torch.sigmoid(omega_a * (minus_h - omega_b))",
     "torch.sigmoid(omega_a * minus_h - omega_b)",
     "ω_b is no longer scaled by ω_a: another λ wherever ω_a is not 1"),
    ("softmask-stepwise-at-switch", "softmask.py",
     "float(t > switch)", "float(t >= switch)",
     "at t = switch there is feedback, too: one step more, if a share of masks meets the switch"),
    ("softmask-rounds-omega", "softmask.py",
     "return tensor.to(new.device, torch.float32)", "return new.float()",
     "ω stays fp32 under .to(bfloat16), but its values are rounded to bf16 on the way"),
    ("softmask-rest-of-vocabulary", "softmask.py",
     "    ids = torch.cat((ids, rest), 1)                                            "
     "# (N, < (k+1)·128)\n", "",
     "the last V mod 128 tokens of a large vocabulary can never be fed back"),
    # ---- mdlm.py
    ("mdlm-one-offset", "mdlm.py",
     "torch.rand(n, generator=generator)", "torch.rand(1, generator=generator)",
     "all times have the same place in their slices: they are no longer independent, and differ"),
    ("mdlm-same-masks-in-all-rows", "mdlm.py",
     "u = torch.rand(x0.shape, generator=generator)",
     "u = torch.rand(x0.shape[1], generator=generator)",
     "all rows of a micro-batch share their uniform numbers, so one's masks contain another's"),
    ("mdlm-head-learns-from-pass-1", "mdlm.py",
     "with torch.set_grad_enabled(self.two_updates and torch.is_grad_enabled()):\n"
     "                logits =",
     "with torch.set_grad_enabled(torch.is_grad_enabled()):\n"
     "                logits =",
     "the output layer also gets a gradient from the first pass, which Alg. 1 l.5 detaches"),
    ("mdlm-pass-1-without-dropout", "mdlm.py",
     "                # p~ is never stored: `weigh` computes it from h, in chunks. Dropout is on "
     "[code].\n"
     "                h = net.hidden(emb, masks, t) ",
     "                net.eval()\n"
     "                h = net.hidden(emb, masks, t)\n"
     "                net.train(self.training) ",
     "dropout is off in the first pass: another p~, and other dropout masks in the second pass"),
    ("mdlm-sign-of-sigma", "mdlm.py",
     "sigma = -torch.log1p(", "sigma = torch.log1p(",
     "the time embedding is that of −σ: its sines flip, so files of others mean other times"),
    # ---- train.py
    ("train-dropout-without-j", "train.py",
     'data.seed_of(cfg.seed, "dropout", step, j)', 'data.seed_of(cfg.seed, "dropout", step)',
     "all micro-batches of an update have the same dropout"),
    ("train-epoch-of-the-update", "train.py",
     "data.order(n, i // n, cfg.seed)", "data.order(n, step * cfg.batch_size // n, cfg.seed)",
     "where an update spans two epochs, rows of the new one come from the old order, and repeat"),
    ("train-gradient-times-M", "train.py",
     "loss.sum() / (x0.numel() * M // here.world)", "loss.sum() / x0.numel()",
     "the gradient is M times as large, so the clipping and the logged norm differ if M > 1"),
    ("train-omega-drifts", "train.py",
     "            p.grad = None\n", "            p.grad.zero_()\n",
     "Adam's momentum moves ω in updates without feedback"),
    ("train-average-keeps-first-omega", "train.py",
     "    ema.sm = model.sm\n", "",
     "the held-out bound with feedback is measured with the ω that the run started from"),
    ("train-resume-forgets-average", "train.py",
     'ema.load_state_dict(model.state_dict() | ckpt["ema"])',
     'ema.load_state_dict(ckpt["ema"] | model.state_dict())',
     "after a resume, the average starts again from the raw weights"),
    ("train-raw-weights-in-step-N", "train.py",
     "        weights |= average\n", "        weights = average | weights\n",
     "step-N.pt holds the raw weights in place of their average"),
    ("train-resume-with-other-micro-batch", "train.py",
     '"show", "device", "dtype", "compile"}',
     '"show", "device", "dtype", "compile", "micro_batch"}',
     "a run is resumed with other micro-batches, so with other masks, dropout and rows together"),
    # ---- sample.py
    ("sample-seeds-by-place", "sample.py",
     'generators = [rng("sample", cfg.seed, i) for i in batch]',
     'generators = [rng("sample", cfg.seed, i) for i in range(len(batch))]',
     "every batch repeats the samples of the first"),
    ("sample-nucleus-keeps-crossing-token", "sample.py",
     "dropped = top.cumsum(-1) > p ", "dropped = top.cumsum(-1) - top > p ",
     "the token that crosses p is kept, as usual but not here: other samples, a higher entropy"),
    ("sample-feedback-of-the-mask", "sample.py",
     "model.feedback_of_certain(lost)", "model.feedback_of_certain(x[vanish])",
     "a re-masked token feeds back [MASK] itself, and so nothing"),
    ("sample-shares-rounded-down", "sample.py",
     "count = (masked.sum(-1, keepdim=True) + steps_left - 1) // steps_left ",
     "count = masked.sum(-1, keepdim=True) // steps_left ",
     "if steps do not divide the masks, other steps reveal the extra tokens; some reveal none"),
    ("sample-time-conditioned-skips", "sample.py",
     "    every = every or model.cfg.time_conditioning  "
     "# a network that sees t predicts anew each time\n", "",
     "a time-conditioned model skips the steps that change nothing, so feedback and NFE differ"),
    ("sample-settings-without-weights", "sample.py",
     '"step": model.info["step"], "weights": weights,', '"step": model.info["step"],',
     "samples of a model that was trained again, to the same step, are mixed with the old ones"),
    # ---- chunks.py
    ("chunks-sum-in-fp32", "chunks.py",
     "cdf = probs.to(device, torch.float64).cumsum(-1)",
     "cdf = probs.to(device).cumsum(-1).double()",
     "the cumulative sum rounds in fp32, so tokens rarer than 6e-8 are never drawn"),
    ("chunks-u-of-one", "chunks.py",
     "u[:, None] * cdf[:, -1:]", "u[:, None]",
     "a row whose sum is below 1 can draw V, which is no token; others draw with a wrong p"),
    ("chunks-any-row", "chunks.py",
     "(top.cumsum(-1)[:, -1] > p).all()", "(top.cumsum(-1)[:, -1] > p).any()",
     "one sure row cuts the nucleus of all flat rows beside it to 1,024 tokens"),
    # ---- dream.py
    ("dream-rotates-from-zero", "dream.py",
     "rope(place[None], self.cfg)", "rope((place - start)[None], self.cfg)",
     "with a cache, later passes rotate their part as if it began at position 0"),
    ("dream-takes-rslora", "dream.py",
     'bias="none", use_rslora=False,', 'bias="none",',
     "an adapter with scale α/√r is loaded as if it were α/r"),
    ("dream-tau-of-the-adapter", "dream.py",
     'mask_id=cfg.mask_token_id, tau=raw["mixture_temp"],', "mask_id=cfg.mask_token_id,",
     "an adapter for k = |V| decodes with τ = 1 in place of its trained temperature"),
    # ---- dora.py
    ("dora-s-not-squared", "dora.py",
     "2 * s * cross + s * s * update", "2 * s * cross + s * update",
     "n is wrong wherever alpha differs from r, so every output is"),
    ("dora-gradient-through-norm", "dora.py",
     "    @torch.no_grad()\n    def norm(self):", "    def norm(self):",
     "A and B get a gradient through n, too: another training"),
    ("dora-scales-the-bias", "dora.py",
     "Wx = y if self.base.bias is None else y - self.base.bias", "Wx = y",
     "m/n scales the bias, too, as soon as m differs from n; merging no longer gives the same"),
    # ---- finetune_dream.py
    ("finetune-ends-without-j", "finetune_dream.py",
     'rng(cfg.seed, "n_end", step, j)', 'rng(cfg.seed, "n_end", step)',
     "all dialogues of an update draw the same number of end tokens"),
    ("finetune-first-toss-decides", "finetune_dream.py",
     "if model.sm and not any(softs):", "if model.sm and not softs[0]:",
     "with a toss per dialogue, ω is not trained if the first dialogue has no feedback"),
    ("finetune-first-token-stays", "finetune_dream.py",
     "torch.arange(x0.shape[1]) >= prompt_len", "torch.arange(x0.shape[1]) > prompt_len",
     "the first token of a response is hardly ever masked, so it is not learned"),
    ("finetune-cosine-too-long", "finetune_dream.py",
     "max(1, cfg.steps - warm)", "max(1, cfg.steps)",
     "after a warm-up, the learning rate does not fall to 0"),
    ("finetune-last-held-out-time", "finetune_dream.py",
     "* i / max(1, len(val) - 1)", "* i / len(val)",
     "the last held-out dialogue is not measured at b_h, and all but the first at smaller times"),
    ("finetune-resume-forgets-best", "finetune_dream.py",
     'done, metrics = ckpt["step"], ckpt["metrics"]', 'done = ckpt["step"]',
     "after a resume, the next evaluation replaces best/, even if it is worse"),
    ("finetune-trains-on-held-out", "finetune_dream.py",
     "records[n_val:][:cfg.n_train]", "records[:cfg.n_train]",
     "held-out dialogues are trained on, so their loss is too low"),
    ("finetune-k-of-the-adapter", "finetune_dream.py",
     "mixinputs_k=sm.k or 1", "mixinputs_k=1",
     "an adapter that was trained with k = 3 is decoded with k = 1"),
    # ---- sample_dream.py
    ("sample_dream-seed-without-prompt", "sample_dream.py",
     "generator.manual_seed(seed_of(cfg.seed, ids))", "generator.manual_seed(seed_of(cfg.seed))",
     "all prompts are answered with the same draws"),
    ("sample_dream-threshold-for-entropy", "sample_dream.py",
     '    if threshold is not None:\n        pick = pick._replace(algorithm="maskgit_plus")\n', "",
     "with the default algorithm, a threshold is compared with −H: one token in every pass"),
    ("sample_dream-first-position", "sample_dream.py",
     "if (x[:, 0] == cfg.mask_token_id).any():", "if (x[:, 0] == cfg.mask_token_id).all():",
     "in a batch, a mask at position 0 is filled from the state of the last position"),
    # ---- data.py
    ("data-order-without-seed", "data.py",
     'rng("order", epoch, seed)', 'rng("order", epoch)',
     "runs with different seeds see the rows in the same order, and hold out the same dialogues"),
    ("data-first-rows-only", "data.py",
     "return torch.arange(m) * n // m", "return torch.arange(m) * (n // m)",
     "where m does not divide n, the held-out rows are not spread: the end of the text is missing"),
    ("data-bytes-of-a-cut-document", "data.py",
     " + len(tok.decode_bytes(cut))", "",
     "if a document is cut in two, bits per byte are too high"),
    # ---- eval.py
    ("eval-masks-without-repeat", "eval.py",
     'rng("masks", seed, r, int(i))', 'rng("masks", seed, int(i))',
     "all repeats of a row use the same uniform numbers, so they are hardly repeats"),
    ("eval-floor-not-passed-on", "eval.py",
     'rng("masks", seed, r, int(i)), floor)', 'rng("masks", seed, r, int(i)))',
     "with --floor=0, the masks still have the floor, so the bound is not Eq. 2"),
    ("eval-dropout-on", "eval.py",
     "    model.eval()\n    for index, x0, xt, t in corrupted(",
     "    for index, x0, xt, t in corrupted(",
     "a model in training mode is measured with dropout"),
    ("eval-tokens-without-ends", "eval.py",
     "nll.numel() * rows.shape[1]", "nll.numel() * (rows.shape[1] - 2)",
     "in the log, BOS and EOS no longer count as tokens: a higher bound than published ones"),
    ("eval-sign-of-the-gain", "eval.py",
     'nll["plain"] - nll["soft"]', 'nll["soft"] - nll["plain"]',
     "the gain from feedback has the wrong sign"),
    ("eval-one-sample-per-index", "eval.py",
     'samples = {(line["seed"], line["index"]): line for line in lines}',
     'samples = {line["index"]: line for line in lines}',
     "of samples with several seeds, only those of one seed count"),
    # ---- checkpoint.py
    ("checkpoint-raw-weights", "checkpoint.py",
     "state = state | (average or {})", "state = (average or {}) | state",
     "samples and bounds come from the raw weights in place of their average"),
    ("checkpoint-omega-all-replaced", "checkpoint.py",
     "    for name in given:\n", '    for name in ("omega_s", "omega_a", "omega_b"):\n',
     "--omega_s alone also puts ω_a and ω_b back to the paper's start"),
    ("checkpoint-resume-without-facts", "checkpoint.py",
     "now.keys() - may_differ, remedy)", 'ckpt["config"].keys() - may_differ, remedy)',
     "a run is resumed on other dialogues, another model, or another version of the draws"),
    # ---- launch.py
    ("launch-last-line-lost", "launch.py",
     'if start and line["step"] <= start]', 'if start and line["step"] < start]',
     "a resume deletes the log's line of the update that it starts from, with its evaluation"),
    ("launch-never-but-at-the-end", "launch.py",
     "return every and (done % every == 0 or done == steps)",
     "return every and done % every == 0 or done == steps",
     "--eval_every=0 evaluates after the last update: there are no rows for it, and the run fails "
     "before it is saved"),
    ("launch-sums-not-reset", "launch.py",
     "        self.sums = {}\n        return found", "        return found",
     "the logged loss is the mean since the start, not since the last line"),
    # ---- show.py
    ("show-last-sequence", "show.py",
     "zip(x[0].tolist(),", "zip(x[-1].tolist(),",
     "in a batch, the tokens of the last sequence are drawn with λ and guesses of the first"),
]

LEFT_OUT = {"test_layout.py", "test_readme.py", "test_bench.py", "test_plot.py"}
LIMIT = 600  # seconds per slip; one that hangs counts as caught


def check(tree):
    """Print what is wrong with the list for this tree. Returns whether nothing is."""
    wrong = []
    names = [name for name, *_ in SLIPS]
    wrong += [f"{name}: the name is not unique" for name in {*names} if names.count(name) > 1]
    for name, file, old, new, _ in SLIPS:
        text = (tree / file).read_text(encoding="utf-8")
        if text.count(old) != 1:
            wrong.append(f"{name}: the old text occurs {text.count(old)} times in {file}")
            continue
        try:
            compile(text.replace(old, new), file, "exec")
        except SyntaxError as e:
            wrong.append(f"{name}: {file} does not compile: {e}")
    print(*wrong, f"{len(SLIPS)} slips, {len(wrong)} of them do not fit {tree}", sep="\n")
    return not wrong


def tests_of(tree, file):
    """The tests that name this module, its own first, test_draws second, the rest by size."""
    module = Path(file).stem
    names = re.compile(rf"\bimport [^\n]*\b{module}\b|\bfrom {module}\b|\b{module}\.")
    own = tree / "tests" / f"test_{module}.py"
    if not own.exists():
        own = tree / "tests" / f"test_{module.split('_')[0]}.py"
    draws = tree / "tests" / "test_draws.py"
    rest = [path for path in (tree / "tests").glob("test_*.py")
            if path.name not in LEFT_OUT and names.search(path.read_text(encoding="utf-8"))]
    rest.sort(key=lambda path: (path.stat().st_size, path.name))
    ordered = dict.fromkeys([*(path for path in (own, draws) if path.exists()), *rest])
    return [f"tests/{path.name}" for path in ordered]


def copy_of(tree, folder):
    """A copy of the files of `tree` that git does not ignore, in `folder`. Returns its path."""
    command = ["git", "-C", tree, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    copy = Path(folder, "tree")
    for name in {*subprocess.check_output(command, text=True).split("\0")} - {""}:
        if (tree / name).is_file():  # not one that was deleted
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, copy / name)
    return copy


def tested(copy, python, tests):
    """(CAUGHT, SURVIVED or BROKEN, what says so) from pytest on these files of a copy."""
    # Without bytecode: that of a file changed back within a second would be taken for its own.
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [python, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider",
               f"--basetemp={copy.parent / 'tmp'}", *tests]
    run = subprocess.Popen(command, cwd=copy, env=env, text=True, stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, start_new_session=True)
    try:
        out, _ = run.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)  # its children, too
        run.communicate()
        return "CAUGHT", f"no end after {LIMIT} s"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", out, re.MULTILINE)
    if run.returncode == 0:
        return "SURVIVED", " ".join(Path(test).stem for test in tests)
    if run.returncode in (1, 2) and failed:
        return "CAUGHT", failed[1]
    return "BROKEN", f"pytest ended with {run.returncode}: {out[-500:]!r}"


def run_slip(slip, copy, python):
    """One line of the log: name, result, seconds, and the first test that failed."""
    name, file, old, new, _ = slip
    path, begin = copy / file, time.monotonic()
    before = path.read_text(encoding="utf-8")
    if before.count(old) != 1:
        return f"{name} BROKEN 0 s: the old text occurs {before.count(old)} times in {file}"
    path.write_text(before.replace(old, new), encoding="utf-8")
    try:
        result, reason = tested(copy, python, tests_of(copy, file))
    finally:
        path.write_text(before, encoding="utf-8")
    return f"{name} {result} {time.monotonic() - begin:.0f} s: {reason}"


def run(tree, python, only, log, jobs):
    """Try all slips that are not in the log, `jobs` at a time."""
    lines = log.read_text(encoding="utf-8").splitlines() if log and log.exists() else []
    done = {line.split()[0] for line in lines if line and " BROKEN " not in line}
    unknown = only - {name for name, *_ in SLIPS}
    if unknown:
        sys.exit(f"no slip is called {', '.join(sorted(unknown))}")
    todo = [slip for slip in SLIPS if slip[0] not in done and (not only or slip[0] in only)]
    found, writing, copies = [], threading.Lock(), queue.Queue()

    def one(slip):
        copy = copies.get()
        try:
            line = run_slip(slip, copy, python)
        finally:
            copies.put(copy)
        with writing:
            found.append(line)
            print(line, flush=True)
            if log:
                with open(log, "a", encoding="utf-8") as f:
                    f.write(line + "\n")

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        for job in range(jobs):
            copies.put(copy_of(tree, Path(folder, str(job))))
        list(pool.map(one, todo))
    counts = {word: sum(f" {word} " in line for line in found + lines)
              for word in ("CAUGHT", "SURVIVED", "BROKEN")}
    print(f"of {len(found + lines)}, also those in the log: {counts}")


def base(tree, python):
    """Run all tests that a slip could be caught by, without a slip."""
    tests = dict.fromkeys(test for file in dict.fromkeys(slip[1] for slip in SLIPS)
                          for test in tests_of(tree, file))
    with tempfile.TemporaryDirectory() as folder:
        result, reason = tested(copy_of(tree, folder), python, tests)
    print("all pass" if result == "SURVIVED" else f"not even without a slip: {reason}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=["check", "base", "run"])
    parser.add_argument("--tree", type=Path, default=Path())
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--only", default="")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    tree = args.tree.resolve()
    if args.command == "check":
        sys.exit(not check(tree))
    if args.command == "base":
        base(tree, args.python)
    else:
        run(tree, args.python, {*args.only.split(",")} - {""}, args.log, args.jobs)


if __name__ == "__main__":
    main()
