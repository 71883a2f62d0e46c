"""gVisor against the contract of machine drivers. Slow: each case boots real sandboxes."""

import pytest
from sandbox import contract

from baltoro.sandbox.gvisor import Gvisor
from baltoro.sandbox.install import default_prefix


@pytest.mark.slow
@pytest.mark.parametrize("case", contract.CASES, ids=lambda case: case.__name__)
def test_gvisor(tmp_path, case):
    contract.run(lambda: Gvisor(default_prefix()), tmp_path, case)
