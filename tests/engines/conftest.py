import pytest

from fragility_lab import paths


@pytest.fixture
def outputs(tmp_path, monkeypatch):
    """The folder of outputs of a project without any."""
    for name, folder in {"PROJECT": tmp_path, "OUTPUTS": tmp_path / "outputs"}.items():
        monkeypatch.setattr(paths, name, folder)
    return tmp_path / "outputs"
