"""Open a notebook of the course in JupyterLab, or present it as slides.

    python tools/lab.py notebooks/00_start_here.ipynb
    python tools/lab.py --slides notebooks/02_collectives.ipynb

Whatever follows goes to JupyterLab as it is (--no-browser, --port=9999).
"""

import json
import sys
import tempfile
from pathlib import Path

from jupyterlab.labapp import LabApp

OPTIONS = [
    "--ServerApp.ip=127.0.0.1",  # this machine only, whatever the person's own configuration says
    f"--ServerApp.root_dir={Path.cwd()}",  # the file browser shows the course, and notebooks reach ../assets
    "--ServerApp.allow_root=True",  # in a container everybody is root
]


def presenting(private: Path) -> list[str]:
    """The options that bring JupyterLab up on the first slide.

    jupyterlab-slideshow keeps "now presenting" in the user settings. A private folder holds them, so that a lecture
    starts the same way each time and the person's own JupyterLab stays as it was.
    """
    settings = private / "settings" / "jupyterlab-slideshow" / "plugin.jupyterlab-settings"
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps({"active": True}))
    return [f"--LabApp.user_settings_dir={private / 'settings'}", f"--LabApp.workspaces_dir={private / 'workspaces'}"]


if __name__ == "__main__":
    arguments = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="slides-") as folder:
        if arguments[:1] == ["--slides"]:
            arguments[:1] = presenting(Path(folder))
        LabApp.launch_instance([*arguments, *OPTIONS])
