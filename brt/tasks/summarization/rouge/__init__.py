"""ROUGE (Lin 2004) with named protocols.

The scores equal the scores of the package rouge-score 0.1.2; the tests compare the two. The
package itself takes too long for evaluations. On one core of an AMD EPYC, 10,000 pairs of summaries
take these times in seconds:

                                       package   this implementation
    200 words a summary                    294                    20
    500 words a summary                  1,425                    87
    200 words, with Porter's stemmer       400                    23
    500 words, with Porter's stemmer     1,679                    92

The package fills the table of a longest common subsequence cell by cell; the module `scores`
computes a row of the table with a few operations on integers.
"""

from brt.tasks.summarization.rouge.aggregation import Aggregate as Aggregate
from brt.tasks.summarization.rouge.aggregation import aggregate as aggregate
from brt.tasks.summarization.rouge.protocols import PROTOCOLS as PROTOCOLS
from brt.tasks.summarization.rouge.protocols import RougeProtocol as RougeProtocol
from brt.tasks.summarization.rouge.protocols import get_protocol as get_protocol
from brt.tasks.summarization.rouge.scores import Score as Score
