"""Where ranks meet: a file on loopback, where nothing may listen; elsewhere a port that nobody takes meanwhile."""

from __future__ import annotations

from pathlib import Path

from megatron_daro import ports
from megatron_daro.ports import candidate_ports, reserve_port
from megatron_daro.runtime.train_worker import meeting_place


def test_on_loopback_it_is_a_file_of_its_own(tmp_path):
    places = [meeting_place(address, lambda: tmp_path) for address in ("127.0.0.1", "127.0.0.2", "::1")]
    assert all(reserved is None for _, reserved in places)
    files = [Path(place.removeprefix("file://")) for place, _ in places]
    assert len(set(files)) == 3 and all(file.parent.is_dir() and file.is_relative_to(tmp_path) for file in files)


def test_elsewhere_it_is_a_port_that_is_ours_until_it_is_given_back(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    few = candidate_ports()[:2]

    def not_asked():
        raise AssertionError("nothing of Ray's is needed for it")

    monkeypatch.setattr(ports, "candidate_ports", lambda: few)
    place, reserved = meeting_place("0.0.0.0", not_asked)  # an address of every machine; nothing listens on it
    assert place == f"tcp://0.0.0.0:{reserved.port}" and reserved.port in few
    with reserve_port("127.0.0.1") as other:
        assert {reserved.port, other.port} == set(few)
    reserved.close()
