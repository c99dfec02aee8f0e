"""Pictures: true to the real collectives, legible, the same bytes on every machine, and told in words too."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import nbformat
import pytest
import torch
import torch.distributed as dist
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from lecture_lib.figures import FIGURES, PALETTE, picture, rank_color
from lecture_lib.figures import collectives as c
from lecture_lib.figures.axes import LogAxis, number_words, rate_words, time_words
from lecture_lib.figures.curve import memory_curve
from lecture_lib.figures.explorer import RooflineExplorer
from lecture_lib.figures.palette import FAINT, INK, PAPER, contrast, linear_rgb, text_color
from lecture_lib.figures.roofline import of_a_layer, roofline
from lecture_lib.figures.steps import your_ladder
from lecture_lib.hardware import Machine, Peaks, attainable, bound, get
from lecture_lib.hardware.detect import Cache
from lecture_lib.hardware.probe import Level, Point, Report, Transfer
from tools import refresh

ROOT = Path(__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"
MACHINE = Machine("a processor", 2, 2**34, (Cache(1, 2**15, 1), Cache(2, 2**19, 1)))


@pytest.mark.parametrize("name", FIGURES)
def test_assets_are_what_make_assets_draws(name):
    assert (ROOT / "assets" / f"{name}.svg").read_text(encoding="utf-8") == picture(name).svg


def test_no_asset_is_left_over():
    assert {path.stem for path in (ROOT / "assets").glob("*")} == set(FIGURES)


@pytest.mark.parametrize("name", FIGURES)
def test_no_text_touches_another_or_the_edge_even_in_a_wide_font(name):
    check_that_no_text_touches(picture(name))


def check_that_no_text_touches(figure):
    root = ElementTree.fromstring(figure.svg)
    boxes = []
    for text in root.iter(SVG + "text"):
        size, x, y = (float(text.get(key)) for key in ("font-size", "x", "y"))
        family = "DejaVu Sans Mono" if text.get("font-family") else "DejaVu Sans"  # comes with matplotlib
        font = FontProperties(family=family, weight=text.get("font-weight", "normal"))
        width = TextPath((0, 0), text.text, size=size, prop=font).get_extents().width
        left = x - {"start": 0, "middle": width / 2, "end": width}[text.get("text-anchor")]
        boxes.append((left, y - 0.75 * size, left + width, y + 0.2 * size, text.text))
    for i, (left, top, right, bottom, words) in enumerate(boxes):
        assert left >= 4 and right <= float(root.get("width")) - 4 and top >= 2 and bottom <= float(root.get("height"))
        for other_left, other_top, other_right, other_bottom, other in boxes[:i]:
            beside = left > other_right + 4 or other_left > right + 4
            assert beside or top > other_bottom or other_top > bottom, (words, other)


@pytest.mark.parametrize("name", FIGURES)
def test_a_picture_is_legible_and_says_what_it_shows(name):
    figure = picture(name)
    root = ElementTree.fromstring(figure.svg)
    assert float(root.get("width")) <= 900 and root.get("role") == "img"
    assert f"{root.find(SVG + 'title').text}: {root.find(SVG + 'desc').text}" == figure.text == repr(figure)
    assert "\n" not in figure.text
    for text in root.iter(SVG + "text"):
        assert float(text.get("font-size")) >= 14 * 4 / 3, "14 pt"
    assert figure._repr_mimebundle_() == {"image/svg+xml": figure.svg, "text/plain": figure.text}


def test_the_words_under_each_picture_in_a_notebook_are_the_pictures_own():
    used = set()
    for path in [*ROOT.glob("notebooks/*.ipynb"), ROOT / "README.md"]:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            text = "\n".join(cell.source for cell in nbformat.reads(text, 4).cells if cell.cell_type == "markdown")
        for words, name in re.findall(r"!\[([^\]]*(?:\][^(\]]*)*)\]\((?:\.\./)?assets/(\w+)\.svg\)", text):
            assert words == picture(name).text, (path.name, name)
            used.add(name)
    assert used == set(FIGURES), "each picture is shown somewhere"


@pytest.mark.parametrize("dtype", ["bf16", "fp8", "fp32"])
@pytest.mark.parametrize("machine", ["A100", "H100", "GB200", "this machine"])
@pytest.mark.parametrize(("tokens", "width"), [(1, 128), (64, 16384), (16384, 16384)])
def test_a_roofline_has_room_for_its_words(machine, dtype, tokens, width):
    slow = Peaks("this machine", 1e10, {"bf16": 1e9, "fp8": 1e9, "fp32": 2e11})
    peaks = slow if machine == "this machine" else get(machine)
    if (machine, dtype) == ("A100", "fp8"):
        pytest.skip("it has no such units")
    operations = of_a_layer(tokens, width, dtype)
    figure = roofline("explored", operations, peaks, dtype)
    check_that_no_text_touches(figure)
    for name, operation in operations.items():
        assert f"; {name} {number_words(operation.intensity)}, at most " in figure.text
        share = attainable(operation, peaks) / peaks.peak(dtype)
        assert f"{share:.1%} of the peak, {bound(operation, peaks)}-bound" in figure.text


def test_controls_redraw_the_roofline():
    explorer = RooflineExplorer(Peaks("this CPU", 1e10, {"fp32": 1e11}))
    assert repr(explorer).startswith("Roofline of H100, bf16: peak 989 TFLOP/s from 295 FLOP per byte on;")
    before = explorer.shown.value
    explorer.tokens.value = 1
    assert explorer.shown.value != before and "matmul 1, at most 0.3% of the peak" in repr(explorer)
    explorer.machine.value = "this machine"
    assert repr(explorer) == "No bf16 peak is known for this machine: choose another number type."
    assert repr(explorer) in explorer.shown.value
    explorer.dtype.value = "fp32"
    assert repr(explorer).startswith("Roofline of this machine, fp32: peak 100 GFLOP/s from 10 FLOP per byte on;")


def report(levels: int, latency) -> Report:
    """What a probe of a machine with that many levels could have measured."""
    points = [Point(4096 * 2**i, 1e11 / (1 + i), latency and latency * (1 + i)) for i in range(14)]
    named = [Level(f"L{i + 1}", p.nbytes, p.bandwidth, p.latency) for i, p in enumerate(points[:levels])]
    transfers = [Transfer("loopback socket", 2**24, 1e9), *(Transfer(f"GPU 0 to GPU {i}", 1, 1e11) for i in (1, 2))]
    return Report("a processor", tuple(points), tuple(named), tuple(transfers))


@pytest.mark.parametrize("draw", [lambda report: memory_curve(report, MACHINE), your_ladder])
def test_what_was_measured_is_drawn_and_said(draw):
    fast, slow = draw(report(2, 1e-9)), draw(report(4, None))
    for figure in (fast, slow):
        assert figure.png.startswith(b"\x89PNG") and figure._repr_mimebundle_()["text/plain"] == figure.text
        assert "L1 " in figure.text and "L2 " in figure.text and "\n" not in figure.text
    assert fast.text != slow.text and refresh.sanitised(fast.text) == refresh.sanitised(slow.text)


def test_your_ladder_shows_one_other_gpu():
    assert "GPU 0 to GPU 1 10 ms" in your_ladder(report(2, 1e-9)).text
    assert "to GPU 2" not in your_ladder(report(2, 1e-9)).text


def test_numbers_on_axes():
    axis = LogAxis(1, 1000, 100, 400)
    assert [axis.at(value) for value in (0.1, 1, 10, 1000, 1e6)] == pytest.approx([100, 100, 200, 400, 400])
    assert axis.decades() == [1, 10, 100, 1000] and LogAxis(2, 99, 0, 1).decades() == [10]
    assert [time_words(t) for t in (2.49e-6, 1e-4, 2.22e-3, 0.0999, 1, 21)] == [
        "2.5 µs", "0.1 ms", "2.2 ms", "100 ms", "1 s", "21 s"
    ]  # fmt: skip
    assert [rate_words(r) for r in (12.0, 3.3e6, 1.1e11, 989.4e12, 2.5e15)] == [
        "12 FLOP/s", "3.3 MFLOP/s", "110 GFLOP/s", "989 TFLOP/s", "2500 TFLOP/s"
    ]  # fmt: skip
    assert [number_words(x) for x in (0.625, 62.67, 999.6, 1365.3)] == ["0.625", "62.7", "1,000", "1,365"]


def test_text_stands_out_from_what_it_is_written_on():
    for fill in (*PALETTE, PAPER):
        assert contrast(text_color(fill), fill) >= 4.5
    for rank in range(4):
        assert contrast(rank_color(rank), PAPER) >= 3, "arrows in the colour of a rank, on paper"
    assert contrast(INK, PAPER) > 10 and contrast(FAINT, PAPER) > 3


# Machado, Oliveira, Fernandes: A Physiologically-based Model for Simulation of Color Vision Deficiency (2009), severity
# 1
DEUTERANOPIA = ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881))
PROTANOPIA = ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998))
TYPICAL = ((1, 0, 0), (0, 1, 0), (0, 0, 1))


@pytest.mark.parametrize("eye", [TYPICAL, DEUTERANOPIA, PROTANOPIA])
def test_everybody_can_tell_the_first_four_ranks_apart(eye):
    def lab(color):
        rgb = torch.tensor(eye, dtype=torch.float64) @ torch.tensor(linear_rgb(color), dtype=torch.float64)
        to_xyz = torch.tensor([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]).double()
        x, y, z = (to_xyz @ rgb.clamp(0, 1) / torch.tensor([0.9505, 1.0, 1.089]).double()) ** (1 / 3)
        return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)])

    labs = [lab(rank_color(rank)) for rank in range(4)]
    assert min(torch.dist(a, b) for i, a in enumerate(labs) for b in labs[:i]) > 15


def test_what_the_pictures_show_is_what_torch_distributed_does(world):
    def real():
        rank = dist.get_rank()
        addends, everyone = torch.arange(4) + rank, torch.arange(4) + 10 * rank
        out, one, whole = {}, torch.empty(1, dtype=torch.int64), torch.empty(4, dtype=torch.int64)
        x = addends if rank == 0 else torch.zeros(4, dtype=torch.int64)
        dist.broadcast(x, 0)
        out["broadcast"] = x.tolist()
        dist.scatter(one, list(torch.arange(4).chunk(4)) if rank == 0 else None, 0)
        out["scatter"] = one.tolist()
        pieces = [torch.empty_like(one) for _ in range(4)] if rank == 0 else None
        dist.gather(torch.tensor([10 * rank]), pieces, 0)
        out["gather"] = torch.cat(pieces).tolist() if rank == 0 else []
        x = addends.clone()
        dist.reduce(x, 0)
        out["reduce"] = x.tolist() if rank == 0 else []
        dist.all_gather_single(whole, torch.tensor([10 * rank]))
        out["all_gather"] = whole.tolist()
        dist.reduce_scatter_single(one, addends)
        out["reduce_scatter"] = one.tolist()
        x = addends.clone()
        dist.all_reduce(x)
        out["all_reduce"] = x.tolist()
        dist.all_to_all_single(whole, everyone)
        out["all_to_all"] = whole.tolist()
        work = [dist.isend(everyone, (rank + 1) % 4), dist.irecv(whole, (rank - 1) % 4)]
        [w.wait() for w in work]
        out["batch_send_recv"] = whole.tolist()
        return out

    starts = dict(broadcast=c.root_only, scatter=c.root_only, gather=c.pieces, all_gather=c.pieces)
    starts |= dict(all_to_all=c.everyone, batch_send_recv=c.everyone)
    for rank, held in enumerate(world.run(real)):
        for name, real_values in held.items():
            drawn = getattr(c, name)(starts.get(name, c.addends)())[rank]
            assert c.values(drawn) == real_values, name
