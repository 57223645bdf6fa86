"""ROUGE (Lin 2004) under named protocols."""

from brt.tasks.summarization.rouge.aggregation import Aggregate as Aggregate
from brt.tasks.summarization.rouge.aggregation import aggregate as aggregate
from brt.tasks.summarization.rouge.protocols import PROTOCOLS as PROTOCOLS
from brt.tasks.summarization.rouge.protocols import Protocol as Protocol
from brt.tasks.summarization.rouge.protocols import protocol as protocol
from brt.tasks.summarization.rouge.scores import Score as Score
