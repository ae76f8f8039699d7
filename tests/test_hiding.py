"""Names of hosts and users out of diagnoses: gone everywhere, the same one everywhere, and nothing else is lost."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from eroica.assist.hiding import Names, hide, hide_detail
from eroica.findings import Evidence, to_json
from mcp_server.reader import Setup
from mcp_server.sources import DiagnosisFolder, Nameless
from tests import samples
from tests.mcp_talk import call, save


def test_hosts_users_and_addresses_are_gone_and_the_rest_is_as_it_was() -> None:
    diagnosis, detail = samples.throttled_gpu(64)
    diagnosis = replace(
        diagnosis,
        evidence={
            **diagnosis.evidence,
            "E9": Evidence(
                "10.1.2.3 reached /home/alice/train.py:3 on gpu-node-00 and gpu-node-01.rack",
                "ring",
                {"a": "gpu-node-07"},
            ),
        },
    )
    names = Names()
    hidden = hide(diagnosis, names)
    text = json.dumps(to_json(hidden))
    assert not re.search(r"gpu-node|alice|10\.1\.2\.3", text)
    assert hidden.evidence["E9"].text == "address-1 reached /home/user/train.py:3 on host-1 and host-2.rack"
    assert list(hidden.hosts.values()) == list(diagnosis.hosts.values())
    assert hidden.findings[0].device == "host-1/gpu5"
    assert hidden.findings[0].impact == diagnosis.findings[0].impact
    numbers = hide_detail(detail, names)
    assert numbers.hosts[0] == "host-1" and numbers.hosts[8] == "host-2"
    assert len(set(numbers.hosts)) == len(set(detail.hosts))


HOST = st.from_regex(r"[a-z]{1,6}-[0-9]{1,3}(\.[a-z]{2,5}){0,2}", fullmatch=True)
HOSTS = st.lists(HOST, min_size=1, max_size=8, unique=True)


@given(HOSTS)
def test_whatever_hosts_are_called_their_names_are_gone_and_they_stay_apart(hosts: list[str]) -> None:
    base, _ = samples.slow_input()
    placed = {host: str(rank) for rank, host in enumerate(hosts)}
    said = "; ".join(f"{host}/gpu0 is on {host}" for host in hosts)
    diagnosis = replace(base, hosts=placed, evidence={"E1": Evidence(said, "ring", {host: host for host in hosts})})
    hidden = hide(diagnosis, Names())
    words = set(re.findall(r"[\w.-]+", json.dumps(to_json(replace(hidden, findings=(), verdict=base.verdict)))))
    assert not words & ({*hosts} - {"host-1", "host-2", "host-3", "host-4", "host-5", "host-6", "host-7", "host-8"})
    assert list(hidden.hosts.values()) == list(placed.values())


def test_with_hide_names_no_tool_tells_a_host(tmp_path: Path) -> None:
    id = save(tmp_path, samples.slow_input()[0])
    setup = Setup(source=Nameless(DiagnosisFolder(tmp_path)), allow_act=True)
    for tool in ("list_jobs", "get_diagnosis", "explain_finding", "list_incidents", "suggest_fix"):
        text, _ = call(setup, tool)
        assert "gpu-node" not in text, tool
    assert call(setup, "get_diagnosis", id=id)[1]["findings"][0]["who"] == "rank 3 on host-1"
