"""What is published: metadata without addresses of this workplace, one version everywhere, the files of the project."""

import re
import sys
from pathlib import Path

import pytest
import tomllib
import yaml

import lightning_lowprec
from tools import versions

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PUBLISHED = [
    "pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", "LICENSE",
    "MANIFEST.in", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / ".github").rglob("*.yml"))),
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


def test_the_citation_has_every_field_that_the_format_needs():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["cff-version"] == "1.2.0"
    assert citation["license"] == PROJECT["license"]


def test_the_classifiers_say_what_the_other_fields_say():
    classifiers = PROJECT["classifiers"]
    assert len(classifiers) == len(set(classifiers))
    assert not any(entry.startswith("License ::") for entry in classifiers), "`license` has the SPDX name"
    minors = [int(entry.rpartition(".")[2]) for entry in classifiers if re.search(r":: 3\.\d+$", entry)]
    assert minors == list(range(min(minors), max(minors) + 1))
    assert PROJECT["requires-python"] == f">=3.{min(minors)}"
    assert sys.version_info.minor in minors
    assert "Typing :: Typed" in classifiers
    assert (ROOT / "lightning_lowprec" / "py.typed").is_file()


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_path_and_no_address_of_a_machine(name):
    """The only addresses are those of well-known sites; nobody has given the project a site yet."""
    text = (ROOT / name).read_text()
    assert not re.findall(r"(?<![\w./-])/(?:work|tmp|root|home|opt|srv)/", text)
    known = (
        "keepachangelog.com/",
        "www.apache.org/licenses",
        "github.com/pytorch/ao",
        "github.com/NVIDIA/TransformerEngine",
    )
    links = re.findall(r"https?://([^\s)\"'>]+)", text)
    assert [link for link in links if not link.startswith(known)] == []
    assert not re.findall(r"index-url|find-links", text)
    assert "urls" not in PROJECT


def test_every_issue_template_is_a_form_that_asks_for_the_report():
    forms = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert len(forms) == 2
    for path in forms:
        form = yaml.safe_load(path.read_text())
        assert {"name", "description", "body"} <= form.keys()
        fields = {field["id"]: field for field in form["body"] if field["type"] == "textarea"}
        assert "`lowprec doctor --report`" in fields["report"]["attributes"]["label"]
        if "bug" in path.name:
            assert fields["report"]["validations"]["required"] is True


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md", "docs/command-line.md"])
def test_links_and_targets_are_there(name):
    text = (ROOT / name).read_text()
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    assert [link for link in links if not ((ROOT / name).parent / link).exists()] == []
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert set(re.findall(r"`make ([\w-]+)", text)) <= set(targets)


def test_ci_builds_the_package():
    assert re.search(r"^make .*\blanes\b", (ROOT / ".ci" / "run").read_text(), flags=re.MULTILINE)
    lanes = re.search(r"^LANES := (.+)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert "package" in lanes[1].split()


def test_a_release_is_built_without_rights_and_published_without_a_password():
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {}, "each job names its own"
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert build["permissions"] == {"contents": "read"}
    assert publish["permissions"] == {"id-token": "write", "attestations": "write"}
    assert publish["needs"] == "build"
    assert not any("run" in step for step in publish["steps"]), "no code of the repository where the rights are"
    actions = [step["uses"] for job in (build, publish) for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in actions), actions
    used = {action.partition("@")[0] for action in actions}
    assert {"actions/attest-build-provenance", "actions/attest-sbom", "pypa/gh-action-pypi-publish"} <= used
    assert "cyclonedx-py" in text
    assert not re.search(r"password|secrets\.", "".join(line for line in text.splitlines() if "#" not in line))


def test_pushes_and_pull_requests_run_lint_and_tests_without_rights():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert {"push", "pull_request"} <= workflow[True].keys(), "yaml reads `on` as True"
    (job,) = workflow["jobs"].values()
    pythons = job["strategy"]["matrix"]["python"]
    floor = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    assert pythons[0] == floor
    actions = [step["uses"] for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in actions), actions
    commands = " ".join(step["run"] for step in job["steps"] if "run" in step)
    assert re.search(r"\bcheck\b.*\btest\b", commands)


def test_the_table_of_versions_follows_the_environments(tmp_path):
    packages = tmp_path / ".venv" / "lib" / "python3.12" / "site-packages"
    for name, version in (("torch", "2.13.0"), ("torchao", "0.18.0"), ("deepspeed", "9.9")):
        folder = packages if name != "deepspeed" else tmp_path / ".site-deepspeed"
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    before = f"a\n{versions.BEGIN}\n| `make test-floor` | old |\n{versions.END}\nb\n"
    page = tmp_path / versions.PAGE
    page.parent.mkdir()
    page.write_text(before)
    assert versions.main(["--check"], tmp_path) == 1
    assert versions.main([], tmp_path) == 0
    lines = page.read_text().splitlines()
    assert "| `make test` | 3.12 | 2.13.0 | - | 0.18.0 | - | - | - | - |" in lines
    assert "| `make test-deepspeed` | 3.12 | 2.13.0 | - | 0.18.0 | - | 9.9 | - | - |" in lines
    assert "| `make test-floor` | old |" in lines, "an environment that is not there keeps its line"
    assert (lines[0], lines[-1]) == ("a", "b")
    assert versions.main(["--check"], tmp_path) == 0


def test_ci_writes_the_versions_that_it_tested():
    assert "python3 -m tools.versions" in (ROOT / ".ci" / "run").read_text().splitlines()
    assert versions.updated((ROOT / versions.PAGE).read_text()).count("| `make ") >= 4
