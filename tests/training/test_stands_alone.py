"""Tests that a run directory can be used without the data that the run was trained on."""

import dataclasses
import json
import re
import shutil
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_settings import changed
from tiny_decoder import TEXT, write_decoder

from brt import api, tasks
from brt.config import (
    Adapter,
    Checkpoint,
    Config,
    Data,
    Distillation,
    Evaluation,
    Model,
    Optimizer,
    Pairs,
    Sampling,
    Seq2Seq,
    Training,
)  # fmt: skip
from brt.config.model import Window
from brt.data import preparation
from brt.errors import BrtError, CheckpointError, DataError
from brt.interop.huggingface.causal.config import WindowChoice
from brt.tasks.arguments import EvaluationRequest
from brt.training import conversion, data_manifest, evaluations, loop, run, run_summary, saved_model
from brt.training import workdir as workdirs
from brt.training.metrics import read_metrics
from brt.training.saved_model import SavedModel
from brt.training.session import Session
from brt.training.workdir import Workdir

pytestmark = pytest.mark.slow_cases("summariser")

WORDS = "the sea was calm and grey while we sat on the deck of an old ship".split()
TRAINING = Training(
    steps=2, batch_size=2, segment_length=16, log_every=1, evaluate_every=1, sample_every=0,
    probe_every=0, plots=False,
)  # fmt: skip
OPTIMIZER = Optimizer(name="adamw", learning_rate=0.01, schedule="constant", warmup_steps=0)


def text(seed: int, words: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, words)) + "\n\n"


def language_model(place: Path) -> Config:
    """Writes documents and returns the config of a language model that trains on them."""
    books = place / "books"
    books.mkdir()
    for i in range(6):
        (books / f"{i}.txt").write_text("".join(text(10 * i + j, 20) for j in range(4 + i)))
    return Config(
        model=Model(layers=1, model_dim=16, heads=2, head_dim=8, mlp_dim=16, window=8),
        data=Data(train=(f"{books}/*.txt",), tokenizer="train:290", cache_dir=str(place / "cache")),
        training=TRAINING, optimizer=OPTIMIZER, checkpoint=Checkpoint(every=0),
        sampling=Sampling(temperature=0.0),
        evaluation=Evaluation(batch_size=2, tokens_per_document=24),
    )  # fmt: skip


def summariser(place: Path) -> Config:
    """Writes pairs and returns the config of a summarizer that trains on them."""
    books = place / "books"
    books.mkdir()
    rows = [{"id": f"{i}", "document": text(i, 30), "summary": text(i, 6 + i)} for i in range(24)]
    (books / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return Config(
        seq2seq=Seq2Seq(
            encoder_layers=1, decoder_layers=1, model_dim=16, heads=2, head_dim=8, mlp_dim=16
        ),
        pairs=Pairs(
            train=(f"{books}/pairs.jsonl",), tokenizer="train:290", max_source_length=32,
            max_target_length=12, cache_dir=str(place / "cache"),
        ),
        training=dataclasses.replace(TRAINING, task="summarization"), optimizer=OPTIMIZER,
        checkpoint=Checkpoint(every=0),
    )  # fmt: skip


def open_model(workdir: Path, **changes: object) -> SavedModel:
    """Loads a run's model, with changed settings of the section of its data."""
    place, found, config = saved_model.load_config(workdir)
    section = tasks.from_config(config).data
    return saved_model.load(place, found, changed(config, **{section: changes}))


def evaluated(workdir: Path, **changes: object) -> dict[str, Any]:
    """Returns the report of a run on the test split, with changed settings of the data."""
    return evaluations.evaluate(open_model(workdir, **changes), "test", None).report


def written(workdir: Path) -> str:
    """Returns a text that a run's model generates greedily."""
    return api.Model(open_model(workdir)).generate("the sea was", max_tokens=8)


def started(config: Config, workdir: Path) -> run.Run:
    """Starts a run, and saves it before its first step."""
    with Session.open(config, workdir) as session:
        session.save(wait=True)
        return session.run


def reopened(workdir: Path, config: Config) -> run.Run:
    """Opens a run as training does that goes on with it."""
    with Session.open(config, workdir) as session:
        return session.run


class Trained:
    """A run, its config, a text that it generates, and its evaluation of the test split."""

    def __init__(self, config: Config, place: Path):
        self.config, self.place, self.workdir = config, place, place / "run"
        self.run, _ = loop.train(config, self.workdir)
        self.text = written(self.workdir)
        self.bits = evaluated(self.workdir)["bits_per_token"]


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable], Trained]:
    """Returns a function that trains a config once; tests must not change the run."""
    found: dict[Callable, Trained] = {}

    def get(make: Callable[[Path], Config]) -> Trained:
        if make not in found:
            place = tmp_path_factory.mktemp(make.__name__)
            found[make] = Trained(make(place), place)
        return found[make]

    return get


@pytest.fixture
def trained(once: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Returns a function like `once`, which copies the run directory so that it may be changed."""

    def copied(make: Callable[[Path], Config]) -> Trained:
        original = once(make)
        found = object.__new__(Trained)
        found.__dict__ |= original.__dict__
        shutil.copytree(original.workdir, tmp_path / "copy")
        found.workdir = tmp_path / "copy"
        return found

    return copied


@pytest.fixture
def moved(once: Callable) -> Callable:
    """Returns a function that hides files next to a run directory until the end of the test."""
    hidden: list[Path] = []

    def hide(make: Callable[[Path], Config], *names: str) -> None:
        for path in (once(make).place / name for name in names):
            path.rename(path.with_name(path.name + ".away"))
            hidden.append(path)

    yield hide
    for path in hidden:
        shutil.rmtree(path, ignore_errors=True)
        path.with_name(path.name + ".away").rename(path)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sets and returns the cache directory of a user who reads a run; it is empty at first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    return tmp_path / "own"


BOTH = pytest.mark.parametrize("make", [language_model, summariser])


@pytest.mark.slow
@BOTH
def test_a_run_says_what_its_splits_are(
    make: Callable, once: Callable, capsys: pytest.CaptureFixture
) -> None:
    run = once(make)
    log = Workdir(run.workdir).log.read_text()
    facts = json.loads(Workdir(run.workdir).data.read_text())["splits"]
    assert list(facts) == ["train", "validation", "test"] and facts == run.run.dataset.described()
    summary = run_summary.finish(run.run, Workdir(run.workdir), 0.0)
    for line in data_manifest.describe_splits(facts):
        assert line in log and line in summary
    unit = "document" if make is language_model else "pair"
    names = f" ({facts['validation']['names'][0][-5:]})" if make is language_model else ""
    assert f"validation: 1 {unit}{names}, " in log and ": 5% of the " in log
    assert f"sha256 {facts['test']['sha256'][:12]}" in log


@pytest.mark.slow
@BOTH
def test_a_copied_run_is_used_without_its_data(
    make: Callable, trained: Callable, moved: Callable, tmp_path: Path, own_cache: Path
) -> None:
    run = trained(make)
    moved(make, "books")
    assert evaluated(run.workdir)["bits_per_token"] == run.bits, "prepared data are left"
    row = {"document": text(99, 30), "summary": text(99, 8)}
    new = tmp_path / ("new.txt" if make is language_model else "new.jsonl")
    new.write_text(text(99, 30) if make is language_model else json.dumps(row))
    moved(make, "cache", "run")
    assert saved_model.open_split(open_model(run.workdir, test=(str(new),)), "test")
    made = [json.loads(path.read_text()) for path in own_cache.rglob("corpus.json")]
    assert [one["splits"] for one in made] == [["test"]]
    assert not (run.place / "cache").exists(), "what the run's config names is not written to"
    assert written(run.workdir) == run.text
    if make is summariser:
        exported = conversion.export(run.workdir)
        (run.workdir / "hf").mkdir()
        assert exported.copy_tokenizer(run.workdir / "hf") == ["spiece.model"]


@pytest.mark.slow
@BOTH
def test_other_documents_are_never_held_out_in_silence(
    make: Callable, trained: Callable, moved: Callable, own_cache: Path
) -> None:
    run = trained(make)
    moved(make, "cache")
    assert evaluated(run.workdir)["bits_per_token"] == run.bits
    away = run.place / "books"
    moved(make, "books")
    away.mkdir()
    shutil.rmtree(own_cache)
    for path in (run.place / "books.away").iterdir():
        content = re.sub("the|was|and|grey|ship|deck", "lake", path.read_text())
        (away / path.name).write_text(content)
    with pytest.raises(DataError, match="test is 5% of .*, so that other data would be held out"):
        evaluated(run.workdir)


def test_training_goes_on_with_the_same_data_only(trained: Callable, moved: Callable) -> None:
    run = trained(language_model)
    config, books = changed(run.config, training={"steps": 3}), run.place / "books"
    moved(language_model, "books")
    shutil.copytree(run.place / "books.away", books)
    (books / "new.txt").write_text(text(7, 90))
    (books / "5.txt").write_text(text(8, 90))
    (books / "0.txt").unlink()
    message = (
        rf"not those that {run.workdir} was trained on \(new: .*/new\.txt; gone: .*/0\.txt; "
        r"changed: .*/5\.txt\); restore them"
    )
    with pytest.raises(DataError, match=message):
        loop.train(config, run.workdir)
    assert written(run.workdir) == run.text


def run_with_adapters(place: Path, once: Callable) -> Config:
    """Returns a config that trains adapters of a run."""
    base = once(language_model)
    shutil.copytree(base.workdir, place / "base")
    adapter = Adapter(rank=2, kernels=("*/queries", "*/values"))
    return changed(base.config, adapter=adapter, training={"init_from": str(place / "base")})


def decoder_with_adapters(place: Path, once: Callable) -> Config:
    """Writes a decoder in Hugging Face's format, and returns a config that trains adapters."""
    write_decoder(place / "base")
    adapter = Adapter(rank=2, kernels=("*/queries", "*/values"))
    return started_from(place, adapter=adapter)


def distilled_run(place: Path, once: Callable) -> Config:
    """Converts a decoder to a run, and returns a config that distils it into a smaller window."""
    write_decoder(place / "hf")
    window = WindowChoice(64, 0)
    deque(conversion.from_hf(place / "hf", place / "base", verified=False, window=window), maxlen=0)
    model = Model(window=32, sliding=Window(block=32))
    return started_from(place, model=model, distillation=Distillation(window=64))


def started_from(place: Path, **sections: object) -> Config:
    """Returns the config of a run that starts from the weights in `base`."""
    (place / "books").mkdir()
    (place / "books/a.txt").write_text(TEXT)
    training = dataclasses.replace(TRAINING, segment_length=64, init_from=str(place / "base"))
    return Config(
        data=Data(train=(str(place / "books/a.txt"),), cache_dir=str(place / "cache")),
        training=training, optimizer=OPTIMIZER, checkpoint=Checkpoint(every=0), **sections,
    )  # fmt: skip


@pytest.mark.slow_cases("run_with_adapters", "decoder_with_adapters", "distilled_run")
@pytest.mark.parametrize("make", [run_with_adapters, decoder_with_adapters, distilled_run])
def test_a_run_goes_on_without_what_it_started_from(
    make: Callable, once: Callable, tmp_path: Path
) -> None:
    config = make(tmp_path, once)
    started(config, tmp_path / "run")
    before = evaluated(tmp_path / "run")["bits_per_token"]
    for name in ("base", "hf"):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert evaluated(tmp_path / "moved")["bits_per_token"] == before
    for settings in (config, workdirs.saved_config(tmp_path / "moved")):
        reopened(tmp_path / "moved", settings)
    (tmp_path / "exported").mkdir()
    exported = conversion.export(tmp_path / "moved")
    name = "tokenizer.model" if make is run_with_adapters else "tokenizer.json"
    assert name in exported.copy_tokenizer(tmp_path / "exported")


@pytest.mark.slow
@BOTH
def test_a_run_goes_on_with_its_copy_of_a_tokenizer(
    make: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    config = make(tmp_path)
    task = tasks.from_config(config)
    name, content = task.open(config, progress=False).tokenizer.file
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content)
    named = {task.data: {"tokenizer": name}}  # It is a relative path.
    config = changed(config, **named)
    run = started(config, tmp_path / "run")
    for other in (None, b"another content"):
        Path(name).unlink()
        if other:
            Path(name).write_bytes(other)
        capsys.readouterr()
        again = reopened(tmp_path / "run", config)
        assert again.dataset.directory == run.dataset.directory, "nothing is prepared again"
        assert again.dataset.tokenizer.fingerprint == run.dataset.tokenizer.fingerprint
        assert ("has changed" in capsys.readouterr().err) == bool(other)
        Path(name).touch()


def test_an_old_run_says_how_it_gets_its_tokenizer(trained: Callable, moved: Callable) -> None:
    run = trained(language_model)
    shutil.rmtree(run.workdir / "tokenizer")
    (run.workdir / "data.json").unlink()
    remedy = (
        rf"{run.workdir} does not contain its tokenizer, .*; type python -m brt.train --workdir="
    )
    with pytest.raises(CheckpointError, match=remedy):
        written(run.workdir)
    reopened(run.workdir, run.config)
    assert written(run.workdir) == run.text


def test_another_tokenizer_is_refused(trained: Callable, tmp_path: Path) -> None:
    run, config = trained(language_model), summariser(tmp_path)
    name, content = tasks.from_config(config).open(config, progress=False).tokenizer.file
    assert name == "tokenizer.model"
    (run.workdir / "tokenizer" / name).write_bytes(content)
    with pytest.raises(BrtError, match=r"another tokenizer|no BOS piece"):
        written(run.workdir)


def test_the_last_point_of_a_curve_is_read_as_the_others(once: Callable) -> None:
    """Training evaluates 24 tokens of a document, and the whole document at the end."""
    run = once(language_model)
    records = read_metrics(Workdir(run.workdir).metrics)
    parts = [r for r in records if "eval/validation/bits_per_byte" in r]
    whole = [r for r in records if "eval/validation_whole/bits_per_byte" in r]
    assert [r["step"] for r in parts] == [1, 2] and [r["step"] for r in whole] == [2]
    report = json.loads((run.workdir / "evaluations/2/validation.json").read_text())
    assert report["protocol"]["tokens_per_document"] == "all"
    assert whole[0]["eval/validation_whole/bits_per_byte"] == report["bits_per_byte"]
    model = open_model(run.workdir)
    dataset = saved_model.open_split(model, "validation")
    evaluator = tasks.from_config(model.config).evaluator(
        EvaluationRequest(model.config, dataset, "validation")
    )
    part = evaluator(model.variables, whole=False).metrics
    assert part["tokens"] == 24 < report["tokens"]
    assert parts[-1]["eval/validation/bits_per_byte"] == pytest.approx(part["bits_per_byte"])
    assert f"validation: {report['bits_per_byte']:.3f}" in run_summary.finish(
        run.run, Workdir(run.workdir), 0.0
    )


def test_sizes_need_no_data_where_the_vocabulary_is_known(tmp_path: Path) -> None:
    config = language_model(tmp_path)
    shutil.rmtree(tmp_path / "books")
    assert run.without_data(config) is None
    known = changed(config, model={"vocab_size": 290})
    sizes = run_summary.dry_run(run.without_data(known), None)
    assert sizes["parameters"] - sizes["parameters_non_embedding"] == 290 * 16
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow  # It trains twice.
def test_a_store_with_a_relative_name_is_found_from_other_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, elsewhere = language_model(tmp_path), tmp_path / "elsewhere"
    elsewhere.mkdir()
    preparation.prepare(config.data, tmp_path / "data/books")
    monkeypatch.chdir(tmp_path)
    config = dataclasses.replace(config, data=Data(store="data/books"))
    loop.train(config, tmp_path / "run")
    here = evaluated(tmp_path / "run")
    monkeypatch.chdir(elsewhere)
    assert evaluated(tmp_path / "run")["bits_per_token"] == here["bits_per_token"]
    longer = changed(config, training={"steps": 3})
    assert loop.train(longer, tmp_path / "run")[0].config.data.store == "data/books"
    shutil.rmtree(tmp_path / "data")
    with pytest.raises(DataError, match="data/books holds no finished preparation"):
        evaluated(tmp_path / "run")
