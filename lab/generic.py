"""Write strategies/frameworks/generic.yaml, the profile of an unknown framework.

python -m lab.generic [--out strategies/frameworks/generic.yaml]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from lab.command import command_parser, exits_on_errors
from perfmodel.foundation.resources import write_atomically
from perfmodel.frameworks.generic import generic_profile
from perfmodel.frameworks.profile import profile_text

HEAD = "# Written by `python -m lab.generic`: the mean of the profiles that name their family. Not edited by hand.\n"


@exits_on_errors
def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_parser("generic", __doc__, cases=False)
    parser.add_argument("--out", type=Path, default=Path("strategies/frameworks/generic.yaml"), metavar="FILE.yaml")
    options = parser.parse_args(arguments)
    write_atomically(options.out, HEAD + profile_text(generic_profile()))
    print(options.out)


if __name__ == "__main__":
    sys.exit(main())
