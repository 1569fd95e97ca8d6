"""The README's commands exist, CI runs what the README tells, and its example trains."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

from gasloc import cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(text: str) -> list[str]:
    """Every `gasloc ...` in a code block or in backticks."""
    blocks = re.findall(r"^    (?:\$ )?(gasloc .*?)(?:\s+#.*)?$", text, re.MULTILINE)
    return blocks + re.findall(r"`(gasloc [a-z][^`]*)`", text)


def test_ci_runs_the_commands_that_the_documents_give_a_newcomer() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in ("make check", "make test"):
        assert target in script
        assert target in (ROOT / "CONTRIBUTING.md").read_text()
    for target in re.findall(r"`?make ([a-z]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert "make demo" in README
    assert "make test" in README


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_and_flag_in_the_documents_exists(page: Path) -> None:
    root = typer.main.get_command(cli.app)
    for command in commands(page.read_text()):
        words = command.split()[1:]
        here = root
        while words and words[0] in (children := getattr(here, "commands", {})):
            here = children[words.pop(0)]
        assert here is not root or not words or words[0].startswith("-"), f"no such command: {command}"
        known = {option for parameter in here.params for option in parameter.opts}
        for word in words:
            if word.startswith("--"):
                assert word.split("=")[0] in {*known, "--help"}, f"no such flag: {word} in {command}"


def test_links_in_the_documents_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_tests_that_the_documents_name_exist() -> None:
    named = 0
    for page in PAGES:
        for file, _, names in re.findall(r"`(test_[a-z0-9_]+\.py)(::([A-Za-z0-9_:]+))?`", page.read_text()):
            named += 1
            text = (ROOT / "tests" / file).read_text()
            for name in filter(None, names.split("::")):
                assert re.search(rf"(def|class) {name}\b", text), f"{page.name}: {file} has no {name}"
    assert named > 36


def test_the_example_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(example.replace("PeerOptions(", 'PeerOptions(host="127.0.0.1", '), names)
    assert "the others join /ip4/127.0.0.1/tcp/" in capsys.readouterr().out
    assert names["optimizer"].round == 3
    assert float(names["loss"].detach()) < 4.0  # from about 8
