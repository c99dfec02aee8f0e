"""What joins GPUs: inside a node, between nodes, and in a rack that is one NVLink domain."""

from lecture_lib.hardware import get

from .palette import FAINT, PALETTE, WASH, text_color
from .svg import Figure, box, figure, label, line

BLUE, RED, GREEN = PALETTE[:3]


def per_second(rate: float) -> str:
    return f"{rate / 1e9:.0f} GB/s"


def bar(x: float, y: float, w: float, words: str, color: str) -> list[str]:
    words = label(x + w / 2, y, words, color=text_color(color), bold=True)
    return [box(x, y - 20, w, 40, fill=color, stroke=color, radius=8), words]


def nodes(name: str) -> Figure:
    """Two nodes: NVSwitch inside each, a network between them."""
    gpu = get("H100")
    switch, row, host, net, wide = 76, 148, 240, 348, 424
    strokes = []
    for i, left in enumerate((16, 460)):
        pitch = (wide - 24) / gpu.domain
        places = [left + 12 + pitch * (j + 0.5) for j in range(gpu.domain)]
        strokes += [
            box(left, 40, wide, 236, fill=WASH, stroke=FAINT, radius=10),
            label(left + wide / 2, 22, f"node {i}", bold=True),
            *(line([(x, switch), (x, row)], color=BLUE, width=6) for x in places),
            *(line([(x + 8, row), (x + 8, net)], color=RED, width=3) for x in places),
            *(line([(x - 8, row), (x - 8, host)], color=GREEN, width=3) for x in places),
            *bar(left + 12, switch, wide - 24, f"NVSwitch: {per_second(gpu.link_bandwidth)} each way per GPU", BLUE),
            *bar(left + 12, host, wide - 24, f"host: {per_second(gpu.host_bandwidth)} each way per GPU", GREEN),
            *(box(x - 19, row - 19, 38, 38, radius=5) for x in places),
            *(label(x, row, j) for j, x in enumerate(places)),
        ]
    strokes += bar(16, net, 868, f"InfiniBand or Ethernet: {per_second(gpu.nic_bandwidth)} each way per GPU", RED)
    text = (
        f"two nodes of {gpu.domain} {gpu.name}; in a node NVSwitch joins the {gpu.domain} GPUs, "
        f"{per_second(gpu.link_bandwidth)} per direction for each; {gpu.host_link} leads to the host, "
        f"{per_second(gpu.host_bandwidth)}; between nodes InfiniBand or Ethernet, {per_second(gpu.nic_bandwidth)} "
        "per direction for each GPU."
    )
    return figure(name, "Nodes", text, 900, net + 36, strokes)


def rack(name: str) -> Figure:
    """GB200 NVL72: four GPUs in a tray, all GPUs of all trays behind NVLink Switches."""
    gpu = get("GB200")
    tray, net = 4, 356
    trays = gpu.domain // tray
    pitch, top, cell = 868 / trays, 60, 30
    switch = top + tray * (cell + 6) + 44
    strokes = [label(450, 26, f"one rack, {gpu.domain} GPUs: each column is a node of {tray}", bold=True)]
    for j in range(trays):
        x = 16 + pitch * (j + 0.5)
        strokes.append(line([(x - 8, top), (x - 8, switch)], color=BLUE, width=6))
        strokes.append(line([(x + 9, top), (x + 9, net)], color=RED, width=3))
        strokes.append(box(x - 20, top - 8, 40, tray * (cell + 6) + 10, fill=WASH, stroke=FAINT, radius=6))
        strokes += [box(x - cell / 2, top - 1 + i * (cell + 6), cell, cell, radius=4) for i in range(tray)]
    words = f"NVLink Switch trays: {per_second(gpu.link_bandwidth)} each way per GPU"
    strokes += bar(16, switch, 868, words, BLUE)
    strokes += bar(16, net, 868, f"other racks: {per_second(gpu.nic_bandwidth)} each way per GPU", RED)
    text = (
        f"{gpu.domain} GPUs of a GB200 NVL72 in {trays} nodes of {tray}; NVLink Switch trays join all {gpu.domain}, "
        f"{per_second(gpu.link_bandwidth)} per direction for each; between racks InfiniBand or Ethernet, "
        f"{per_second(gpu.nic_bandwidth)} per direction for each GPU."
    )
    return figure(name, "A rack", text, 900, net + 36, strokes)
