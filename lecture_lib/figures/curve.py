"""What ``probe()`` measured: bandwidth and latency against the bytes that are read over and over."""

from lecture_lib.hardware.detect import size
from lecture_lib.hardware.probe import duration, rate

from .palette import FAINT, GRID, INK, PALETTE
from .plot import Plot, plot


def memory_curve(report, machine) -> Plot:
    """The curve of a report in two panels, with the caches that the machine says it has."""
    import matplotlib.figure

    caches = {f"L{cache.level}": cache.nbytes for cache in machine.caches}
    if machine.gpus and report.device == machine.gpus[0].name:
        caches = {"L2": machine.gpus[0].l2_bytes}
    sizes = [point.nbytes for point in report.curve]
    with matplotlib.rc_context({"font.size": 14, "axes.edgecolor": INK}):
        figure = matplotlib.figure.Figure(figsize=(900 / 96, 410 / 96), layout="constrained")
        panels = figure.subplots(2, sharex=True)
    _panel(panels[0], sizes, [point.bandwidth / 1e9 for point in report.curve], "GB/s read", PALETTE[0])
    waits = [point.latency and point.latency * 1e9 for point in report.curve]  # None where it was not measured
    _panel(panels[1], sizes, [float("nan") if wait is None else wait for wait in waits], "ns for a load", PALETTE[1])
    panels[1].set_xlabel("bytes that are read over and over")
    panels[1].set_xscale("log", base=2)
    panels[1].set_xticks(sizes[::3], [size(nbytes) for nbytes in sizes[::3]])
    for name, nbytes in caches.items():
        if sizes[0] < nbytes < sizes[-1]:
            for axes in panels:
                axes.axvline(nbytes, color=FAINT, linestyle="--", linewidth=2)
            above = panels[0].get_xaxis_transform()  # bytes along the axis, shares of the panel upwards
            panels[0].text(nbytes, 1.02, f"{name} ends", transform=above, ha="center", va="bottom", fontsize=14)
    levels = [f"{each.name} {rate(each.bandwidth)} {duration(each.latency)}".rstrip() for each in report.levels]
    words = "bandwidth and latency against the bytes that are read over and over, from this machine: "
    return plot(figure, f"Your memory: {words}{'; '.join(levels)}.")


def _panel(axes, sizes: list[int], values: list[float], title: str, color: str) -> None:
    axes.plot(sizes, values, color=color, linewidth=3, marker="o")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel(title)
    axes.grid(axis="y", color=GRID)
    axes.spines[["top", "right"]].set_visible(False)
