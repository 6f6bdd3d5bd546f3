"""What our images have to be, beyond what hadolint asks: rules over a parsed Dockerfile.

A rule is a function that yields (line, what is wrong); its name, with hyphens, names its fixtures
in tests/architecture/dockerfiles/.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from architecture.dockerfile import Dockerfile, Instruction

Finding = tuple[int, str]
Rule = Callable[[Dockerfile], Iterator[Finding]]

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_VARIABLE = re.compile(r"\$\{([A-Z][A-Z0-9_]*)\}")
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|CREDENTIAL", re.IGNORECASE)
_FETCHES = re.compile(r"\b(curl|wget|git|pip3?|apt(-get)?|huggingface-cli|hf|aws)\b")
_INSTALLS = re.compile(r"\bpip3? (?:\S+ )*install\b")
_SHELLS = frozenset({"sh", "bash", "dash", "ash", "env"})
_OFFLINE = ("PIP_NO_INDEX=1", "HF_HUB_OFFLINE=1")
USER_ID_MIN = 1000


def base_by_digest(file: Dockerfile) -> Iterator[Finding]:
    """Every foreign image is named by a digest: an argument without default, or one that is it."""
    named = {stage.name for stage in file.stages if stage.name}
    for stage in file.stages:
        if stage.image in named:
            continue
        _, at, digest = stage.image.rpartition("@")
        variable = _VARIABLE.fullmatch(digest)
        if not at or not (variable or _DIGEST.fullmatch(digest)):
            yield stage.line, f"{stage.image} is not named by its digest"
        elif variable and variable[1] not in file.arguments:
            yield stage.line, f"{variable[1]} is not declared before the first FROM"
        elif variable and not _is_digest_or_none(file.arguments[variable[1]]):
            yield stage.line, f"the default of {variable[1]} is no digest"


def _is_digest_or_none(default: str | None) -> bool:
    return default is None or _DIGEST.fullmatch(default) is not None


def multi_stage(file: Dockerfile) -> Iterator[Finding]:
    """What builds stays behind: the image copies the result out of another stage."""
    copies = [each for each in file.last.of("COPY") if "--from=" in each.text]
    if not copies:
        yield file.last.line, "the last stage takes nothing from an earlier one"


def non_root(file: Dockerfile) -> Iterator[Finding]:
    """The last word on the user is a number above root's; Kubernetes cannot check a name."""
    users = file.last.of("USER")
    if not users:
        yield file.last.line, "no USER: it would run as root"
        return
    number, _, group = users[-1].text.partition(":")
    for part in (number, group):
        if not part.isdigit() or int(part) < USER_ID_MIN:
            yield users[-1].line, f"USER {users[-1].text} must be two numbers from {USER_ID_MIN}"
            return
    later = [each for each in file.last.of("RUN") if each.line > users[-1].line]
    for each in later:
        yield each.line, "RUN behind the last USER"


def exec_form(file: Dockerfile) -> Iterator[Finding]:
    """The program is process 1: no shell in between, which would keep SIGTERM to itself."""
    entries = file.last.of("ENTRYPOINT")
    if not entries:
        yield file.last.line, "no ENTRYPOINT: the base's own would start"
    for each in (*entries, *file.last.of("CMD")):
        words = each.words
        if words is None:
            yield each.line, f"{each.keyword} in the shell's form"
        elif words and words[0].rsplit("/", 1)[-1] in _SHELLS:
            yield each.line, f"{each.keyword} starts a shell"
    if entries and entries[-1].words and entries[-1].words[0].rsplit("/", 1)[-1] != "stepfast":
        yield entries[-1].line, "the entry point is not stepfast"


def nothing_fetched_at_start(file: Dockerfile) -> Iterator[Finding]:
    """What starts needs no network: neither by its words nor by the tools' own habits."""
    for each in file.last.of("ENTRYPOINT", "CMD", "HEALTHCHECK", "ONBUILD"):
        if _FETCHES.search(each.text):
            yield each.line, f"{each.keyword} fetches"
    given = " ".join(each.text for each in file.last.of("ENV"))
    for variable in _OFFLINE:
        if variable not in given:
            yield file.last.line, f"ENV {variable} is missing"


def pinned_packages(file: Dockerfile) -> Iterator[Finding]:
    """pip takes the versions of a constraints file, keeps no cache, and upgrades nothing."""
    for each in _runs(file):
        for command in _commands(each):
            if not re.search(r"\bpip3? (?:\S+ )*(install|wheel|download)\b", command):
                continue
            if not re.search(r"(--constraint|-c)[ =]\S", command):
                yield each.line, "pip without a constraints file"
            if "--no-cache-dir" not in command:
                yield each.line, "pip keeps its cache in the layer"
            if re.search(r"(^| )(--upgrade|-U|--pre|--force-reinstall)( |$)", command):
                yield each.line, "pip may replace what is there"
            if "--extra-index-url" in command:
                yield each.line, "any package may come from the second index"


def verified_downloads(file: Dockerfile) -> Iterator[Finding]:
    """What is downloaded is compared with a sum in the same step."""
    for stage in file.stages:
        for each in stage.of("ADD"):
            yield each.line, "ADD; use COPY, or a download whose sum is checked"
    for each in _runs(file):
        if re.search(r"\b(curl|wget)\b.*https?://", each.text):
            if "sha256sum --check" not in each.text:
                yield each.line, "a download whose sum nobody checks"
            if re.search(r"\|\s*(ba|da)?sh\b", each.text):
                yield each.line, "a download goes straight into a shell"
        if re.search(r"\bgit clone\b", each.text):
            yield each.line, "a clone has no sum"


def no_secrets(file: Dockerfile) -> Iterator[Finding]:
    """Arguments and variables stay in the image's history."""
    for name in file.arguments:
        if _SECRET.search(name):
            yield 1, f"ARG {name} stays in the image's history"
    for stage in file.stages:
        for each in stage.of("ARG", "ENV"):
            for name in re.findall(r"(?:^|\s)([A-Za-z_][A-Za-z0-9_]*)(?==|$)", each.text):
                if _SECRET.search(name):
                    yield each.line, f"{each.keyword} {name} stays in the image's history"


def named_copies(file: Dockerfile) -> Iterator[Finding]:
    """Nothing comes along unnamed: no whole build context, no whole stage."""
    for stage in file.stages:
        for each in stage.of("COPY"):
            sources = [word for word in each.text.split()[:-1] if not word.startswith("--")]
            for source in sources:
                if source in (".", "./", "/", "*"):
                    yield each.line, f"COPY {source}"


def foreign_packages_kept(file: Dockerfile) -> Iterator[Finding]:
    """In somebody else's image pip is bound to what is there, and that is looked at again."""
    root = file.below(file.last)[-1].image
    if not _VARIABLE.match(root):
        return  # a base that we chose
    for stage in file.below(file.last):
        for each in stage.of("RUN"):
            commands = _commands(each)
            installs = [n for n, text in enumerate(commands) if _INSTALLS.search(text)]
            if not installs:
                continue
            wrote = [n for n, text in enumerate(commands) if "kept_packages.py write" in text]
            looked = [n for n, text in enumerate(commands) if "kept_packages.py check" in text]
            if not wrote or wrote[0] > installs[0]:
                yield each.line, "what is installed is not written down before pip runs"
            if not looked or looked[-1] < installs[-1]:
                yield each.line, "nobody looks whether pip changed what was there"
            for n in installs:
                if "kept.txt" not in commands[n] or "--only-binary :all:" not in commands[n]:
                    yield each.line, "pip is not bound to what is there, or may build"


RULES: dict[str, Rule] = {
    rule.__name__.replace("_", "-"): rule
    for rule in (
        base_by_digest,
        multi_stage,
        non_root,
        exec_form,
        nothing_fetched_at_start,
        pinned_packages,
        verified_downloads,
        no_secrets,
        named_copies,
        foreign_packages_kept,
    )
}


def _runs(file: Dockerfile) -> Iterator[Instruction]:
    for stage in file.stages:
        yield from stage.of("RUN")


def _commands(run: Instruction) -> list[str]:
    return [part.strip() for part in re.split(r"&&|;|\|\|", run.text)]


def findings(file: Dockerfile) -> list[str]:
    """Every rule's findings, as `rule line N: what is wrong`."""
    return [
        f"{name} line {line}: {what}" for name, rule in RULES.items() for line, what in rule(file)
    ]
