"""The folders in which the project keeps its files, independent of the working directory."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
PROJECT = PACKAGE.parent
ASSETS = PACKAGE / "assets"
NOTEBOOKS = PROJECT / "notebooks"
PROFILES = NOTEBOOKS / "profiles"
OUTPUTS = (PROJECT if NOTEBOOKS.is_dir() else Path.cwd()) / "outputs"  # of an installed package: where it is called
CUSTOM = "-custom"  # ends the name of the folder of results of one's own model, text or options

CHECKPOINTS = ASSETS / "checkpoints"
EVALUATION_TEXT = ASSETS / "evaluation.txt"
TRAINING_TEXT = ASSETS / "training.txt"
RECORDED_RUNS = ASSETS / "e5_recorded.parquet"


def require_folder_name(results: str) -> None:
    """Raises ValueError unless ``results`` names a folder in outputs."""
    if results in ("", ".", "..") or Path(results).name != results or not results.isprintable():
        raise ValueError(f"results go to a folder in outputs, a name without slashes (RESULTS=name), got {results!r}")


def require_project() -> None:
    """Exits with one line where the project's folder is missing, as beside an installed package."""
    if not NOTEBOOKS.is_dir():
        raise SystemExit(f"this command needs the project's folder, which has notebooks, got {PROJECT}: clone it")


def output_folder(profile: str, *parts: str) -> Path:
    """Create and return ``outputs/<profile>/<parts...>``."""
    folder = OUTPUTS.joinpath(profile, *parts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
