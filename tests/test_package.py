"""What is published: metadata without addresses of this workplace, one version everywhere."""

import re
from pathlib import Path

import pytest
import tomllib
import yaml

import lightning_lowprec

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PUBLISHED = [
    "pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", "LICENSE",
    "MANIFEST.in", "examples/first_steps.ipynb",
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / ".github").rglob("*.yml"))),
]  # fmt: skip


def test_one_version_everywhere():
    version = PROJECT["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert lightning_lowprec.__version__ == version
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == version
    headings = re.findall(r"^## \[(.+?)\](?: - (.+))?$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    released = [heading for heading in headings if heading[0] != "Unreleased"]
    assert released[0] == (version, citation["date-released"])


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_path_and_no_address_of_a_machine(name):
    text = (ROOT / name).read_text()
    assert not re.findall(r"(?<![\w./-])/(?:work|tmp|root|home|opt|srv)/", text)
    known = ("keepachangelog.com/", "www.apache.org/licenses", "github.com/pytorch/ao", "github.com/NVIDIA/Transformer")
    links = re.findall(r"https?://([^\s)\"'>]+)", text)
    assert [link for link in links if not link.startswith(known)] == []
    assert not re.findall(r"index-url|find-links", text)
    assert "urls" not in PROJECT


def steps_of(*jobs):
    steps = [step for job in jobs for step in job["steps"]]
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]) for step in steps if "uses" in step), steps
    return steps


def test_workflows_have_no_rights_and_a_release_is_published_without_a_password():
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {}, "each job names its own"
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert build["permissions"] == {"contents": "read"}
    assert publish["permissions"] == {"id-token": "write", "attestations": "write"}
    assert publish["needs"] == "build"
    assert not any("run" in step for step in publish["steps"]), "no code of the repository where the rights are"
    used = {step.get("uses", "").partition("@")[0] for step in steps_of(build, publish)}
    assert {"actions/attest-build-provenance", "actions/attest-sbom", "pypa/gh-action-pypi-publish"} <= used
    assert "cyclonedx-py" in text
    assert not re.search(r"password|secrets\.", "".join(line for line in text.splitlines() if "#" not in line))
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert {"push", "pull_request"} <= workflow[True].keys(), "yaml reads `on` as True"
    (job,) = workflow["jobs"].values()
    pythons = job["strategy"]["matrix"]["python"]
    assert pythons[0] == PROJECT["requires-python"].removeprefix(">=")
    commands = " ".join(step.get("run", "") for step in steps_of(job))
    assert re.search(r"\bcheck\b.*\btest\b", commands)
