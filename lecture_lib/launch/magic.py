"""%%ranks: the cell's body runs on every rank of the current world.

    %%ranks
    x = torch.arange(4.) + rank
    dist.all_reduce(x); x

The ranks keep what a cell assigns. A name that the cell uses and the ranks lack is borrowed from the notebook, by
value; it is sent again when it has changed there. Once a cell assigns the name, it is the ranks' own.
"""

import ast
import dis
import hashlib
import io
import linecache
import sys
import tokenize

from lecture_lib.launch import wire
from lecture_lib.launch.errors import brief, ipython, place
from lecture_lib.launch.world import current_world


def ranks(line: str, cell: str) -> None:
    """Run this cell on every rank of the newest open World."""
    if line.strip():
        raise brief(ValueError(f"%%ranks takes nothing on its line and got {line.strip()!r}."))
    world = current_world()
    if world is None:
        raise brief(RuntimeError("there are no ranks yet: run  world = World(4)  first."))
    shell = ipython()
    filename = _file_of_running_cell(shell)
    lines = ["%%ranks\n", *cell.splitlines(keepends=True)]
    linecache.cache[filename] = (len(cell), None, lines, filename)  # errors show lines of what the person wrote
    tree = parse(cell, filename)
    names = NamesUsed(tree)

    memory = world.cell_memory
    owned = memory.setdefault("owned", set())  # names that cells have assigned on every rank
    lent = memory.setdefault("lent", {})  # name -> (object, digest) of what the ranks have from the notebook
    later = memory.setdefault("later", set())  # names that functions of earlier cells use when they are called
    borrowed = {}
    for name in sorted(names.now | names.later | later):
        value = shell.user_ns.get(name, shell)
        hidden = name in shell.user_ns_hidden and shell.user_ns_hidden[name] is value  # In, Out, exit
        if value is shell or hidden or name in owned:
            continue
        if lent.get(name) != (known := _Lent(value, _digest(name, value))):
            borrowed[name], lent[name] = value, known
    try:
        outcomes = world.run_cell(compile_cell(tree, cell, filename), borrowed)
    except BaseException:
        for name in borrowed:  # who knows what the ranks have now
            lent.pop(name, None)
        raise
    owned.clear()
    owned |= set.intersection(*(set(outcome["own"]) for outcome in outcomes))
    later |= names.later


class _Lent:
    """What was sent: the same object, if nothing in it has changed since."""

    def __init__(self, value, digest: bytes):
        self.value, self.digest = value, digest

    def __eq__(self, other):
        return isinstance(other, _Lent) and self.value is other.value and self.digest == other.digest


def _digest(name: str, value) -> bytes:
    try:
        parts = wire.pack(value, to_rank=True)
    except Exception as error:
        raise brief(
            TypeError(
                f"this cell uses {name!r}, a {type(value).__name__}, from the notebook, which cannot be sent to the "
                f"ranks ({error}). Make it inside a %%ranks cell instead."
            )
        ) from None
    digest = hashlib.blake2b()
    for part in parts:
        digest.update(part)
    return digest.digest()


def _file_of_running_cell(shell) -> str:
    """The name under which IPython knows the code of the cell that runs now, and from which it tells In[3]."""
    frame = sys._getframe()
    while frame is not None:
        if shell.compile.format_code_name(frame.f_code.co_filename):
            return frame.f_code.co_filename
        frame = frame.f_back
    return "<%%ranks>"


# ---- the cell's code -------------------------------------------------------------------------------------------------


def parse(cell: str, filename: str) -> ast.Module:
    """Raises ValueError for what is not Python, with a word on what the notebook's own cells may hold and a rank's not.
    (Not SyntaxError: IPython shows all our frames with it.)"""
    try:
        tree = ast.parse(
            "\n" + cell, filename
        )  # the empty line stands for %%ranks, so that line numbers are the cell's
        compile(tree, filename, "exec")  # "await outside function" is found here
        return tree
    except SyntaxError as error:
        line, reason = (error.text or "").strip(), error.msg
        if line.startswith(("%", "!")):
            reason = (
                f"{line.split()[0]} is a command of the notebook, and ranks run Python only: use it in another cell"
            )
        elif "await" in reason:
            reason = "a rank cannot await at the top level of a cell: use asyncio.run()"
        where = place((filename, error.lineno or 1, "<module>"))
        raise brief(ValueError(f"{reason}\n  {where}\n    {line}")) from None


def compile_cell(tree: ast.Module, cell: str, filename: str) -> tuple:
    """(statements, final expression or None), as code. A final expression's value is shown, unless ``;`` follows it."""
    last, body = None, tree.body
    if body and isinstance(body[-1], ast.Expr) and not _ends_with_semicolon(cell):
        body, last = body[:-1], compile(ast.Expression(body[-1].value), filename, "eval")
    return compile(ast.Module(body, []), filename, "exec"), last


def _ends_with_semicolon(cell: str) -> bool:
    blank = (tokenize.NEWLINE, tokenize.NL, tokenize.COMMENT, tokenize.ENDMARKER, tokenize.DEDENT, tokenize.INDENT)
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(cell).readline) if t.type not in blank]
    return tokens[-1].string == ";"


class NamesUsed:
    """Which global names a cell reads that it has not certainly assigned before.

    ``now``: when it runs; ``later``: when a function that it defines is called.
    """

    def __init__(self, tree: ast.Module):
        self.now: set[str] = set()
        self.later: set[str] = set()
        assigned = self._block(tree.body, set())
        self.later -= assigned

    def _block(self, statements: list, assigned: set[str]) -> set[str]:
        """Follow statements in their order. Returns the names that are certainly assigned after them."""
        assigned = set(assigned)
        for statement in statements:
            assigned = self._statement(statement, assigned)
        return assigned

    def _statement(self, statement: ast.stmt, assigned: set[str]) -> set[str]:
        match statement:
            case ast.If(test, body, orelse):
                assigned = self._simple(ast.Expr(test), assigned)
                return self._block(body, assigned) & self._block(orelse, assigned)
            case ast.While(test, body, orelse):
                assigned = self._simple(ast.Expr(test), assigned)
                self._block(body, assigned)
                self._block(orelse, assigned)
                return assigned
            case ast.For(target, iterable, body, orelse):
                assigned = self._simple(ast.Expr(iterable), assigned)
                self._block(body, assigned | self._simple(_binds(target), assigned))
                self._block(orelse, assigned)
                return assigned
            case ast.With(items, body):
                for item in items:
                    assigned = self._simple(ast.Expr(item.context_expr), assigned)
                    if item.optional_vars:
                        assigned = self._simple(_binds(item.optional_vars), assigned)
                return self._block(body, assigned)
            case ast.Try(body, handlers, orelse, finalbody) | ast.TryStar(body, handlers, orelse, finalbody):
                after = self._block(orelse, self._block(body, assigned))
                for handler in handlers:
                    if handler.type:
                        self._simple(ast.Expr(handler.type), assigned)
                    after &= self._block(handler.body, assigned | {handler.name})
                return after | self._block(finalbody, assigned)
            case ast.Match(subject, cases):
                assigned = self._simple(ast.Expr(subject), assigned)
                for case in cases:
                    pattern = ast.Match(ast.Constant(None), [ast.match_case(case.pattern, case.guard, [ast.Pass()])])
                    self._block(case.body, self._simple(pattern, assigned))
                return assigned
            case _:
                return self._simple(statement, assigned)

    def _simple(self, statement: ast.stmt, assigned: set[str]) -> set[str]:
        """A statement that runs as a whole. Python's compiler tells what is global in it."""
        code = compile(ast.fix_missing_locations(ast.Module([statement], [])), "<cell>", "exec")
        reads, stores, deletes = _names_of(code)
        for inner in filter(lambda const: hasattr(const, "co_code"), code.co_consts):
            if inner.co_name.endswith("comp>"):  # runs at once; until Python 3.12 it is code of its own
                reads |= _reads_below(inner)
            else:
                self.later |= _reads_below(inner)
        self.now |= reads - assigned
        return (assigned | stores) - deletes


def _binds(target: ast.expr) -> ast.stmt:
    """``target = None``: what ``for target in`` and ``with ... as target`` do to names."""
    return ast.Assign([target], ast.Constant(None))


def _names_of(code) -> tuple[set[str], set[str], set[str]]:
    """Names that code reads (before it stores them, if it does), stores and deletes, outside the functions in it."""
    reads, stores, deletes = set(), set(), set()
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if instruction.opname in ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS") and name not in stores:
            reads.add(name)
        elif instruction.opname in ("STORE_NAME", "STORE_GLOBAL"):
            stores.add(name)
        elif instruction.opname in ("DELETE_NAME", "DELETE_GLOBAL"):
            deletes.add(name)
    return {name for name in reads if not name.startswith("__")}, stores, deletes


def _reads_below(code) -> set[str]:
    """Global names that a function reads, with those of the functions in it."""
    reads, stores, _ = _names_of(code)
    if code.co_flags & 2 == 0:  # a class body: what it has stored are its attributes
        reads -= stores
    for inner in filter(lambda const: hasattr(const, "co_code"), code.co_consts):
        reads |= _reads_below(inner)
    return reads
