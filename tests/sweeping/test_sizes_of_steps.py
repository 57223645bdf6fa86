"""Tests that a report compares the times of steps only between steps with equally many tokens."""

import pytest

from brt.bindings import Resolved
from brt.config import Config
from brt.sweeping import report
from brt.sweeping.points import Point
from brt.sweeping.report import Group, Row


def row(name: str, seconds: float, tokens: float) -> Row:
    """Returns a report row of a point with the given seconds and tokens per step."""
    return Row(
        point=Point(0, name, name, name, {}, Resolved(Config(), {}, {})), status="finished",
        reason="", metrics={"bits_per_byte": 2.0}, step_seconds=seconds,
        tokens_per_second=tokens / seconds, tokens_per_step=tokens, parameters=None,
        parameters_non_embedding=None, steps=1, seconds=1.0, threads=0, records=[], answers={},
    )  # fmt: skip


def grouped(*rows: Row) -> list[Group]:
    """Returns the groups of the rows; the first row is the baseline."""
    return report.group(rows, rows[0].point.name)


def test_relative_times_are_of_steps_of_one_size() -> None:
    found = grouped(row("XL", 0.1, 128.0), row("Rec", 0.2, 128.4), row("Vanilla", 0.3, 1024.0))
    assert [g.relative_step_time for g in found] == [1.0, 2.0, None]


def test_the_tables_say_how_large_a_step_is() -> None:
    rows = row("XL", 0.1, 128.0), row("Vanilla", 0.3, 1024.0)
    head, _, *lines = (
        [c.strip() for c in x.split("|")] for x in report.group_table(grouped(*rows))
    )
    assert [line[head.index("tokens/step")] for line in lines] == ["128", "1,024"]
    assert [line[head.index("relative")] for line in lines] == ["1.00", "-"]
    assert "tokens/step" in report.point_table(rows)[0]
    assert "tokens_per_step" in report.table_csv(rows, grouped(*rows)).splitlines()[0]


def test_tokens_of_a_step_are_read_from_metrics() -> None:
    records = [
        {"perf/tokens_per_second": 640.0, "perf/step_seconds": 0.2},
        {"eval/validation/bits_per_byte": 2.0},
        {"perf/tokens_per_second": 1280.0, "perf/step_seconds": 0.1},
    ]
    tags = "perf/tokens_per_second", "perf/step_seconds"
    assert report.median(records, *tags) == pytest.approx(128.0)


def test_the_plot_compares_tokens_where_steps_differ() -> None:
    same = report.trade_off(grouped(row("a", 0.1, 128.0), row("b", 0.2, 128.0)))
    assert same.axes[0].get_xlabel() == "milliseconds of a training step"
    figure = report.trade_off(grouped(row("a", 0.1, 100.0), row("b", 0.1, 1000.0)))
    assert figure.axes[0].get_xlabel() == "milliseconds of training on 1,000 tokens"
    places = sorted(text.xy[0] for text in figure.axes[0].texts)
    assert places == pytest.approx([100.0, 1000.0])
