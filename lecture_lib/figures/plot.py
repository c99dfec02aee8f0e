"""A drawing of measurements. They differ from run to run, so only its words are compared, never its pixels."""

import io
from dataclasses import dataclass

from .palette import INK


@dataclass(frozen=True, repr=False)
class Plot:
    """Show it with `display(plot)`; `plot.text` says in one line what it shows, without what only this machine took."""

    png: bytes
    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        return {"image/png": self.png, "text/plain": self.text}


def canvas(height: float):
    """(figure, axes) of 900 pixels by ``height``, with letters of 14 pt at the size shown."""
    import matplotlib.figure

    with matplotlib.rc_context({"font.size": 14, "axes.edgecolor": INK, "savefig.dpi": 96, "figure.dpi": 96}):
        figure = matplotlib.figure.Figure(figsize=(900 / 96, height / 96), layout="constrained")
        axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def plot(figure, text: str) -> Plot:
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=96)
    return Plot(png.getvalue(), text)
