"""Feeds damaged examples to every reader of files that others may have written.

  python tools/fuzz.py --inputs 20000 --seed 1

An input is read, or refused by a BrtError of one line, within seconds and little memory; of
anything else the input is kept in --keep, and the exit code is 1.
"""

import argparse
import gzip
import json
import lzma
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import wave
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import save_file

from brt import command_line, config
from brt.checkpointing import reader as checkpoints
from brt.config_io import config_json
from brt.data import documents, preparation, tokenizers
from brt.data.tokenizer_training import train_sentencepiece
from brt.errors import BrtError
from brt.generation.session import Memory, Session, save
from brt.interop.huggingface import files
from brt.interop.huggingface.decoder.tokenizer import of_bytes
from brt.sweeping import settings
from brt.tasks.speech_recognition.data import arrays, filter_bank, kaldi, tables
from brt.training.workdir import saved_config

SECONDS = 20  # for an input
MEGABYTES, RATIO = 256, 4 * 1032  # of memory for an input: these, and so many times its bytes
STRANGE = (
    b"[" * 2000, b"{1:" * 2000, b"9" * 5000, b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"-1", b"null",
    b"1e999", b"NaN", b'"', b"%A", b"include 'a.gin'\n", b"../" * 9, b"\n", b"18446744073709551616",
)  # fmt: skip


class Target(NamedTuple):
    """A reader.

    Attributes:
      path: of the file that is damaged.
      read: reads it, or what it is a part of.
    """

    path: Path
    read: Callable[[Path], object]


def targets(place: Path) -> dict[str, Target]:
    """Every reader by name, with a small example that it reads."""
    found: dict[str, Target] = {}

    def add(name: str, content: bytes | str, read: Callable[[Path], object]) -> None:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        data = content if isinstance(content, bytes) else content.encode()
        (place / name).write_bytes(data)
        found[name] = Target(place / name, read)

    gin = "A = (1, 2)\nTraining.steps = 7\nModel:\n  layers = 3\n  recurrent_layers = %A\n"
    sweep = "Sweep.grid = {'Training.seed': (0, 1)}\nSweep.points = ({'name': 'a'},)\n" + gin
    add("run.gin", gin, lambda path: command_line.read([str(path)], ()))
    add("bindings", gin, lambda path: command_line.read((), [path.read_text("utf-8", "replace")]))
    add("sweep.gin", sweep, _sweep)
    text = "A book of some words.\n\nIt has – two paragraphs.\n" * 9
    add("a.txt", text, _documents)
    add("a.txt.gz", gzip.compress(text.encode()), _documents)
    add("a.txt.xz", lzma.compress(text.encode()), _documents)
    add("a.jsonl", json.dumps({"text": text, "more": [1, {"a": None}]}) + "\n", _documents)
    add("array.json", json.dumps([{"text": text}, {"text": "more"}], indent=1), _documents)
    add("a.csv", f'id,text\n1,"{text}"\n', _documents)
    pq.write_table(pa.table({"text": [text], "parts": [["a", "b"]]}), place / "a.parquet")
    found["a.parquet"] = Target(place / "a.parquet", _documents)
    for name in ("corpus.json", "train/manifest.json", "train/documents.npz", "train/tokens.bin"):
        corpus = place / "corpora" / name.replace("/", "-")
        data = config.Data(train=(f"{place}/a.txt",), validation_fraction=0.0, test_fraction=0.0)
        preparation.prepare(data, corpus, progress=False)
        found[name] = Target(corpus / name, lambda path, corpus=corpus: _corpus(corpus))
    add(
        "run/config.json",
        json.dumps(config_json(config.Config())),
        lambda p: saved_config(p.parent),
    )
    add("checkpoints/5/meta.json", json.dumps({"step": 5, "format": 3, "arrays": {}}),
        lambda path: checkpoints.read_meta(path.parent.parent, 5))  # fmt: skip
    add("checkpoints/6/MANIFEST.sha256", f"{'0' * 64}  meta.json\n",
        lambda path: checkpoints.verify(path.parent.parent, 6))  # fmt: skip
    numbers, one = jnp.ones((2, 3)), jnp.ones((), jnp.int32)
    memory, identity = Memory(numbers, numbers > 0, one, numbers, one), {"model": "a"}
    save(memory, place / "state.npz", identity)
    found["state.npz"] = Target(
        place / "state.npz", lambda path: _session(memory).load(path, identity)
    )
    level = of_bytes()
    level["model"]["vocab"]["\u0100"] = 256
    level["added_tokens"][0]["content"] = "<s>"
    level["model"]["vocab"] |= {"<s>": level["model"]["vocab"].pop("<|bos|>")}
    add("tokenizer.json", json.dumps(level), lambda path: tokenizers.load(str(path)).encode(text))
    train_sentencepiece([[text]], 300, place / "a.model")
    found["a.model"] = Target(place / "a.model", found["tokenizer.json"].read)
    with wave.open(str(place / "a.wav"), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(3000))
    found["a.wav"] = Target(place / "a.wav", lambda path: filter_bank.read(path, config.Speech()))
    np.savez_compressed(place / "speech.npz", features=np.ones((5, 3)), lengths=np.array([2, 3]),
                        ids=np.array(["a", "b"]), transcripts=np.array(["yes", "no"]))  # fmt: skip
    found["speech.npz"] = Target(
        place / "speech.npz", lambda p: [r.read() for r in arrays.recordings(p)]
    )
    add("a.tsv", "file\ttranscript\nb.wav\tyes\n", lambda path: tables.rows(str(path)))
    add("kaldi/text", "id-1 yes\nid-2 no\n", kaldi.table)
    row = b"\0BFM " + b"".join(b"\4" + n.to_bytes(4, "little") for n in (2, 3)) + bytes(24)
    add("a.ark", row, lambda path: kaldi.matrix(f"{path}:0"))
    save_file({"a": np.ones((2, 3), np.float32)}, place / "m.safetensors")
    found["m.safetensors"] = Target(place / "m.safetensors", files.read_file)
    return found


def _sweep(path: Path) -> object:
    flags = command_line.parser(None)
    command_line.add_config_flags(flags)
    bound, _ = command_line.variants(flags.parse_args([f"--gin_file={path}"]), "Sweep")
    return settings.from_bindings(bound)


def _documents(path: Path) -> None:
    for document in documents.read([str(path)]):
        for _ in document.chunks:
            pass


def _corpus(directory: Path) -> None:
    corpus = preparation.open_corpus(directory)
    preparation.summary(corpus)
    corpus.described()
    for store in corpus.splits.values():
        store.document(0).sum()


def _session(memory: Memory) -> Session:
    session = object.__new__(Session)
    session.memory, session._config = memory, config.Config()
    return session


def damaged(good: bytes, draw: random.Random) -> bytes:
    """The example with one thing wrong, or a few."""
    content = bytearray(good)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        place, size = draw.randrange(len(content) + 1), draw.choice((1, 2, 9, 99))
        match draw.randrange(6):
            case 0 if content:
                content[place % len(content)] ^= 1 << draw.randrange(8)
            case 1:
                del content[place:]
            case 2:
                content[place : place + size] = bytes(size)
            case 3:
                content[place:place] = draw.choice(STRANGE)
            case 4:
                content[place:place] = content[place // 2 : place // 2 + size]
            case _:
                content[place : place + size] = draw.randbytes(size)
    return bytes(content)


def outcome(target: Target, size: int) -> str:
    """`read`, `refused`, or what else came of it."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        target.read(target.path)
        said = "read"
    except BrtError as error:
        said = "refused" if str(error) else f"{type(error).__name__} without a sentence"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__} at {last.filename}:{last.lineno}: {str(error)[:100]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return said if grown << 10 <= (MEGABYTES << 20) + RATIO * size else f"{grown >> 10} MiB"


def run(inputs: int, seed: int, keep: Path) -> int:
    """Prints a table of what came of the inputs, shared out to the readers; the exit code."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} seconds")

    signal.signal(signal.SIGALRM, stop)
    bad = 0
    place = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        every = targets(place)
        print(f"{'reader':28} {'inputs':>7} {'read':>7} {'refused':>7} {'other':>7} {'slowest':>8}")
        for name, target in every.items():
            good, counts, slowest = target.path.read_bytes(), Counter[str](), 0.0
            if (said := outcome(target, len(good))) != "read":
                raise SystemExit(f"the example {name} is not read: {said}")
            for i in range(-(-inputs // len(every))):
                content = damaged(good, random.Random(f"{seed}/{name}/{i}"))
                target.path.write_bytes(content)
                start = time.monotonic()
                said = outcome(target, len(content))
                slowest = max(slowest, time.monotonic() - start)
                counts[said if said in ("read", "refused") else "other"] += 1
                if said not in ("read", "refused"):
                    keep.mkdir(parents=True, exist_ok=True)
                    kept = keep / f"{seed}-{i}-{name.replace('/', '-')}"
                    kept.write_bytes(content)
                    print(f"{name}: {said} (the input is {kept})", file=sys.stderr)
            target.path.write_bytes(good)
            bad += counts["other"]
            row = (counts.total(), counts["read"], counts["refused"], counts["other"])
            print(
                f"{name:28} {''.join(f'{count:>7,} ' for count in row)}{slowest:>6.2f} s",
                flush=True,
            )
    finally:
        shutil.rmtree(place)
    return int(bad > 0)


if __name__ == "__main__":
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--inputs", type=int, default=5000, help="in all; default 5000")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--keep", type=Path, default=Path("fuzz"), help="where inputs are kept")
    args = flags.parse_args()
    jax.config.update("jax_platforms", "cpu")
    sys.exit(run(args.inputs, args.seed, args.keep))
