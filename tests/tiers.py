"""The tiers of the tests: execution contracts, each a folder below `tests`.

`tests/README.md` says what each promises.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One execution contract.

    A test that takes longer than `test_limit_s` fails: too small and a busy machine fails good
    tests, too big and a hang costs the whole run. `budget_s` is the aim for the tier as a whole on
    two cores; it is shown, not enforced.
    """

    test_limit_s: float
    budget_s: float
    in_ci: bool = True
    not_yet: str = ""  # why the tier may have no folder


TIERS = {
    "architecture": Tier(test_limit_s=120, budget_s=30),
    "unit": Tier(test_limit_s=20, budget_s=30),
    "property": Tier(test_limit_s=60, budget_s=60),
    "golden": Tier(test_limit_s=20, budget_s=10),
    "sim": Tier(test_limit_s=120, budget_s=120, not_yet="the simulator brings it"),
    "process": Tier(test_limit_s=120, budget_s=300),
    "cluster": Tier(test_limit_s=240, budget_s=1200),
    "gpu": Tier(test_limit_s=300, budget_s=600, in_ci=False),
    "chaos": Tier(test_limit_s=600, budget_s=3600, in_ci=False, not_yet="the campaigns bring it"),
}
LONG_TEST_LIMIT_S = 3600
