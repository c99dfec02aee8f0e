"""%%ranks: the cell's body runs on every rank of the current world.

    %%ranks
    x = torch.arange(4.) + rank
    dist.all_reduce(x); x

The ranks keep what a cell assigns. A name that the cell uses and the ranks lack is borrowed from the notebook, by
value; it is sent again when the notebook has bound it to something else. Once a cell assigns the name, it is the ranks'
own.
"""

import ast
import dis
import linecache
import sys

from lecture_lib.launch.errors import ipython
from lecture_lib.launch.world import current_world


def ranks(line: str, cell: str) -> None:
    """Run this cell on every rank of the newest open World."""
    if line.strip():
        raise ValueError(f"%%ranks takes nothing on its line and got {line.strip()!r}.")
    world = current_world()
    if world is None:
        raise RuntimeError("there are no ranks yet: run  world = World(4)  first.")
    shell = ipython()
    filename = _file_of_running_cell(shell)
    lines = ["%%ranks\n", *cell.splitlines(keepends=True)]
    linecache.cache[filename] = (len(cell), None, lines, filename)  # errors show lines of what the person wrote
    body, last = compile_cell(cell, filename)
    # With the ranks' own names known, only what they lack is looked for in the notebook.
    borrowed = {
        name: shell.user_ns[name]
        for name in names_used(body, last)
        if name in shell.user_ns
        and not (name in shell.user_ns_hidden and shell.user_ns_hidden[name] is shell.user_ns[name])  # In, Out, exit
        and name not in world.owned
        and not (name in world.lent and world.lent[name] is shell.user_ns[name])
    }
    world.run_cell((body, last), borrowed)


def _file_of_running_cell(shell) -> str:
    """The name under which IPython knows the code of the cell that runs now, and from which it tells In[3]."""
    frame = sys._getframe()
    while frame is not None:
        if shell.compile.format_code_name(frame.f_code.co_filename):
            return frame.f_code.co_filename
        frame = frame.f_back
    return "<%%ranks>"


def compile_cell(cell: str, filename: str) -> tuple:
    """(statements, final expression or None), as code. A final expression's value is shown, unless ``;`` follows it."""
    tree = ast.parse("\n" + cell, filename)  # the empty line stands for %%ranks, so that line numbers are the cell's
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not cell.rstrip().endswith(";"):
        last = compile(ast.Expression(tree.body.pop().value), filename, "eval")
    return compile(tree, filename, "exec"), last


def names_used(body, last) -> list[str]:
    """Global names that code reads before it assigns them, in the order of the code."""
    assigned: set[str] = set()
    used: dict[str, None] = {}
    for code in filter(None, (body, last)):
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("STORE_NAME", "STORE_GLOBAL"):
                assigned.add(instruction.argval)
            elif instruction.opname in ("LOAD_NAME", "LOAD_GLOBAL") and instruction.argval not in assigned:
                used[instruction.argval] = None
    for code in filter(None, (body, last)):
        for name in _names_in_functions(code):
            if name not in assigned:
                used[name] = None
    return [name for name in used if not name.startswith("__")]


def _names_in_functions(code) -> list[str]:
    """Global names in the functions, classes and comprehensions that code defines."""
    names = []
    for inner in code.co_consts:
        if hasattr(inner, "co_code"):
            loads = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
            names += [i.argval for i in dis.get_instructions(inner) if i.opname in loads]
            names += _names_in_functions(inner)
    return names
