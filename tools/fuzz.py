"""Passes damaged examples to every reader of files that somebody else may have written.

  python tools/fuzz.py --inputs 20000 --seed 1
  python tools/fuzz.py --crafted 10000 --seed 1     # whole run directories

Every input must either be read or be refused by a BrtError of one line, within a limit of time and
memory. All other inputs are written to the directory --keep, and the exit code is 1.
"""

import argparse
import contextlib
import gzip
import json
import lzma
import math
import os
import random
import resource
import signal
import socket
import sys
import tempfile
import time
import traceback
import wave
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent))
from fuzzing import runs
from fuzzing.damage import damaged
from fuzzing.runs import Target

from brt import command_line, config
from brt.checkpointing import reader as checkpoints
from brt.data import chat, documents, originals, preparation, tokenizers
from brt.data.documents import Fields
from brt.data.tokenizer_training import train_sentencepiece
from brt.errors import BrtError
from brt.generation.memory import Memory, save
from brt.generation.session import Session
from brt.interop.huggingface import files, kept
from brt.sweeping import points
from brt.tasks.speech_recognition import filter_bank, sources

SECONDS = 20  # time limit for an input
# Reading an input may take 256 MiB of memory, and RATIO bytes for each byte of the input. Deflate
# compresses by a factor of at most 1032.
MEGABYTES, RATIO = 256, 4 * 1032


def targets(place: Path) -> dict[str, Target]:
    """Writes a small example for every reader below `place`; returns the readers by name."""
    found: dict[str, Target] = {}

    def add(name: str, content: bytes | str, read: Callable[[Path], object]) -> None:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        data = content if isinstance(content, bytes) else content.encode()
        (place / name).write_bytes(data)
        found[name] = Target(place / name, read)

    gin = "A = (1, 2)\nTraining.steps = 7\nModel:\n  layers = 3\nRecurrence.layers = %A\n"
    sweep = "Sweep.grid = {'Training.seed': (0, 1)}\nSweep.points = ({'name': 'a'},)\n" + gin
    add("run.gin", gin, lambda path: command_line.read([str(path)], ()))
    add("bindings", gin, lambda path: command_line.read((), [path.read_text("utf-8", "replace")]))
    add("sweep.gin", sweep, _sweep)
    text = "A book of some words.\n\nIt has – two paragraphs.\n" * 9
    add("a.txt", text, _documents)
    add("a.txt.gz", gzip.compress(text.encode()), _documents)
    add("a.txt.xz", lzma.compress(text.encode()), _documents)
    add("a.jsonl", json.dumps({"text": text, "more": [1, {"a": None}]}) + "\n", _documents)
    turns = [{"role": role, "content": text} for role in ("user", "assistant")]
    add("pairs.jsonl", json.dumps({"a": text, "b": "end", "m": turns}) + "\n", _pairs)
    add("array.json", json.dumps([{"text": text}, {"text": "more"}], indent=1), _documents)
    add("a.csv", f'id,text\n1,"{text}"\n', _documents)
    pq.write_table(pa.table({"text": [text], "parts": [["a", "b"]]}), place / "a.parquet")
    found["a.parquet"] = Target(place / "a.parquet", _documents)
    for name in ("corpus.json", "train/manifest.json", "train/rows.npz", "train/tokens.bin"):
        dataset = place / "corpora" / name.replace("/", "-")
        data = config.Data(train=(f"{place}/a.txt",), validation_fraction=0.0, test_fraction=0.0)
        preparation.prepare(data, dataset, progress=False)
        found[name] = Target(dataset / name, lambda path, dataset=dataset: _corpus(dataset))
    found |= runs.readers(place)
    add("checkpoints/6/MANIFEST.sha256", f"{'0' * 64}  meta.json\n",
        lambda path: checkpoints.verify(path.parent.parent, 6))  # fmt: skip
    numbers, one = jnp.ones((2, 3)), jnp.ones(2, jnp.int32)
    ended, unfinished = jnp.zeros(2, bool), jnp.zeros((2, 3), jnp.uint8)
    memory = Memory(numbers, numbers > 0, one, numbers, one, ended, unfinished)
    identity = {"model": "a"}
    save(memory, place / "state.npz", identity)
    found["state.npz"] = Target(
        place / "state.npz", lambda path: _session(memory).load(path, identity)
    )
    level = kept.byte_tokenizer()
    level["model"]["vocab"]["\u0100"] = 256
    level["added_tokens"][0]["content"] = "<s>"
    level["model"]["vocab"] |= {"<s>": level["model"]["vocab"].pop("<|bos|>")}
    add("tokenizer.json", json.dumps(level), lambda path: tokenizers.load(str(path)).encode(text))
    add("chat/tokenizer.json", json.dumps(level), found["tokenizer.json"].read)
    add("chat/chat_template.jinja", "{% for m in messages %}{{ m.role + m['content'] | trim }}"
        "{% endfor %}{{ bos_token }}", _chat)  # fmt: skip
    train_sentencepiece([[text]], 300, place / "a.model")
    found["a.model"] = Target(place / "a.model", found["tokenizer.json"].read)
    with wave.open(str(place / "a.wav"), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(3000))
    found["a.wav"] = Target(place / "a.wav", lambda path: filter_bank.read(path, config.Speech()))
    np.savez_compressed(place / "speech.npz", features=np.ones((5, 3)), lengths=np.array([2, 3]),
                        ids=np.array(["a", "b"]), transcripts=np.array(["yes", "no"]))  # fmt: skip
    found["speech.npz"] = Target(
        place / "speech.npz", lambda p: [r.read() for r in sources.array_recordings(p)]
    )
    add("a.tsv", "file\ttranscript\nb.wav\tyes\n", lambda path: sources.table_rows(str(path)))
    add("kaldi/text", "id-1 yes\nid-2 no\n", sources.table)
    row = b"\0BFM " + b"".join(b"\4" + n.to_bytes(4, "little") for n in (2, 3)) + bytes(24)
    add("a.ark", row, lambda path: sources.read_matrix(f"{path}:0"))
    kept_config = place / "beside/original/config.json"
    kept_config.parent.mkdir(parents=True)
    kept_config.write_text('{"model_type": "t5", "d_model": 8}')
    found["original/config.json"] = Target(
        kept_config,
        lambda path: kept.read_json(
            originals.read(path.parent.parent / "tokenizer.json"), path.name
        ),
        "run/tokenizer/original/*",
    )
    save_file({"a": np.ones((2, 3), np.float32)}, place / "m.safetensors")
    found["m.safetensors"] = Target(place / "m.safetensors", files.read_file)
    return found


def _pairs(path: Path) -> object:
    for fields in (Fields(prompt="a", completion="b"), Fields(messages="m")):
        for _ in documents.read([str(path)], fields=fields):
            pass
    return None


def _chat(path: Path) -> object:
    tokenizer = tokenizers.load(str(path.with_name("tokenizer.json")))
    return chat.encode(tokenizer, [{"role": "user", "content": "a <s> b"}])


def _sweep(path: Path) -> object:
    flags = command_line.parser(None)
    command_line.add_config_flags(flags)
    bound, _ = command_line.section_and_variant_resolver(
        flags.parse_args([f"--gin_file={path}"]), "Sweep"
    )
    return points.from_bindings(bound)


def _documents(path: Path) -> None:
    for document in documents.read([str(path)]):
        for _ in document.chunks:
            pass


def _corpus(directory: Path) -> None:
    dataset = preparation.prepare(config.Data(store=str(directory)))
    preparation.summary(dataset)
    dataset.described()
    for store in dataset.splits.values():
        store.document(0).sum()


def _session(memory: Memory) -> Session:
    """Returns a session that has no model and can only load files."""
    session = object.__new__(Session)
    session.memory, session._config, session._lanes = memory, config.Config(), 1
    return session


def outcome(target: Target, size: int) -> str:
    """Reads the file of a target within the limits of time and memory.

    Args:
      target: the file and its reader.
      size: size of the file in bytes, which determines the memory limit.

    Returns:
      "read", "refused", or a description of what went wrong.
    """
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
    """Reads damaged examples, prints a table of the outcomes, and returns the exit code.

    The number of a reader's inputs is proportional to the square root of the reader's speed.

    Args:
      inputs: number of inputs of all readers together.
      seed: seed of the random damage.
      keep: directory for the inputs that were neither read nor refused.
    """
    _limit_seconds()
    bad = 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as place:
        every = targets(Path(place))
        print(f"{'reader':28} {'inputs':>7} {'read':>7} {'refused':>7} {'other':>7} {'slowest':>8}")
        weights = {name: _rate(name, target) ** 0.5 for name, target in every.items()}
        for name, target in every.items():
            good, counts, slowest = target.path.read_bytes(), Counter[str](), 0.0
            for i in range(math.ceil(inputs * weights[name] / sum(weights.values()))):
                content = damaged(good, random.Random(f"{seed}/{name}/{i}"))
                target.path.write_bytes(content)
                start = time.monotonic()
                said = outcome(target, len(content))
                slowest = max(slowest, time.monotonic() - start)
                counts[said if said in ("read", "refused") else "other"] += 1
                if said not in ("read", "refused"):
                    _keep(keep / f"{seed}-{i}-{name.replace('/', '-')}", content, name, said)
            target.path.write_bytes(good)
            bad += counts["other"]
            row = (counts.total(), counts["read"], counts["refused"], counts["other"])
            print(
                f"{name[-28:]:28} {''.join(f'{count:>7,} ' for count in row)}{slowest:>6.2f} s",
                flush=True,
            )
    return int(bad > 0)


def run_crafted(directories: int, seed: int, keep: Path) -> int:
    """Reads run directories in which some files were replaced; returns the exit code.

    One to three files of each directory have damaged content, are missing, or are replaced by a
    FIFO, a directory or a socket. Checksums of a checkpoint are corrected before it is read, so
    that the readers cannot rely on them. Prints the number of directories by outcome.

    Args:
      directories: number of directories.
      seed: seed of the random choices.
      keep: directory for the files that were neither read nor refused.
    """
    _limit_seconds()
    counts = Counter[str]()
    with tempfile.TemporaryDirectory(prefix="crafted-") as place:
        every = {n: t for n, t in targets(Path(place)).items() if t.of}
        good = {name: target.path.read_bytes() for name, target in every.items()}
        names = [
            name for name, content in good.items() if not {"state", "frozen"} & {*name.split("/")}
        ]
        for i in range(directories):
            draw = random.Random(f"{seed}/{i}")
            chosen = draw.sample(names, draw.choice((1, 1, 2, 3)))
            for name in chosen:
                _craft(every[name].path, good[name], draw)
            found = {name: outcome(every[name], 1 << 16) for name in _readers(chosen, every)}
            others = {name: said for name, said in found.items() if said not in _FINE}
            counts["other" if others else "refused" if "refused" in found.values() else "read"] += 1
            for name, said in others.items():
                print(f"directory {i}, {name}: {said} ({', '.join(chosen)})", file=sys.stderr)
                if every[name].path.is_file() and every[name].path.stat().st_size < 1 << 26:
                    kept = keep / f"{seed}-{i}-{name.replace('/', '-')}"
                    _keep(kept, every[name].path.read_bytes(), name, said)
            for name in chosen:
                _remove(every[name].path)
                every[name].path.write_bytes(good[name])
    print(f"{counts.total():,} directories: {dict(counts)}", flush=True)
    return int(counts["other"] > 0)


_FINE = ("read", "refused")


def _readers(chosen: list[str], every: Mapping[str, Target]) -> list[str]:
    """Returns the names of the readers of the chosen files and of the reader of the checkpoint."""
    return [*dict.fromkeys([*chosen, f"run/checkpoints/{runs.STEP}/meta.json"])]


def _craft(path: Path, good: bytes, draw: random.Random) -> None:
    """Damages or removes a file, or replaces it by a FIFO, a directory, a socket, a hard link to
    another file of the directory, a sparse file, or JSON of very many lists.
    """
    kind = draw.randrange(18)
    if kind < 6:
        path.unlink()
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind == 2:
        with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):
            made.bind(path.name)
    elif kind == 3 and (others := [p for p in sorted(path.parent.iterdir()) if p.is_file()]):
        os.link(draw.choice(others), path)
    elif kind == 4:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    elif kind == 5:
        path.write_bytes(b"[" + b"[]," * (1 << 24) + b"[]]")
    elif kind > 5:
        path.write_bytes(damaged(good, draw))


def _remove(path: Path) -> None:
    if path.is_dir():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def _keep(path: Path, content: bytes, name: str, said: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    print(f"{name}: {said} (the input is {path})", file=sys.stderr)


def _rate(name: str, target: Target) -> float:
    """Returns how often per second a reader reads its undamaged example.

    Raises:
      SystemExit: the reader does not read the example.
    """
    size, start = target.path.stat().st_size, time.monotonic()
    for _ in range(2):
        if (said := outcome(target, size)) != "read":
            raise SystemExit(f"the example {name} is not read: {said}")
    return 2 / max(time.monotonic() - start, 1e-4)


def _limit_seconds() -> None:
    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} seconds")

    signal.signal(signal.SIGALRM, stop)


if __name__ == "__main__":
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--inputs", type=int, default=5000, help="in all; default 5000")
    flags.add_argument("--crafted", type=int, help="so many run directories in place of inputs")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--keep", type=Path, default=Path("fuzz"), help="where inputs are kept")
    args = flags.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if args.crafted:
        sys.exit(run_crafted(args.crafted, args.seed, args.keep))
    sys.exit(run(args.inputs, args.seed, args.keep))
