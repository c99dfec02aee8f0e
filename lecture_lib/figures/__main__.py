"""python -m lecture_lib.figures [FOLDER]: draw every picture into assets/, or FOLDER."""

import sys
from pathlib import Path

from . import FIGURES, picture

folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2] / "assets"
folder.mkdir(exist_ok=True)
for name in FIGURES:
    (folder / f"{name}.svg").write_text(picture(name).svg, encoding="utf-8")
    print(picture(name))
