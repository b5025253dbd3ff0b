"""What a person reads of a search."""

from sirara.plan.explain_search import search_text
from sirara.plan.hardware import find
from sirara.plan.layouts import whole_space
from sirara.plan.search import search
from sirara.pure.families import PRESETS
from tests.unit.plan.test_search import config, setting

SHAPE = PRESETS["llama2-7b"]


def test_a_search_names_best_alternatives_knobs_and_what_is_left_out():
    space = whole_space(config(), SHAPE, find("a100-80gb"), 8)
    said = search_text(search(config(), SHAPE, setting(8), space))
    for part in ("best", "nearest alternatives", "each knob at each value", "left out", "to use it"):
        assert part in said
