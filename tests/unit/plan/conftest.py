"""A plan that several ways of showing it are tested with."""

import pytest

from sirara.plan.exact import configured
from sirara.plan.verdict import Plan, plan
from sirara.pure.families import PRESETS
from tests.unit.plan.test_search import config, setting


@pytest.fixture(scope="session")
def piped() -> Plan:
    """llama2-7b on a pipeline of four, two of them."""
    c = configured(config(), ("mesh={pp: 4, dp: 2}",))
    return plan(c, PRESETS["llama2-7b"], setting(8), dp=2)
