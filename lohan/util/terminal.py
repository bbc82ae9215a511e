"""What goes to the terminal. Names out of files (tensors, folders, chat) must not steer it."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with a mark in place of every character that is not printed but acted upon."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def echo(text: str, *, nl: bool = True) -> None:
    """Prints to stdout, from a command."""
    import typer

    typer.echo(printable(text), nl=nl)
