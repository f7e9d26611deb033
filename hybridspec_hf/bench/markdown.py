"""Rows of text -> a Markdown table."""

from collections.abc import Iterator


def table(header: list[str], rows: list[list[str]]) -> Iterator[str]:
    """A Markdown table; columns are as wide as their text, so that it reads as it is, too."""
    header, *rows = [[cell_text(text) for text in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    yield "| " + " | ".join(text.ljust(width) for text, width in zip(header, widths, strict=True)) + " |"
    yield "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    for row in rows:
        yield "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |"


def cell_text(text: str) -> str:
    """Text that stays within its cell, whatever a category is called."""
    return " ".join(text.split()).replace("|", "\\|")
