"""CRIU against the contract of machine drivers. Slow: each case boots real sandboxes."""

import pytest
from sandbox import contract

from baltoro.sandbox.criu import Criu
from baltoro.sandbox.install import default_prefix

CASES = [
    contract.commands_work,
    contract.bytes_pass_unchanged,
    contract.an_image_without_a_shell_is_named,
    contract.attacks_are_denied,
    contract.hogs_are_stopped,
    contract.pauses_keep_files,
    contract.branches_diverge,
    contract.a_paused_sandbox_forks,
    contract.a_stopped_sandbox_comes_back,
    contract.a_lost_create_is_found_by_its_key,
    contract.twenty_cycles_leave_nothing,
    contract.sixteen_branches_answer,
    contract.a_copied_store_wakes_under_another_root,
    contract.a_full_disk_is_named,
    contract.only_listed_hosts_answer,
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_criu(tmp_path, case):
    contract.run(lambda: Criu(default_prefix()), tmp_path, case)
