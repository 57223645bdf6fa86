"""Functions for the setting `Data.columns`, which names the columns of files with texts.

Its items have the form ROLE=COLUMN: the item "text=article" says that the column `article` contains
the texts.
"""

from typing import Any

from brt.config.checks import check


def column(section: Any, role: str, usual: str = "") -> str:
    """Returns the column that a section names for a role, or `usual` if it names none."""
    return dict(pair.split("=", 1) for pair in section.columns).get(role, usual)


def check_columns(section: Any, *roles: str) -> None:
    """Refuses `columns` unless each item is ROLE=COLUMN, with a role of its own."""
    form = " or ".join(f"'{role}=COLUMN'" for role in roles)
    for pair in section.columns:
        role, _, name = pair.partition("=")
        check(
            role in roles and bool(name),
            f"Data.columns = {section.columns}: {pair!r} must be {form}",
        )
    named = [pair.partition("=")[0] for pair in section.columns]
    check(len({*named}) == len(named), f"Data.columns = {section.columns} names a column twice")
