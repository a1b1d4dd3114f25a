"""Three rows of the sabotage table; `make sabotage` runs all of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fault import FAULTS, PATCH, Fault

import sabotage
from nucleon.claims import CLAIMS
from sabotage import Outcome

COMMAND = Path(__file__).parent / "sabotage.py"
THREE = (
    "FTRL's L is Λ, not its root",
    "Lemma C.3 without its factor 2",
    "the quasi-Newton gradient is not symmetrized",
)


def test_the_table_is_complete():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 25
    assert {claim for fault in FAULTS for claim in fault.claims} == set(CLAIMS)
    assert set(THREE) <= {fault.name for fault in FAULTS}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault):
    fault.put_in()
    differs = any(vars(owner).get(name) is not exact for owner, name, exact in PATCH._setattr)
    PATCH.undo()
    assert differs


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_three_faults_are_noticed():
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, COMMAND, "--first", *THREE],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 pairs noticed, 3 claims pass without a fault, 0 not as" in done.stdout


def test_neither_a_crash_nor_a_failure_without_a_fault_passes():
    fault = Fault("a fault", ("thm-gbpa",), lambda: None)
    for result, right in (
        (Outcome(["a check"]), True),
        (Outcome([]), False),
        (Outcome([], "ValueError: no"), False),
    ):
        assert sabotage.as_it_should(fault, result) is right
        assert ("NOT NOTICED" in sabotage.row(fault, "thm-gbpa", result)) is not right
    assert sabotage.as_it_should(None, Outcome([]))
    assert not sabotage.as_it_should(None, Outcome(["a check"]))
    assert not sabotage.as_it_should(None, Outcome([], "ValueError: no"))


def test_an_unknown_fault_is_told(capsys):
    assert sabotage.main(["no such fault"]) == 2
    assert "no fault or claim is called no such fault" in capsys.readouterr().err
