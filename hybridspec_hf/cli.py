"""The `hybridspec` command: arguments → one of the subcommands in `hybridspec_hf.commands`."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from hybridspec_hf import __version__
from hybridspec_hf.commands import bench, calibrate, demo, generate


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: the arguments; None takes those of the process.

    Returns:
        The exit status: 0, 1 if the demo or a bench found a difference in fp32, 2 for a mistake in the call,
        130 if interrupted.
    """
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    # RuntimeError: no memory, no such device
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"hybridspec {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        advice = f"; {args.interrupted}" if hasattr(args, "interrupted") else ""
        print(f"hybridspec {args.command}: interrupted{advice}", file=sys.stderr)
        return 130


class ExactParser(argparse.ArgumentParser):
    """Takes no part of an option's name for the option: a misspelled one is refused."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command and all its subcommands."""
    parser = argparse.ArgumentParser(prog="hybridspec", description="Exact speculative decoding for GDN-MoE models.")
    parser.add_argument("--version", action="version", version=f"hybridspec_hf {__version__}")
    options: dict[str, Any] = {"parser_class": ExactParser}
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command", **options)
    demo.add_parser(subparsers)
    generate.add_parser(subparsers)
    calibrate.add_parser(subparsers)
    bench.add_parser(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
