"""`python -m tests.conformance CASE.json`: print the schedule of one case."""

import json
import sys
from pathlib import Path

from tests.conformance.harness import Run


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.conformance CASE.json")
    case = json.loads(Path(sys.argv[1]).read_text())
    sys.stdout.write(Run(case).run().document())


main()
