"""A probe is remembered by all that it depends on, and never by a file that could run code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import truestep as ts
from truestep.optimizers.probe import Probe, cache, probe, probing


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep files in a folder of the test's own."""
    monkeypatch.setenv("TRUESTEP_CACHE", str(tmp_path / "kept"))
    cache.forget()
    return tmp_path / "kept" / "probes"


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Count what is really measured."""
    measured: list[Any] = []
    real = probing._probed
    monkeypatch.setattr(probing, "_probed", lambda *args: measured.append(args) or real(*args))
    return measured


def test_the_second_probe_of_a_class_is_read_from_memory_and_in_a_new_process_from_a_file(
    folder: Path, counted: list[Any]
) -> None:
    first = probe(torch.optim.SGD, params="1d")
    assert probe(torch.optim.SGD, params="1d") == first
    cache.forget()
    assert probe(torch.optim.SGD, params="1d") == first
    assert len(counted) == 1
    assert [file.suffix for file in folder.iterdir()] == [".json"]


def test_other_settings_and_params_are_other_probes(counted: list[Any]) -> None:
    probe(torch.optim.SGD, params="1d")
    probe(torch.optim.SGD, params="1d", momentum=0.9)
    probe(torch.optim.SGD, params={"w": (5,)})
    assert len(counted) == 3


def test_a_damaged_file_is_measured_anew(folder: Path, counted: list[Any]) -> None:
    first = probe(torch.optim.SGD, params="1d")
    for text in ("not json", "{}", '{"schema_version": 1, "keys": [{}]}', '{"schema_version": 99}'):
        next(folder.iterdir()).write_text(text)
        cache.forget()
        assert probe(torch.optim.SGD, params="1d") == first
    assert len(counted) == 5


def test_off_writes_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUESTEP_CACHE", "off")
    probe(torch.optim.SGD, params="1d")
    assert not folder.exists()


def test_a_folder_that_cannot_be_made_costs_nothing_but_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRUESTEP_CACHE", str(tmp_path / "file"))
    assert probe(torch.optim.SGD, params="1d").scope == "element"


def test_a_function_is_remembered_by_itself_and_not_in_files(folder: Path, counted: list[Any]) -> None:
    def make(rate: float) -> Any:
        return lambda named: torch.optim.SGD([param for _, param in named], lr=rate)

    slow, fast = make(0.1), make(0.2)
    for function in (slow, slow, fast):
        probe(function, params="1d")
    assert len(counted) == 2
    assert not folder.exists()


class Mine(torch.optim.SGD):
    """Of a module that has no version: what it imports may change."""


def test_a_class_that_is_not_installed_is_remembered_in_memory_only(folder: Path, counted: list[Any]) -> None:
    for _ in range(2):
        probe(Mine, params="1d")
    assert len(counted) == 1
    assert not folder.exists()


def test_settings_whose_text_does_not_tell_them_are_not_remembered(folder: Path, counted: list[Any]) -> None:
    for _ in range(2):
        probe(torch.optim.SGD, params="1d", lr=torch.tensor(0.1))
    assert len(counted) == 2
    assert not folder.exists()


def test_the_folder_is_the_users_own_unless_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRUESTEP_CACHE")
    monkeypatch.setattr(cache.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / "truestep"


# -- The JSON form


def test_a_probe_survives_its_json_form(tmp_path: Path) -> None:
    found = probe(torch.optim.Adafactor, params="2d")
    data = found.to_json(tmp_path / "probe.json")
    assert data["schema_version"] == 1
    assert (
        Probe.from_json(data)
        == Probe.from_json(tmp_path / "probe.json")
        == Probe.from_json(json.loads(json.dumps(data)))
        == found
    )


def test_unknown_entries_of_a_newer_probe_are_passed_by() -> None:
    found = probe(torch.optim.SGD, params="1d")
    assert Probe.from_json({**found.to_json(), "mood": "fine"}) == found


@pytest.mark.parametrize(("text", "complaint"), [("[1]", "schema_version 1, found None"), ("{", "cannot read a probe from")])
def test_what_is_no_probe_is_refused_in_one_sentence(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "probe.json").write_text(text)
    with pytest.raises(ts.TrueStepError, match=complaint):
        Probe.from_json(tmp_path / "probe.json")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ts.TrueStepError, match="cannot write the probe to"):
        Probe("x").to_json(tmp_path / "nowhere" / "probe.json")
