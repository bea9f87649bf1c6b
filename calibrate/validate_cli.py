"""The command `validate`: predictions against measurements."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from calibrate.validation import deployments, engine
from sim.errors import UserError


class _Parser(argparse.ArgumentParser):
    """Mistakes are one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 2 for a user's mistake."""
    try:
        args = _parser().parse_args(argv)
        result: int = args.run(args)
        return result
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (`| head`) has seen enough; nothing may be flushed to it any more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="validate", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    command = commands.add_parser(
        "deployments",
        help="predict published deployments and compare with what was measured",
        description=deployments.__doc__,
    )
    deployments.add_arguments(command)
    command.set_defaults(run=deployments.run)
    command = commands.add_parser(
        "engine",
        help="run a trace on the real engine, simulate it, and compare",
        description=engine.__doc__,
    )
    engine.add_arguments(command)
    command.set_defaults(run=engine.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
