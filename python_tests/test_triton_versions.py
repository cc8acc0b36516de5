"""Versions of Triton: supported, untested with a warning, and rejected."""

from __future__ import annotations

import importlib.metadata
import warnings

import pytest

from rec_kernels import _triton_versions as versions


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.8.0+git1234", "3.9.2", "unknown"])
def test_supported(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.check(version)
    assert not versions.is_too_old(version)


@pytest.mark.parametrize("version", ["2.3.1", "3.5.1", "3.5.1.post2"])
def test_too_old(version: str) -> None:
    assert versions.is_too_old(version)
    with pytest.raises(ImportError, match=rf"need Triton 3\.6 to 3\.9, found Triton {version}: install the version"):
        versions.check(version)


@pytest.mark.parametrize("version", ["3.10.0", "4.0.1"])
def test_newer_than_tested(version: str) -> None:
    assert not versions.is_too_old(version)
    with pytest.warns(RuntimeWarning, match=rf"tested with Triton 3\.6 to 3\.9, found Triton {version}: they may"):
        versions.check(version)


def test_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter fails with NumPy 2.4; its compiler does not."""
    numpy = "2.4.6"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: numpy)
    versions.check("3.6.0")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    versions.check("3.7.0")
    with pytest.raises(versions.UnsupportedTritonError, match=r"Triton 3\.6\.0 .* NumPy 2\.4\.6: install numpy<2\.4"):
        versions.check("3.6.0")
    numpy = "2.3.5"
    versions.check("3.6.0")


def test_supported_in_words() -> None:
    """The documented versions are those of the code."""
    oldest, newest = (".".join(map(str, numbers)) for numbers in (versions.OLDEST, versions.NEWEST))
    assert f"Triton {oldest} to {newest}" == versions.SUPPORTED
