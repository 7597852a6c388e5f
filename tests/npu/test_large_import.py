from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from npuserve.npu.large_import import import_large


@pytest.mark.parametrize("fails", [False, True])
def test_import_large_collects_no_garbage_and_leaves_the_collector_on(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large.py").write_text(f"import gc\nENABLED = gc.isenabled()\nlist({None if fails else ()})\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "large", raising=False)
    frozen = gc.get_freeze_count()
    if fails:
        with pytest.raises(TypeError):
            import_large("large")
    else:
        assert import_large("large").ENABLED is False
        assert gc.get_freeze_count() > frozen
    assert gc.isenabled()
