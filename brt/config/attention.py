"""How the queries of an encoder attend to its keys: exactly, or by one of the approximations."""

import dataclasses
from typing import Literal

from brt.config.checks import check, check_finite, check_not_negative, check_positive
from brt.config.fields import free


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """The kind of attention. Weights trained with one kind can be evaluated with any other.

    full                exact softmax attention
    shared_full         the same, with the queries' projection for the keys too
    clustered           queries of one cluster share their centroid's attention
    improved_clustered  the same, but exact on the keys that the centroid attends to most
    reformer            keys of nearby chunks, after sorting by hash; queries are the keys
    oracle_top_k        every query's keys with the largest products
    """

    kind: Literal[
        "full", "shared_full", "clustered", "improved_clustered", "reformer", "oracle_top_k"
    ] = free("full")
    min_length: int = free(0)  # sequences shorter than this, padding included: exact attention
    clusters: int = free(100)  # of the queries of a head, at most; clustered and improved_clustered
    iterations: int = free(5)  # of k-means; the original: 10
    fit_queries: int = free(0)  # queries that k-means learns from, drawn at random; 0: all
    top_k: int = free(32)  # exact keys of a cluster (improved_clustered) or a query (oracle_top_k)
    # weight of these keys against the others
    mass_rule: Literal["paper", "lse_jensen"] = free("paper")
    mass_stop_gradient: bool = free(False)  # True: that of the paper's rule is constant (original)
    rounds: int = free(1)  # of hashing; reformer
    buckets: int = free(64)  # of a round of hashing; reformer
    chunk: int = free(32)  # sorted queries that see their own chunk and the one before; reformer

    def __post_init__(self) -> None:
        check_finite(self)
        check_positive(self, "clusters", "iterations", "top_k", "rounds", "buckets", "chunk")
        check(
            self.min_length >= 0,
            f"Attention.min_length = {self.min_length} must not be negative; 0: the kind always",
        )
        check(
            self.fit_queries == 0 or self.fit_queries >= self.clusters,
            f"Attention.fit_queries = {self.fit_queries} must not be below Attention.clusters = "
            f"{self.clusters}; 0 takes all queries",
        )
        check_not_negative(self, "min_length", "fit_queries")
        check(
            self.buckets % 2 == 0,
            f"Attention.buckets = {self.buckets} must be even: a hash has two signs",
        )
        check(
            not self.mass_stop_gradient or self.mass_rule == "paper",
            f"Attention.mass_stop_gradient = True needs Attention.mass_rule = 'paper', not "
            f"{self.mass_rule!r}",
        )

    def check_length(self, length: int, said: str) -> None:
        """Refuses numbers that no sequence reaches.

        Args:
          length: of the longest sequence.
          said: this length, as a sentence has it: what it is, and where it comes from.
        """
        if length < self.min_length:  # exact attention
            return
        clustered = self.kind in ("clustered", "improved_clustered")
        chosen = self.kind in ("improved_clustered", "oracle_top_k")
        for name, number, read in (
            ("clusters", self.clusters, clustered), ("top_k", self.top_k, chosen)
        ):  # fmt: skip
            check(
                not read or number <= length,
                f"Attention.{name} = {number} is above {said}, the most that a sequence has; set "
                f"it to {length} at most",
            )
