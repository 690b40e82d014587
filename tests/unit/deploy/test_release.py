"""What a release says and lists: its notes from the changelog, and the packages of an image."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from release.notes import notes_of
from release.sbom import describe_debian, describe_interpreter

if TYPE_CHECKING:
    from pathlib import Path

CHANGES = """# Changelog

## [Unreleased]

### Added

- A later thing.

## [0.2.0] - 2026-12-01

### Added

- A thing.

## [0.1.0] - 2026-01-01

- The first.
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGES)
    return tmp_path


def test_the_notes_are_the_part_of_the_version(repository: Path) -> None:
    assert notes_of("v0.2.0", repository) == "### Added\n\n- A thing.\n"


@pytest.mark.parametrize("tag", ["", "0.2.0", "v0.1.0", "v0.2.0-rc1"])
def test_a_tag_of_another_version_is_refused(repository: Path, tag: str) -> None:
    with pytest.raises(ValueError, match=r"pyproject.toml has version 0\.2\.0: it should be 'v0\.2\.0'"):
        notes_of(tag, repository)


@pytest.mark.parametrize("title", ["", "## [0.2.0]\n\n- No day.\n", "## [0.2.0] - 2026-12-01\n\n## [0.1.0]\n"])
def test_a_version_without_notes_is_refused(repository: Path, title: str) -> None:
    (repository / "CHANGELOG.md").write_text(f"# Changelog\n\n{title}")
    with pytest.raises(ValueError, match=r"CHANGELOG\.md has no part '## \[0\.2\.0\] - <year-month-day>'"):
        notes_of("v0.2.0", repository)


STATUS = """Package: libstdc++6
Status: install ok installed
Architecture: amd64
Version: 12.2.0-14+deb12u1
Description: GNU Standard C++ Library v3
 Version: of a description's further line

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1

"""


def test_the_packages_of_an_image_have_their_addresses(tmp_path: Path) -> None:
    assert describe_debian(tmp_path) == []
    (tmp_path / "status").write_text(STATUS)
    (tmp_path / "os-release").write_text('ID=debian\nVERSION_ID="12"\nHOME_URL="https://www.debian.org/?a=b"\n')
    (package,) = describe_debian(tmp_path)
    assert (package["name"], package["version"]) == ("libstdc++6", "12.2.0-14+deb12u1")
    assert package["purl"] == "pkg:deb/debian/libstdc%2B%2B6@12.2.0-14%2Bdeb12u1?arch=amd64&distro=debian-12"
    (tmp_path / "version").write_text("3.12.8")
    assert describe_interpreter(tmp_path)["purl"] == "pkg:generic/python@3.12.8"
