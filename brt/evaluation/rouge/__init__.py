"""ROUGE (Lin 2004) under named protocols."""

from brt.evaluation.rouge.aggregation import Aggregate as Aggregate
from brt.evaluation.rouge.aggregation import aggregate as aggregate
from brt.evaluation.rouge.protocols import PROTOCOLS as PROTOCOLS
from brt.evaluation.rouge.protocols import Protocol as Protocol
from brt.evaluation.rouge.protocols import protocol as protocol
from brt.evaluation.rouge.scores import Score as Score
