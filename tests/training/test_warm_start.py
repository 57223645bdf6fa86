"""Tests what Training.init_from loads into an encoder, and what it refuses."""

import dataclasses
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from model_settings import changed

from brt import tasks
from brt.checkpointing.writer import CheckpointWriter
from brt.config import Config, Data, Encoder, Training
from brt.config_io import config_json
from brt.data import text_tokenizers
from brt.data.tokenizers import ByteTokenizer
from brt.errors import CheckpointError, ConfigError, NonFiniteError
from brt.interop import pretrained
from brt.interop.huggingface import convert
from brt.models import encoder
from brt.tasks.speech_recognition.preparation import Vocabulary
from brt.tasks.weights import WarmStart
from brt.training import run as runs
from brt.training.workdir import Workdir

DATA = Path(__file__).resolve().parents[1] / "data/huggingface"
EMBEDDING = "encoder/inputs/token_embed/embedding"
MASKED = "masked_language_modeling"
SPEECH = "speech_recognition"
LETTERS = Vocabulary("characters", "abc")
SIZES = Encoder(layers=1, model_dim=8, heads=2, mlp_dim=12, max_positions=20, norm_first=False)


def config(objective: str, where: Path | str = "", **encoder: Any) -> Config:
    training = Training(
        task=objective, init_from=str(where), segment_length=8, batch_size=2, loss_chunk=8
    )
    return Config(training=training, encoder=Encoder(**encoder))


def ready(asked: Config) -> Config:
    """Returns the config with the model of the weights from which training starts."""
    return runs.with_model(asked, runs.find_weights(asked))


def started(asked: Config, initial: Any) -> WarmStart:
    return tasks.from_config(asked).start(asked, runs.find_weights(asked), initial)


def known(asked: Config, tokenizer: Any) -> Config:
    """Returns the config with the vocabulary size that a tokenizer needs."""
    return tasks.from_config(asked).with_weights(asked, runs.find_weights(asked), tokenizer)


def drawn(model: Encoder, task: Any, seed: int = 0) -> dict[str, Any]:
    """Returns random parameters without compiling their initialization."""
    rng = np.random.default_rng(seed)
    network = encoder.EncoderWithHead(model, task=tasks.by_name(task).head)
    shapes = jax.eval_shape(lambda: nn.meta.unbox(encoder.init(network, jax.random.key(0))))
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), shapes)


def flat(params: Any) -> dict[str, np.ndarray]:
    """Returns all arrays by path."""
    return {name: np.asarray(x) for name, x in flatten_dict(params, sep="/").items()}


def body(params: Any) -> dict[str, np.ndarray]:
    """Returns the arrays of the encoder without its head, by path."""
    return {name: x for name, x in flat(params).items() if name.startswith("encoder/")}


def write(path: Path, objective: Any, fingerprint: str, **encoder: Any) -> Path:
    """Writes the directory of a run with one checkpoint and returns its path."""
    model = dataclasses.replace(SIZES, **encoder)
    saved = config(objective, **dataclasses.asdict(model))
    with CheckpointWriter(Workdir(path).checkpoints) as writer:
        meta = {"config": config_json(saved), "tokenizer": fingerprint}
        writer.save(1, {"params": drawn(model, objective, seed=1)}, meta)
    return path


@pytest.fixture(scope="module")
def roberta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Converts a masked language model as brt.convert does and returns its directory."""
    path = tmp_path_factory.mktemp("weights") / "roberta"
    list(convert.from_hf(DATA / "roberta", path, verified=False))
    return path


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a run of a masked language model of bytes and returns its directory."""
    path = tmp_path_factory.mktemp("masked")
    return write(path, MASKED, ByteTokenizer.fingerprint, vocab_size=257, remat=True)


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a run of a speech recognition model and returns its directory."""
    return write(tmp_path_factory.mktemp("speech"), SPEECH, LETTERS.fingerprint,
                 vocab_size=4, features=5, positions="sinusoidal")  # fmt: skip


def test_converted_weights_bring_their_sizes_and_all_arrays(roberta: Path) -> None:
    found = pretrained.read(roberta)[0]
    asked = ready(config(MASKED, roberta, dropout=0.3))
    assert asked.encoder == dataclasses.replace(
        found.described.model, dropout=0.3, attention_dropout=-1.0, classes=2
    )
    params, *rest = started(asked, drawn(asked.encoder, MASKED))
    assert rest == [[], []]
    jax.tree.map(np.testing.assert_array_equal, flat(params), flat(found.params))


def test_weights_of_runs_are_taken_over(masked: Path, speech: Path) -> None:
    for where, objective in ((masked, MASKED), (speech, SPEECH)):
        asked = ready(config(objective, where))
        model = asked.encoder
        assert (model.model_dim, model.norm_first, model.remat) == (8, False, False)
        params, *rest = started(asked, drawn(model, objective))
        assert rest == [[], []]
        expected = drawn(model, objective, seed=1)
        jax.tree.map(np.testing.assert_array_equal, flat(params), flat(expected))


@pytest.mark.parametrize("task", ["text_classification", "extractive_qa"])
def test_the_head_of_another_task_is_new_and_named(masked: Path, task: Any) -> None:
    """The old head may have an array of the same name and shape. New ids get new embeddings."""
    model = dataclasses.replace(SIZES, vocab_size=259)
    new = drawn(model, task)
    params, missing, _ = started(config(task, masked), new)
    heads = [name for name in flat(new) if name.startswith("head/")]
    assert sorted(missing) == sorted([*heads, f"{EMBEDDING} from row 257 on"])
    for name in heads:
        np.testing.assert_array_equal(flat(params)[name], flat(new)[name])
    np.testing.assert_array_equal(flat(params)[EMBEDDING][257:], flat(new)[EMBEDDING][257:])
    taken = {name: x[:257] if name == EMBEDDING else x for name, x in body(params).items()}
    old = drawn(dataclasses.replace(SIZES, vocab_size=257), MASKED, seed=1)
    jax.tree.map(np.testing.assert_array_equal, taken, body(old))


def test_a_run_starts_from_the_weights_and_says_what_is_new(
    masked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for split in ("train", "validation"):
        (tmp_path / f"{split}.txt").write_text(f"the text of {split}")
    data = Data(train=(f"{tmp_path}/train.txt",), validation=(f"{tmp_path}/validation.txt",),
                test=(), validation_fraction=0.0, test_fraction=0.0)  # fmt: skip
    run = runs.build(changed(config(MASKED, masked), data=data), progress=False)
    assert run.config.encoder.vocab_size == 257
    start, said = run.task.start, []

    def missing(*given: Any) -> WarmStart:
        return start(*given)._replace(missing=["head/a", "head/b"], unused=["old"])

    monkeypatch.setattr(type(run.task), "start", lambda task, *given: missing(*given))
    state = runs.new_state(run, said.append)
    expected = drawn(run.config.encoder, MASKED, seed=1)
    jax.tree.map(np.testing.assert_array_equal, flat(state.params), flat(expected))
    assert said == [
        f"initialized, because {masked} lacks them: head/a, head/b",
        f"not used, because this model lacks them: of {masked} old",
    ]

    def broken(*given: Any) -> WarmStart:
        started = start(*given)
        return started._replace(params=jax.tree.map(lambda x: x * np.nan, started.params))

    monkeypatch.setattr(type(run.task), "start", lambda task, *given: broken(*given))
    with pytest.raises(NonFiniteError, match=f"^the weights of {masked} hold NaN or infinity in "):
        runs.new_state(run, said.append)


@pytest.mark.parametrize(
    ("objective", "settings", "sentence"),
    [
        (MASKED, {"heads": 4}, "Model.heads = 4, but the weights of .* have 2; leave it out"),
        (MASKED, {"vocab_size": 300}, "Model.vocab_size = 300, but the weights .* have 257; lea"),
        (
            SPEECH,
            {},
            "masked.*read tokens, but Training.task = 'speech_.* needs .* read frames",
        ),
    ],
)
def test_settings_that_the_weights_do_not_have_are_refused(
    masked: Path, objective: str, settings: dict, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ready(config(objective, masked, **settings))


def test_frames_are_no_tokens_and_positions_end(speech: Path, roberta: Path) -> None:
    with pytest.raises(ConfigError, match="read frames, but .* needs some that read tokens"):
        ready(config(MASKED, speech))
    long = changed(config(MASKED, roberta), training={"segment_length": 40})
    with pytest.raises(ConfigError, match="segment_length = 40 is above .*--extend_positions"):
        tasks.check(ready(long))


def test_another_vocabulary_is_refused(roberta: Path, masked: Path, speech: Path) -> None:
    pieces = Vocabulary("words", ["a", "b"])
    other = "know another tokenizer than the words of the transcripts"
    more = "know 64 ids, but the tokenizer bytes makes that 257, the mask"
    for where, objective, tokenizer, sentence in (
        (roberta, MASKED, ByteTokenizer(), more),
        (masked, MASKED, pieces, other),
        (speech, SPEECH, pieces, other),
    ):
        with pytest.raises(ConfigError, match=sentence):
            known(config(objective, where), tokenizer)


def test_known_tokenizers_pass_and_special_ids_are_added(
    roberta: Path, masked: Path, speech: Path
) -> None:
    asked = ready(config(MASKED, roberta))
    # The model has an additional id for the mask token.
    theirs = Vocabulary("characters", map(chr, range(65, 65 + 62)))
    assert known(asked, theirs) == asked
    asked = ready(config(MASKED, masked))
    assert known(asked, ByteTokenizer()) == asked
    asked = ready(config("text_classification", masked))
    assert known(asked, text_tokenizers.load("bytes")).encoder.vocab_size == 259
    asked = ready(config(SPEECH, speech))
    assert known(asked, LETTERS) == asked


def test_arrays_that_do_not_fit_are_named(masked: Path, tmp_path: Path) -> None:
    model = dataclasses.replace(SIZES, vocab_size=257)
    for settings, sentence in (
        ({"mlp_dim": 10}, r"layers/mlp/wi/bias is \(1, 12\), but this model's is \(1, 10\); start"),
        ({"norm_first": True}, "lacks encoder/final_norm/bias, .*which this model has"),
        ({"positions": "none"}, r"pos_embed is \(22, 8\), but this model's is missing"),
        ({"vocab_size": 200}, r"embedding is \(257, 8\), but this model's is \(200, 8\)"),
    ):
        new = drawn(dataclasses.replace(model, **settings), MASKED)
        with pytest.raises(CheckpointError, match=sentence):
            started(config(MASKED, masked), new)
    with pytest.raises(
        CheckpointError, match="holds no encoder: neither a RoBERTa .*nor the checkp"
    ):
        ready(config(MASKED, tmp_path))


def test_summarisers_and_language_models_have_no_encoder_to_give(tmp_path: Path) -> None:
    list(convert.from_hf(DATA / "t5", tmp_path / "t5", verified=False))
    with pytest.raises(CheckpointError, match="holds no encoder: neither a RoBERTa"):
        ready(config(MASKED, tmp_path / "t5"))
    saved = config_json(Config())
    with CheckpointWriter(Workdir(tmp_path).checkpoints) as writer:
        writer.save(1, {"params": jnp.ones(1)}, {"config": saved, "tokenizer": ""})
    with pytest.raises(CheckpointError, match="it trained language_modeling, .* of Encoder; name"):
        ready(config(MASKED, tmp_path))
