"""Beside a transformers release that it was not written for, the package refuses to import, with what to install."""

import pytest
import transformers

from hybridspec_hf.versions import check_transformers


@pytest.mark.parametrize("version", ["4.57.0", "5.17.0", "5.23.9", "5.25.0", "5.25.0.dev0", "6.0.0"])
def test_other_releases_are_refused(version, monkeypatch):
    monkeypatch.setattr(transformers, "__version__", version)
    with pytest.raises(ImportError, match=rf"5\.24.*found {version}") as error:
        check_transformers()
    assert "pip install" in str(error.value)


@pytest.mark.parametrize("version", ["5.24.0", "5.24.3"])
def test_supported_releases_are_taken(version, monkeypatch):
    monkeypatch.setattr(transformers, "__version__", version)
    check_transformers()
