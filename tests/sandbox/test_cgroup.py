"""Control groups: how a process enters one, which decides how long a sandbox takes to come back."""

from baltoro.sandbox.cgroup import Cgroup


def test_a_process_enters_split_hierarchies_without_the_lock_of_all_threads():
    """Written as 0 to `tasks`: `cgroup.procs`, or a pid, waits 10 ms for every processor."""
    group = Cgroup("somebody")
    group.is_unified = False
    joins = group.entering(["true"])[2]
    assert joins.count("echo 0 > ") == len(group.folders)
    assert joins.count("/tasks") == len(group.folders)
    assert "cgroup.procs" not in joins


def test_a_process_enters_the_unified_hierarchy_by_its_only_door():
    group = Cgroup("somebody")
    group.is_unified = True
    assert "/cgroup.procs" in group.entering(["true"])[2]
