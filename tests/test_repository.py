"""Workflows, forms and hooks name what there is, and agree with pyproject.toml."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which pre-commit brings")

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
PYPROJECT = (ROOT / "pyproject.toml").read_text()
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def commands(workflow: Path) -> str:
    jobs = load(workflow)["jobs"].values()
    return "\n".join(step.get("run", "") for job in jobs for step in job["steps"])


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_name_what_there_is(workflow: Path):
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", commands(workflow), re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target
    for script in re.findall(r"tools/\w+\.\w+", commands(workflow)):
        assert (ROOT / script).exists(), script
    assert load(workflow)["permissions"] == {"contents": "read"}


def test_workflows_test_each_python_that_is_declared():
    declared = re.findall(r'Python :: (3\.\d+)"', PYPROJECT)
    matrix = load(GITHUB / "workflows" / "test.yml")["jobs"]["cpu"]["strategy"]["matrix"]
    assert matrix["python"] == declared
    wheels = load(GITHUB / "workflows" / "wheels.yml")["jobs"]["wheel"]["strategy"]["matrix"]
    assert wheels["python"] == [f"cp{version.replace('.', '')}" for version in declared]
    oldest = re.search(r'"torch>=([\d.]+)"', PYPROJECT)
    assert oldest is not None
    assert {row["torch"] for row in matrix["include"]} == {f"{oldest[1]}.*", ""}


@pytest.mark.parametrize("form", ["bug.yml", "install.yml"])
def test_forms_ask_for_the_info(form: str):
    text = (GITHUB / "ISSUE_TEMPLATE" / form).read_text()
    assert "vllm_kernels info --json" in text
    ids = [part["id"] for part in load(GITHUB / "ISSUE_TEMPLATE" / form)["body"] if "id" in part]
    assert len(ids) == len(set(ids)) >= 2


def test_hooks_have_the_versions_of_the_dev_extra():
    (repository,) = load(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    for hook in repository["hooks"]:
        assert hook["language"] == "python"  # no `make build` before it
        for requirement in hook["additional_dependencies"]:
            assert f'"{requirement}"' in PYPROJECT, requirement


def test_the_citation_has_the_version():
    citation = load(ROOT / "CITATION.cff")
    version = re.search(r'^version = "(.*)"', PYPROJECT, re.M)
    assert version is not None and citation["version"] == version[1]
    assert citation["authors"] == [{"name": "The vllm_kernels developers"}]


def test_no_virtual_environment_is_tracked():
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("needs a clone")
    assert not [name for name in done.stdout.splitlines() if "site-packages" in name]
