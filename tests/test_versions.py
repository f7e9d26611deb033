"""Beside a transformers release that it was not written for, the package refuses to import, with what to install."""

import pytest

from hybridspec_hf.versions import check_transformers

# as the package sees it: transformers may replace its own module while it is imported lazily
VERSION = "hybridspec_hf.versions.transformers.__version__"


@pytest.mark.parametrize("version", ["4.57.0", "5.17.0", "5.23.9", "5.25.0", "5.25.0.dev0", "6.0.0"])
def test_other_releases_are_refused(version, monkeypatch):
    monkeypatch.setattr(VERSION, version)
    with pytest.raises(ImportError, match=rf"5\.24.*found {version}") as error:
        check_transformers()
    assert "pip install" in str(error.value)


@pytest.mark.parametrize("version", ["5.24.0", "5.24.3"])
def test_supported_releases_are_taken(version, monkeypatch):
    monkeypatch.setattr(VERSION, version)
    check_transformers()
