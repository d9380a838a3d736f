"""A study that several tests of the command line look at; each changes a copy only."""

from __future__ import annotations

import pytest

from tests.cli.reproducing import Folder, make_study


@pytest.fixture(scope="session")
def study_in_git(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Two trials at a clean commit, and a third after the study file was edited."""
    return make_study(tmp_path_factory.mktemp("study"))
