import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pool import Pool


@pytest.fixture(scope="session")
def ranks2():
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks4():
    pool = Pool(4)
    yield pool
    pool.close()
