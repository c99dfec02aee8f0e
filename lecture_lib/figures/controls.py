"""Controls above a drawing that follows them."""

import ipywidgets as widgets


class Explorer(widgets.VBox):
    """Rows of controls, and below them the drawing of their values, made anew whenever one is moved.

    A class of this kind makes its controls, calls this, and has ``drawn() -> Figure``. As text it is what that says.

    label_width: of the words before a control, as "100px"; None: as wide as ipywidgets makes it
    """

    def __init__(self, *rows: tuple[widgets.Widget, ...], label_width: str | None = None):
        self.shown = widgets.HTML()
        for control in (control for row in rows for control in row):
            if label_width is not None:
                control.style.description_width = label_width
            control.observe(self.redraw, "value")
        super().__init__([*(widgets.HBox(row) if len(row) > 1 else row[0] for row in rows), self.shown])
        self.redraw()

    def redraw(self, change=None) -> None:
        drawn = self.drawn()
        self.text, self.shown.value = drawn.text, drawn.svg

    def __repr__(self) -> str:  # without the title, for ipywidgets shows 110 characters of it
        return self.text.partition(": ")[2]
