"""What is claimed of GPUs, measured on those of this machine; writes gpu-report.json.

    python bench/gpu.py                                 all claims; minutes on one GPU
    python bench/gpu.py --only "staging stall"
    python bench/gpu.py --state-gib 16                  a state of that size for the stall

The claims and what they measure are those of tests/gpu; docs/gpu-status.md says what was found so
far. Never run on a GPU. Without one each claim is NOT RUN, with the reason, and the exit code is 0;
it is 1 where a claim failed.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"


def main() -> int:
    sys.path[0] = str(TESTS)  # in the place of this folder, where `gpu` is this file
    from gpu.bench import Status, on_this_machine, report_of, summary_lines
    from gpu.claims import CLAIMS

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [claim.name for claim in CLAIMS]
    parser.add_argument("--only", action="append", choices=names, help="this claim; repeatable")
    parser.add_argument("--state-gib", type=float, default=1.0, help="the state that is staged")
    parser.add_argument("--recoveries", type=int, default=100, help="for the claim of flat memory")
    parser.add_argument("--out", type=Path, default=Path("gpu-report.json"))
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="stepfast-gpu-") as place:
        for number, claim in enumerate(CLAIMS):
            bench, why_not = on_this_machine(Path(place, str(number)))
            if options.only and claim.name not in options.only:
                rows.append(claim.row(Status.NOT_RUN, "it was not asked for"))
                continue
            if bench is not None:
                state_bytes = int(options.state_gib * (1 << 30))
                bench = dataclasses.replace(
                    bench, state_bytes=state_bytes, recoveries=options.recoveries
                )
            rows.append(claim.run(bench, why_not))
    report = report_of(rows)
    options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print("\n".join(summary_lines(report)))
    return 1 if any(row["status"] == Status.FAIL for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
