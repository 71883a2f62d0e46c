"""What the doctor says about operators, extras and the machine."""

import importlib.metadata
import json
from dataclasses import fields
from email.message import Message

import pytest
import torch

from baltoro import doctor
from baltoro.model.config import ImplConfig
from baltoro.ops.impl import ImplError


def test_every_operator_of_the_configuration_is_run_and_reported():
    found = doctor.operators(torch.device("cpu"))
    assert list(found) == [field.name for field in fields(ImplConfig)]
    assert all("torch runs on cpu; reference runs too" in words for words in found.values())


def test_a_refusal_is_reported_with_its_reason(monkeypatch):
    def refuse(*args, **kwargs):
        raise ImplError("kda: head_dim=16 is too small")

    monkeypatch.setattr(doctor, "chunk_kda", refuse)
    found = doctor.operators(torch.device("cpu"))
    assert found["kda"].startswith("torch CANNOT run: kda: head_dim=16 is too small")
    assert found["moe"].startswith("torch runs on cpu")


def test_a_field_without_a_call_is_noticed():
    with pytest.raises(AssertionError, match="no way to run it here"):
        doctor._run("rope", "torch", torch.device("cpu"))


def test_json_is_one_object_with_the_versions(capsys):
    doctor.doctor(json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["machine"]["torch"] == torch.__version__
    assert set(report) == {"machine", "operators", "extras"}


def test_a_missing_extra_says_how_to_get_it(monkeypatch):
    metadata = Message()
    metadata["Provides-Extra"] = "gpu"
    requires = ["numpy>=1", 'no-such-package>=1; extra == "gpu"', 'pytest; extra == "gpu"']
    monkeypatch.setattr(importlib.metadata, "metadata", lambda _: metadata)
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: requires)
    assert doctor.extras() == {"gpu": "missing no-such-package: pip install 'baltoro[gpu]'"}
