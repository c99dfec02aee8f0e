"""What ranks print: all of it caught, labelled, in rank order, never too much."""

import logging
import os
import re
import sys
import time
import warnings

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from lecture_lib import RankError
from lecture_lib.launch.transcript import END, Transcript, merge


def test_prints_are_labelled_and_in_rank_order(world, capfd):
    def speak():
        time.sleep(0.05 * (3 - dist.get_rank()))  # the last rank is the first to speak
        print("before")
        print("after", dist.get_rank())

    for _ in range(3):
        world.run(speak)
        expected = "".join(f"rank {r} | before\nrank {r} | after {r}\n" for r in range(4))
        assert capfd.readouterr().out == expected


def test_python_c_logging_warnings_and_children_keep_their_order(world, capfd):
    def speak():
        import ctypes
        import subprocess

        if dist.get_rank() != 1:
            return
        print("python")
        ctypes.CDLL(None).printf(b"from C\n")
        os.write(2, b"to descriptor 2\n")
        print("to stderr", file=sys.stderr)
        logging.getLogger("course").warning("logged")
        warnings.warn("warned", stacklevel=1)
        subprocess.run(["echo", "from a child"], check=True)
        print("no newline at the end", end="")

    world.run(speak)
    lines = capfd.readouterr().out.splitlines()
    assert all(line.startswith("rank 1 | ") for line in lines)
    texts = [line.removeprefix("rank 1 | ") for line in lines]
    warned = next(i for i, text in enumerate(texts) if "UserWarning: warned" in text)
    del texts[warned : len(texts) - 2]
    assert texts == [
        "python",
        "from C",
        "to descriptor 2",
        "to stderr",
        "logged",
        "from a child",
        "no newline at the end",
    ]


def test_unicode_emoji_and_ansi_survive(world, capfd):
    text = "größe 🎓 \x1b[31mred\x1b[0m ≤"
    world.run(lambda: print(text) if dist.get_rank() == 0 else None)
    assert capfd.readouterr().out == f"rank 0 | {text}\n"


def test_progress_bars_keep_their_last_state(world, capfd):
    def progress():
        for i in range(5):
            sys.stderr.write(f"\r{i + 1}/5")
        sys.stderr.write("\n")

    world.run(progress)
    assert capfd.readouterr().out.splitlines() == [f"rank {r} | 5/5" for r in range(4)]


def test_a_terminal_gets_everything(world, capfd):
    def flood():
        if dist.get_rank() == 2:
            sys.stdout.write("x" * 5_000_000 + "\n")
            for i in range(20_000):
                print("line", i)

    world.run(flood)
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 20_001 and len(lines[0]) == 5_000_009 and lines[-1] == "rank 2 | line 19999"


def test_what_was_printed_before_a_fault_is_not_lost(world, capfd):
    def fail():
        print("so far so good")
        if dist.get_rank() == 1:
            raise ValueError
        dist.barrier()

    with pytest.raises(RankError):
        world.run(fail)
    assert capfd.readouterr().out.splitlines() == [f"rank {r} | so far so good" for r in range(4)]


def test_a_terminal_sees_the_first_running_rank_live(world, monkeypatch, tmp_path):
    """The ranks go on only when their first line has been shown."""
    seen, shown = [], tmp_path / "shown"

    def show(text="", **_):
        seen.append(text)
        if "rank 0 | first" in text:
            shown.touch()

    def speak():
        sys.stdout.write("first\nsecond\n")  # the second may still grow
        until = time.monotonic() + 30
        while not shown.exists() and time.monotonic() < until:
            time.sleep(0.01)
        sys.stdout.write("last\n")
        return shown.exists()

    monkeypatch.setattr("builtins.print", show)
    assert world.run(speak) == [True] * 4
    lines = [f"rank {rank} | {word}\n" for rank in range(4) for word in ("first", "second", "last")]
    assert "".join(seen) == "".join(lines)


def test_output_of_a_thread_that_goes_on_belongs_to_the_next_run(world, capfd):
    def leave_a_thread():
        import threading

        threading.Timer(0.2, print, ("late",)).start()

    world.run(lambda: leave_a_thread() if dist.get_rank() == 0 else None)
    assert capfd.readouterr().out == ""
    time.sleep(0.4)
    world.run(lambda: print("next") if dist.get_rank() == 0 else None)
    assert capfd.readouterr().out == "rank 0 | late\nrank 0 | next\n"


@settings(deadline=None)
@given(st.text(st.characters(exclude_characters="\r\x1b", exclude_categories=["Cs"])), st.data())
def test_a_transcript_does_not_depend_on_how_its_bytes_arrive(text, data):
    whole, pieces = Transcript(0, 4), Transcript(0, 4)
    stream = text.encode() + END + b"later"
    whole.feed(stream)
    while stream:
        n = data.draw(st.integers(1, len(stream)))
        pieces.feed(stream[:n])
        stream = stream[n:]
    assert whole.ended and pieces.ended and whole.text() == pieces.text() == text
    assert merge([whole]) == merge([pieces])
    pieces.start()
    pieces.feed(END)
    assert pieces.text() == "later"


@settings(deadline=None)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=60), st.integers(1, 5000))
def test_the_cut_is_the_same_however_the_bytes_arrive_and_counts_exactly(lengths, step):
    stream = b"".join(b"%d" % (i % 10) * n + b"\n" for i, n in enumerate(lengths))
    whole, pieces = Transcript(0, 1), Transcript(0, 1)
    whole.feed(stream)
    for start in range(0, len(stream), step):
        pieces.feed(stream[start : start + step])
    assert whole.text() == pieces.text()
    note = re.search(r"\.\.\. ([\d,]+) lines, ([\d,]+) bytes, are not shown here \.\.\.\n", whole.text())
    if note is None:
        assert whole.text().encode() == stream
    else:
        cut = int(note[2].replace(",", ""))
        assert len(whole.text()) - len(note[0]) + cut == len(stream)
        assert whole.text().count("\n") - 1 + int(note[1].replace(",", "")) == stream.count(b"\n")


def test_closing_standard_output_costs_no_rank(world, capfd):
    import sys

    def closes():
        sys.stdout.close()
        sys.stderr = None

    pids = world.pids
    world.run(closes)
    world.run(lambda: print("still here"))
    assert capfd.readouterr().out == "".join(f"rank {r} | still here\n" for r in range(4)) and world.pids == pids


def test_plain_objects_are_displayed_once_and_what_is_shown_cannot_be_changed(world, capfd):
    world.run(lambda: display(2))  # noqa: F821
    assert capfd.readouterr().out == "".join(f"rank {r} | 2\n" for r in range(4))
    with pytest.raises(RankError, match="what a rank has shown cannot be changed or cleared"):
        world.run(lambda: display(2, display_id="x"))  # noqa: F821
