"""A row file under another name: a link to it, a second name of it, a link instead of its log."""

from __future__ import annotations

import os

import numpy as np
import pytest
from row_file_cases import BLOCK, LAYOUT, assert_holds, contents, host_or_skip, log_of, open_file
from test_row_file_commit import two_generations

RowFile = host_or_skip().RowFile


def with_a_generation_in_its_log(path) -> np.ndarray:
    """A row file after a crash: generation 2 is acknowledged, and in the log alone."""
    main, log, new = two_generations(path.with_name("made"))
    path.write_bytes(main)
    log_of(path).write_bytes(log)
    return new


def test_symbolic_link(tmp_path):
    """The log is named after the target of a symbolic link."""
    path, link = tmp_path / "file", tmp_path / "elsewhere" / "link"
    new = with_a_generation_in_its_log(path)
    link.parent.mkdir()
    link.symlink_to(path)
    assert_holds(str(link), 2, new)
    assert not log_of(link).exists()
    assert_holds(path, 2, new)


def test_symbolic_link_of_a_folder(tmp_path):
    """A folder may be reached by any name."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    new = with_a_generation_in_its_log(tmp_path / "link" / "file")
    assert_holds(tmp_path / "real" / "file", 2, new)


def test_hard_links(tmp_path):
    """Both names are rejected, because each would have a separate log; nothing changes."""
    path, other = tmp_path / "file", tmp_path / "other"
    new = with_a_generation_in_its_log(path)
    os.link(path, other)
    before = {p: p.read_bytes() for p in (path, log_of(path))}
    for name in (path, other):
        with pytest.raises(ValueError, match=rf"{name} has 2 names \(hard links\)"):
            open_file(name)
    assert {p: p.read_bytes() for p in (path, log_of(path))} == before
    other.unlink()
    assert_holds(path, 2, new)


def test_log_that_is_a_link(tmp_path):
    """A linked log may belong to another file: it is neither truncated nor created."""
    path, target = tmp_path / "file", tmp_path / "precious"
    with RowFile.create(str(path), 4 * BLOCK, layout=LAYOUT, memory_budget=4 * BLOCK) as file:
        values = contents(file)
    log_of(path).unlink(missing_ok=True)
    log_of(path).symlink_to(target)
    for found in (None, b""):
        if found is not None:
            target.write_bytes(found)
        with pytest.raises(OSError, match="is a symbolic link, and its target would be overwritten"):
            open_file(path)
        assert (target.read_bytes() if target.exists() else None) == found
    log_of(path).unlink()
    assert_holds(path, 0, values)
