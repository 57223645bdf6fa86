"""The data that a run's objective asks for."""

from brt.config import Config
from brt.data import preparation
from brt.data.pairs import preparation as pair_preparation
from brt.data.pairs.preparation import PairCorpus
from brt.data.pairs.tokenization import PairTokenizer
from brt.data.preparation import Corpus
from brt.data.questions import preparation as question_preparation
from brt.data.questions.preparation import QuestionCorpus
from brt.data.sentences import preparation as sentence_preparation
from brt.data.sentences.preparation import SentenceCorpus
from brt.data.speech import preparation as speech_preparation
from brt.data.speech.preparation import SpeechCorpus
from brt.data.speech.vocabulary import Vocabulary
from brt.data.texts.tokenization import TextTokenizer
from brt.data.tokenizers import Tokenizer

AnyCorpus = Corpus | PairCorpus | SpeechCorpus | SentenceCorpus | QuestionCorpus
AnyTokenizer = Tokenizer | PairTokenizer | Vocabulary | TextTokenizer


def open_corpus(config: Config, *, progress: bool = True) -> AnyCorpus:
    """What the objective asks for; prepared first where that was not done yet."""
    if config.training.objective == "ctc":
        return speech_preparation.prepare(config.speech, progress)
    if config.training.objective == "seq2seq":
        return pair_preparation.prepare(config.pairs, progress)
    if config.training.objective in ("classification", "regression"):
        numbers = config.training.objective == "regression"
        return sentence_preparation.prepare(config.sentences, progress, numbers=numbers)
    if config.training.objective == "spans":
        return question_preparation.prepare(config.questions, progress)
    return preparation.prepare(config.data, progress=progress)
