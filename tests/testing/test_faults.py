"""Each planted fault fails the case meant for it, and the report says which fault it is."""

import re

import pytest
from tests.testing.faults import FAULTS, RIGHT, faulty

from mla_ref.testing import Mismatch, find_case, known_faults

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize(("fault", "name", "words"), FAULTS)
def test_a_fault_is_found_and_named(fault: str, name: str, words: str) -> None:
    case = find_case(name)
    with pytest.raises(Mismatch, match=words) as caught:
        case.check(faulty(case.kind, fault))
    assert caught.value.case == name
    assert caught.value.findings
    # One more may fit where a result is NaN all over, whichever way the NaN came in.
    assert len(caught.value.looks_like) <= 2


@pytest.mark.parametrize("name", sorted({name for _, name, _ in FAULTS}))
def test_the_same_code_without_its_fault_passes(name: str) -> None:
    case = find_case(name)
    case.check(RIGHT[case.kind])


def test_every_known_fault_is_planted() -> None:
    patterns = [words for _, name, words in FAULTS if name.startswith(("decode/", "extend/"))]
    unplanted = [
        fault
        for fault in known_faults.FAULTS
        if not any(re.search(words, fault) for words in patterns)
    ]
    assert unplanted == [f"the sink is applied in each of {n} splits" for n in (4, 8, 16)]
