"""Each example runs from its file alone, within its length, and its loss goes down."""

import re
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted({path.stem for path in FOLDER.glob("*.py")} - {"train_gpt"})


# In this process, so that the large imports are paid once; from an empty folder, so that an
# example that leaves files behind is noticed.
@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.filterwarnings("ignore")
def test_an_example_runs_and_learns(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    losses = [float(found) for found in re.findall(r"loss (\d+\.\d+)", printed)]
    assert len(losses) >= 2
    if name == "huggingface_trainer":  # two runs: each below log 32, the loss of a guess
        assert max(losses) < 3.0
    else:
        assert losses[-1] < 0.97 * losses[0]
    if name in ("lightning_module", "tensorboard_log"):
        assert re.search(r"leon/\S+\.weight/update_norm", printed)
    assert not list(tmp_path.iterdir())
