"""The multi-process half of the course: what the notebooks' cells launch.

from lecture_lib import World, RankError, RankTimeout
%load_ext lecture_lib                       # the %%ranks cell magic
"""

from lecture_lib.launch import RankError, RankTimeout, World, fork_server

__all__ = ["RankError", "RankTimeout", "World", "load_ipython_extension"]

# Importing torch takes a second or two. It happens now, in another process, while the person reads the next cell.
fork_server.start_in_background()


def load_ipython_extension(ipython):
    """``%load_ext lecture_lib`` adds the ``%%ranks`` cell magic."""
    from lecture_lib.launch.magic import ranks

    ipython.register_magic_function(ranks, "cell")
