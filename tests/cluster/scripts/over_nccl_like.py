"""Another script over groups with NCCL's manners: `over_nccl_like.py SCRIPT ARGUMENTS ...`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]

if __name__ == "__main__":
    sys.path[:0] = [str(TESTS), str(Path(sys.argv[1]).parent)]
    from fakes.nccl_like import wiring

    wiring.use()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
