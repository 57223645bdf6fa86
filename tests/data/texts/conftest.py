import pytest
import tokenizers

from brt.data import tokenizer_training
from brt.data.texts import tokenization

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]  # RoBERTa's first ids
TEXTS = [
    "It was the best of times, it was the worst of times.",
    "the best caf\u00e9 of all times",
] * 9


@pytest.fixture(scope="session")
def roberta_json(tmp_path_factory):
    """Returns a tokenizer file like RoBERTa's: byte-level BPE, pairs `<s> text </s></s> text </s>`,
    and padding to 64 tokens.
    """
    made = tokenizers.ByteLevelBPETokenizer(trim_offsets=True)
    made.train_from_iterator(TEXTS, 300, special_tokens=SPECIAL, show_progress=False)
    made.post_processor = tokenizers.processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    made.enable_padding(pad_id=1, pad_token="<pad>", length=64)
    path = tmp_path_factory.mktemp("roberta") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture(scope="session")
def bert_json(tmp_path_factory):
    """Returns a tokenizer file like BERT's: `[CLS] text [SEP] text [SEP]`."""
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=120, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    made.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    path = tmp_path_factory.mktemp("bert") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture(scope="session")
def trained_model(tmp_path_factory):
    """Returns the model that the setting "train:300" trains."""
    path = tmp_path_factory.mktemp("model") / "tokenizer.model"
    tokenizer_training.train_sentencepiece(
        [TEXTS], 300, path, special=tokenization.ROBERTA, setting="Data.tokenizer"
    )
    return path


@pytest.fixture
def bytes_name():
    return "bytes"


@pytest.fixture(params=["bytes_name", "trained_model", "roberta_json", "bert_json"])
def tokenizer(request):
    return tokenization.load(str(request.getfixturevalue(request.param)), "Data.tokenizer")
