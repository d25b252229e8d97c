"""Takes `experiments/` into the package when a wheel is built; all else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigurations(build_py):
    """The sources, and the configurations beside them under `fl_lightning/experiments`.

    `pip install .` leaves what it built in the clone. Classes and configurations are found by their folders, so that
    what a later version has moved or taken away would be found beside it.
    """

    def run(self) -> None:
        """Build."""
        if not (self.editable_mode or Path(self.build_lib).resolve() == Path.cwd()):  # there the sources lie
            shutil.rmtree(Path(self.build_lib, "fl_lightning"), ignore_errors=True)
        super().run()
        if not self.editable_mode:
            for file in sorted(Path("experiments").rglob("*.yaml")):
                target = Path(self.build_lib, "fl_lightning", file)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)


setup(cmdclass={"build_py": BuildWithConfigurations})
