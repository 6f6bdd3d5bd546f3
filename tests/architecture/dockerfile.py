"""A Dockerfile, read strictly: instructions, stages, the arguments before the first of them.

Refused is what would make a line mean something else than it says: another escape character, a
here-document, an instruction that is not known.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

_KEYWORD = re.compile(
    r"ADD|ARG|CMD|COPY|ENTRYPOINT|ENV|EXPOSE|FROM|HEALTHCHECK|LABEL|ONBUILD|RUN|SHELL|STOPSIGNAL"
    r"|USER|VOLUME|WORKDIR",
    re.IGNORECASE,
)
_FROM = re.compile(
    r"(?:--platform=\S+\s+)?(?P<image>\S+)(?:\s+[Aa][Ss]\s+(?P<name>[a-z][a-z0-9_-]*))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction: where it begins, its keyword in capitals, the rest with lines joined."""

    line: int
    keyword: str
    text: str

    @property
    def words(self) -> list[str] | None:
        """The words of the exec form; None for the shell's."""
        if not self.text.startswith("["):
            return None
        try:
            words = json.loads(self.text)
        except ValueError:
            return None
        return words if all(isinstance(word, str) for word in words) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """From one FROM to the next."""

    line: int
    image: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def of(self, *keywords: str) -> list[Instruction]:
        """Its instructions with these keywords, in order."""
        return [each for each in self.instructions if each.keyword in keywords]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dockerfile:
    """`arguments`: those before the first stage, with their defaults; None where there is none."""

    arguments: dict[str, str | None]
    stages: list[Stage]

    @property
    def last(self) -> Stage:
        """The stage that becomes the image."""
        return self.stages[-1]

    def below(self, stage: Stage) -> list[Stage]:
        """The stages that this one is built upon, itself first."""
        found = [stage]
        named = {each.name: each for each in self.stages if each.name}
        while found[-1].image in named:
            found.append(named[found[-1].image])
        return found


def parse(text: str) -> Dockerfile:
    """The file. Raises ValueError with the line for what is refused."""
    arguments: dict[str, str | None] = {}
    stages: list[Stage] = []
    for each in _instructions(text):
        if each.keyword == "FROM":
            match = _FROM.fullmatch(each.text)
            if match is None:
                raise ValueError(f"line {each.line}: FROM {each.text} cannot be read")
            stages.append(Stage(line=each.line, image=match["image"], name=match["name"] or ""))
        elif stages:
            stages[-1].instructions.append(each)
        elif each.keyword == "ARG":
            name, given, default = each.text.partition("=")
            arguments[name] = default if given else None
        else:
            raise ValueError(f"line {each.line}: {each.keyword} before the first FROM")
    if not stages:
        raise ValueError("line 1: there is no FROM")
    return Dockerfile(arguments=arguments, stages=stages)


def _instructions(text: str) -> list[Instruction]:
    found: list[Instruction] = []
    begun, parts = 0, []
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        if bare.startswith("#"):
            if re.match(r"#\s*escape\s*=", bare):
                raise ValueError(f"line {number}: another escape character")
            continue
        if not bare and parts:
            raise ValueError(f"line {number}: an empty line inside an instruction")
        if not bare:
            continue
        begun = begun if parts else number
        goes_on = bare.endswith("\\")
        parts.append(bare[:-1].strip() if goes_on else bare)
        if not goes_on:
            found.append(_instruction(begun, " ".join(parts)))
            parts = []
    if parts:
        raise ValueError(f"line {begun}: the last line goes on")
    return found


def _instruction(line: int, text: str) -> Instruction:
    keyword, _, rest = text.partition(" ")
    if _KEYWORD.fullmatch(keyword) is None:
        raise ValueError(f"line {line}: {keyword} is no instruction")
    if re.search(r"<<-?[\"']?[A-Za-z_]", rest):
        raise ValueError(f"line {line}: a here-document")
    return Instruction(line=line, keyword=keyword.upper(), text=rest.strip())
