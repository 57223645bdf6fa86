"""What tests write in local copies of runs in buckets, and what they find there."""

import shutil
from pathlib import Path

from brt.checkpointing import manifest, reader
from brt.storage.mirror import Mirror


def write(mirror: Mirror, name: str, text: str) -> Path:
    path = mirror.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def save(mirror: Mirror, step: int, text: str) -> None:
    """Writes a checkpoint, replacing an earlier one, as `CheckpointWriter` does."""
    target = mirror.path / f"checkpoints/{step}"
    for name in ("meta.json", "state/a", f"state/{text}"):
        write(mirror, f"checkpoints/{step}.partial/{name}", f"{text} {name}")
    manifest.write(target.with_suffix(".partial"), {})
    shutil.rmtree(target, ignore_errors=True)
    target.with_suffix(".partial").rename(target)
    write(mirror, "last_checkpoint.txt", f"{step}\n")


def found(mirror: Mirror) -> dict[int, str]:
    """Returns the texts of the checkpoints in a copy by step, and checks that each is whole."""
    mirror.refresh()
    texts = {}
    for step in reader.steps(mirror.path / "checkpoints"):
        path = mirror.path / f"checkpoints/{step}"
        mirror.fetch(path)
        assert manifest.verify(path) == [], f"checkpoint {step} counts, and is not whole"
        texts[step] = (path / "meta.json").read_text().split()[0]
    return texts


def tree(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}
