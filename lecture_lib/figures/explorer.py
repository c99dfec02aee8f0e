"""The roofline with controls."""

import ipywidgets as widgets

from lecture_lib.hardware import get

from .controls import Explorer
from .roofline import of_a_layer, roofline
from .svg import Figure


class RooflineExplorer(Explorer):
    """Controls for shape, number type and machine above the roofline that they give.

    ``measured``: Peaks of this machine, added to the datasheets as "this machine"."""

    def __init__(self, measured=None, machines=("A100", "H100", "B200", "GB200", "MI300X", "TPU v5p")):
        self.machines = {name: get(name) for name in machines} | ({"this machine": measured} if measured else {})
        powers = [2**i for i in range(15)]
        self.tokens = widgets.SelectionSlider(options=powers, value=4096, description="tokens")
        self.width = widgets.SelectionSlider(options=powers[7:], value=4096, description="width")
        self.dtype = widgets.Dropdown(options=["bf16", "fp16", "fp8", "tf32", "fp32"], description="dtype")
        self.machine = widgets.Dropdown(options=list(self.machines), value="H100", description="machine")
        super().__init__((self.tokens, self.width), (self.dtype, self.machine))

    def drawn(self) -> Figure:
        name, dtype = self.machine.value, self.dtype.value
        try:
            operations = of_a_layer(self.tokens.value, self.width.value, dtype)
            return roofline("explored", operations, self.machines[name], dtype, title=name)
        except ValueError:  # no peak is known for this type
            words = f"No {dtype} peak is known for {name}: choose another number type."
            return Figure("explored", f"<p>{words}</p>", words)

    def __repr__(self) -> str:
        return self.text
