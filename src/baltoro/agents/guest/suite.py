"""Runs Python tests inside a sandbox, one outcome per test. Standard library only, and no package.

    suite.py run FILES...             print JSON: test id -> "passed", "failed" or "skipped"
    suite.py judge RESULT EXPECTED    EXPECTED names files and ids; write 1 if all of them pass
    suite.py written RESULT EXPECTED  EXPECTED names the agent's test file and broken sources;
                                      write 1 if its tests pass now and one fails on those

With pytest, if the sandbox has it, else with unittest. The tests run in a child process that does
not know where the result goes and reports on a pipe; a test that ends the process early therefore
counts as missing. What this does NOT stop: code under test that forges reports on that pipe.
"""

import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import unittest
from collections.abc import Callable, Sequence
from typing import Any, TextIO

CHILD = "child"
Emit = Callable[[str, str], None]


def main(argv: Sequence[str]) -> None:
    """Do what the words say."""
    verb, *rest = argv
    if verb == CHILD:
        report = os.fdopen(int(rest[0]), "w")
        sys.path.insert(0, os.getcwd())
        run_here(rest[1:], lambda name, outcome: emit(report, name, outcome))
        return
    if verb == "run":
        print(json.dumps(outcomes(rest), sort_keys=True))
        return
    result, expected_path = rest
    with open(expected_path) as source:
        expected = json.load(source)
    judge = {"judge": judge_expected, "written": judge_written}[verb]
    score = judge(expected)
    with open(result, "w") as target:
        target.write(str(int(score)))


def judge_expected(expected: dict[str, Any]) -> bool:
    """Whether every expected test passes."""
    seen = outcomes(expected["files"])
    missing = [name for name in expected["tests"] if seen.get(name) != "passed"]
    for name in missing:
        print("not passed:", name, seen.get(name, "missing"))
    return not missing


def judge_written(expected: dict[str, Any]) -> bool:
    """Whether tests that the agent wrote pass on the good sources and notice the bad ones."""
    test_file = expected["file"]
    if not os.path.exists(test_file):
        print("there is no", test_file)
        return False
    good = outcomes([test_file])
    if not good or set(good.values()) != {"passed"}:
        print("on the correct code:", good or "no test ran")
        return False
    for place, broken in expected["broken"].items():
        if broken is None:
            os.remove(place)
        else:
            shutil.copyfile(broken, place)
    bad = outcomes([test_file])
    if set(bad) == set(good) and set(bad.values()) == {"passed"}:
        print("every test passes on the wrong code as well")
        return False
    return True


def outcomes(files: Sequence[str]) -> dict[str, str]:
    """Outcomes by test id, from a child process."""
    out, into = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-I", "-B", os.path.abspath(__file__), CHILD, str(into), *files],
        pass_fds=[into],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
    )
    os.close(into)
    seen: dict[str, str] = {}
    with os.fdopen(out) as lines:
        for line in lines:
            name, outcome = json.loads(line)
            if seen.get(name, "passed") == "passed":  # a failed teardown after a passed test
                seen[name] = outcome
    child.wait()
    return seen


def emit(report: TextIO, name: str, outcome: str) -> None:
    """Tell the parent."""
    report.write(json.dumps([name, outcome]) + "\n")
    report.flush()


def run_here(files: Sequence[str], emit_one: Emit) -> None:
    """Run tests in this process."""
    if importlib.util.find_spec("pytest") is not None:
        run_pytest(files, emit_one)
    else:
        run_unittest(files, emit_one)


def run_pytest(files: Sequence[str], emit_one: Emit) -> None:
    """Run them with pytest."""
    pytest = importlib.import_module("pytest")

    class Reporter:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                emit_one(report.nodeid, report.outcome)

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                emit_one(report.nodeid, "failed")

    pytest.main(["-q", "-p", "no:cacheprovider", *files], plugins=[Reporter()])


def run_unittest(files: Sequence[str], emit_one: Emit) -> None:
    """Run them with unittest."""
    suite = unittest.TestSuite()
    for path in files:
        name = os.path.splitext(path)[0].replace(os.sep, ".")
        try:
            suite.addTests(unittest.defaultTestLoader.loadTestsFromName(name))
        except Exception as error:  # whatever the module does at import
            print(f"{path}: {error!r}", file=sys.stderr)
            emit_one(path, "failed")

    class Result(unittest.TextTestResult):
        def addSuccess(self, test: Any) -> None:
            emit_one(test.id(), "passed")

        def addFailure(self, test: Any, err: Any) -> None:
            super().addFailure(test, err)
            emit_one(test.id(), "failed")

        def addError(self, test: Any, err: Any) -> None:
            super().addError(test, err)
            emit_one(test.id(), "failed")

        def addSkip(self, test: Any, reason: str) -> None:
            emit_one(test.id(), "skipped")

        def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
            super().addSubTest(test, subtest, err)
            if err is not None:
                emit_one(test.id(), "failed")

    unittest.TextTestRunner(resultclass=Result).run(suite)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(sys.argv[1:])
