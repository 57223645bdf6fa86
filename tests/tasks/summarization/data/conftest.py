import numpy as np
import pytest
import sentencepiece
import tokenizers

from brt.data import sources, tokenizer_training
from brt.data.stores import Ragged
from brt.tasks.summarization import tokenization
from brt.tasks.summarization.preparation import PairStore

NOVEL = sources.CORPORA / "novels/train/robert-louis-stevenson-treasure-island.txt"
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]  # BART's first ids


@pytest.fixture(scope="session")
def lines():
    return [line for line in NOVEL.read_text(encoding="utf-8").splitlines() if line][:400]


@pytest.fixture(scope="session")
def t5_model(tmp_path_factory, lines):
    """Returns a model file like T5's: unigram, NFKC, a space before the text, pad 0 and end 1."""
    path = tmp_path_factory.mktemp("t5") / "spiece.model"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(path.with_suffix("")), vocab_size=500,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2, character_coverage=1.0,
    )  # fmt: skip
    return path


@pytest.fixture(scope="session")
def bart_json(tmp_path_factory, lines):
    """Returns a tokenizer file like BART's: byte-level BPE and `<s> text </s>`, with truncation and
    padding to 8 tokens.
    """
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(lines, 600, special_tokens=SPECIAL, show_progress=False)
    made.post_processor = tokenizers.processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    made.enable_truncation(8)
    made.enable_padding(pad_id=1, pad_token="<pad>", length=8)
    path = tmp_path_factory.mktemp("bart") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture(scope="session")
def t5_json(tmp_path_factory, lines):
    """Returns a file like T5's tokenizer.json, which encodes a text as `text </s>`."""
    made = tokenizers.Tokenizer(tokenizers.models.Unigram())
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=500, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>",
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator(lines, trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    path = tmp_path_factory.mktemp("t5json") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture(scope="session")
def trained_model(tmp_path_factory, lines):
    """Returns the model file that the setting Data.tokenizer = "train:600" trains."""
    path = tmp_path_factory.mktemp("trained") / "tokenizer.model"
    special = tokenizer_training.T5
    tokenizer_training.train_sentencepiece([["\n".join(lines)]], 600, path, special=special)
    return path


@pytest.fixture(params=["t5_model", "bart_json", "t5_json", "trained_model"])
def tokenizer(request):
    return tokenization.load(str(request.getfixturevalue(request.param)))


@pytest.fixture
def make_store(tmp_path):
    """Returns a function that makes a store from the lengths of documents and summaries.

    Each id is 100 times its row plus its position plus 10.
    """

    def make(lengths, summaries=None, max_source_length=32, max_target_length=8):
        rows = len(lengths)
        texts = []
        for sizes in (lengths, summaries or [1 + i % max_target_length for i in range(rows)]):
            ids = [100 * row + np.arange(size) + 10 for row, size in enumerate(sizes)]
            texts.append(Ragged(np.concatenate(ids), np.r_[0, np.cumsum(sizes)].astype(np.int64)))
        manifest = {
            "fingerprint": "f" * 64, "pad_id": 1, "eos_id": 2, "decoder_start_id": 2,
            "max_source_length": max_source_length, "max_target_length": max_target_length,
        }  # fmt: skip
        return PairStore(
            directory=tmp_path, manifest=manifest, source=texts[0], target=texts[1],
            reference=texts[1], source_uncut=texts[0].lengths, target_uncut=texts[1].lengths,
            ids=tuple(map(str, range(rows))),
        )  # fmt: skip

    return make
