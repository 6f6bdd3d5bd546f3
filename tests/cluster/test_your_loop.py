"""Every Python block of `docs/your-loop.md` is a whole script, and runs.

A block runs under plain `python`. One with `<!-- run: stepfast -->` on the line before it runs
under `stepfast run` with two ranks as well.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "your-loop.md"
RUN_LIMIT_S = 90  # a cold import of torch and a handful of steps, on a busy machine
LAUNCHERS = {"stepfast"}

_MARK = re.compile(r"<!-- run: (?P<launcher>\S+) -->")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One Python block of the page, and what else than `python` is to run it."""

    heading: str
    line: int
    code: str
    launcher: str | None

    @property
    def name(self) -> str:
        words = re.sub(r"\W+", "-", self.heading.lower()).strip("-")
        return f"{words}-line-{self.line}"


def python_blocks(page: str) -> list[Block]:
    blocks: list[Block] = []
    heading, launcher = "", None
    lines = iter(enumerate(page.splitlines(), 1))
    for number, line in lines:
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if line.startswith("```"):
            code = []
            for _, inner in lines:
                if inner == "```":
                    break
                code.append(inner)
            if line == "```python":
                source = "\n".join(code) + "\n"
                block = Block(heading=heading, line=number, code=source, launcher=launcher)
                blocks.append(block)
        mark = _MARK.fullmatch(line)
        launcher = mark["launcher"] if mark else None
    return blocks


BLOCKS = python_blocks(PAGE.read_text(encoding="utf-8"))
CLUSTER_BLOCKS = [block for block in BLOCKS if block.launcher == "stepfast"]


def run_script(command: list[str], block: Block, folder: Path) -> None:
    script = folder / "train.py"
    script.write_text(block.code, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name not in _RANK_NAMES}
    done = subprocess.run(
        [*command, str(script)],
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
        check=False,
    )
    where = f"{PAGE.name}:{block.line}"
    assert done.returncode == 0, f"{where} ended with {done.returncode}\n{done.stdout}{done.stderr}"
    assert "Traceback" not in done.stderr, f"{where}\n{done.stderr}"


_RANK_NAMES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_a_block_runs_as_a_script(block: Block, tmp_path: Path) -> None:
    run_script([sys.executable], block, tmp_path)


@pytest.mark.parametrize("block", CLUSTER_BLOCKS, ids=lambda block: block.name)
def test_a_marked_block_runs_on_two_ranks(block: Block, tmp_path: Path) -> None:
    stepfast = str(Path(sys.executable).with_name("stepfast"))
    job = ["--nproc-per-node", "2", "--job-dir", str(tmp_path / "job")]
    run_script([stepfast, "run", *job], block, tmp_path)


def test_blocks_and_marks_are_all_found() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert len(BLOCKS) == page.count("```python\n") > 0
    marked = [block.launcher for block in BLOCKS if block.launcher]
    assert marked == _MARK.findall(page)  # a mark that stands elsewhere marks nothing
    assert set(marked) == LAUNCHERS


def test_blocks_are_read_with_heading_line_and_mark() -> None:
    page = "# A b\n\n```sh\n# no heading\n```\n\n<!-- run: stepfast -->\n```python\nx = 1\n```\n"
    block = Block(heading="A b", line=8, code="x = 1\n", launcher="stepfast")
    assert python_blocks(page) == [block]
    assert block.name == "a-b-line-8"
