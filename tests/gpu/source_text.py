"""Normalises source files: removes comments, docstrings and formatting.

Two texts with the same result compile to the same program, except for macros that stringify the spaces of
their arguments.
"""

import ast
import re
from collections.abc import Callable

# A literal, in the group `text`, or a comment.
PREFIX = r"(?:(?<!\w)(?:u8|[uUL]))?"
CPP = re.compile(
    rf"""(?P<text>(?:(?<!\w)(?:u8|[uUL])?R)"(?P<end>[^\s()\\]{{0,16}})\(.*?\)(?P=end)"|{PREFIX}"(?:\\.|[^"\\])*\""""
    r"|(?<!\w)(?:u8|[uUL])?'(?:\\.|[^'\\])+')"
    r"|//(?:\\\n|[^\n])*|/\*.*?\*/",
    re.DOTALL,
)
PYTHON = re.compile(
    r"(?P<text>(?:(?<!\w)[rRbBfFuU]{1,2})?(?P<quotes>\"{3}|'{3}|[\"'])(?:\\.|.)*?(?P=quotes))|#[^\n]*",
    re.DOTALL,
)
LITERAL = r"\0\d+\0"  # placeholder for a literal during tokenisation
NUMBER = r"\.?\d(?:[eEpP][+-]|'(?=\w)|[\w.])*"
OPERATOR = (
    r"<<=|>>=|<=>|->\*|\*\*=|//=|\.\.\.|::|->|\+\+|--|<<|>>"
    r"|[<>=!+\-*/%&|^:@]=|&&|\|\||##|\.\*|\*\*|//|[^\w\s]"
)
TOKEN = re.compile(rf"{LITERAL}|{NUMBER}|\w+|{OPERATOR}")
# Only the file name of an include of the project counts: the included file is hashed separately.
OWN_INCLUDE = re.compile(r'(?<=# include )(?:"(?:[^"]*/)?([^"/]+)"|< girih / (\w+ \. h) >)')


def separate_literals(text: str, syntax: re.Pattern) -> tuple[str, Callable[[str], str]]:
    """Removes comments and replaces literals by placeholders; returns the text and a function that restores
    literals."""
    if "\0" in text:
        raise ValueError("a source has a NUL")
    literals: list[str] = []

    def mark_literal(match: re.Match) -> str:
        if match["text"] is None:
            return " "
        literals.append(match["text"])
        return f"\0{len(literals) - 1}\0"

    def restore(text_part: str) -> str:
        return re.sub(LITERAL, lambda mark: literals[int(mark[0][1:-1])], text_part)

    return syntax.sub(mark_literal, text), restore


def cpp_tokens(text: str) -> str:
    """C++ or CUDA tokens separated by one space; each preprocessor directive is on a separate line."""
    code, restore = separate_literals(text, CPP)
    lines = [""]
    for line in code.replace("\\\n", " ").split("\n"):
        tokens = " ".join(TOKEN.findall(line))
        if tokens.startswith("#"):
            if re.match(r"\s*#\s*define\s+\w+\(", line):  # a macro with arguments
                tokens = tokens.replace(" (", "(", 1)
            lines += [OWN_INCLUDE.sub(lambda name: name[1] or name[2], restore(tokens)), ""]
        else:
            lines[-1] = f"{lines[-1]} {restore(tokens)}".strip()
    return "\n".join(line for line in lines if line)


def without_docstrings(text: str) -> str:
    lines = text.encode().split(b"\n")
    for node in ast.walk(ast.parse(text)):
        scope = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if not isinstance(node, scope) or ast.get_docstring(node) is None:
            continue
        docstring = node.body[0]
        first, last = docstring.lineno - 1, docstring.end_lineno - 1
        before, after = lines[first][: docstring.col_offset], lines[last][docstring.end_col_offset :]
        lines[first : last + 1] = [before + after, *[b""] * (last - first)]
    return b"\n".join(lines).decode()


def python_lines(text: str) -> str:
    """Python without blank lines, with indentation and one space between tokens. The submodule of girih in an
    import does not count."""
    code, restore = separate_literals(without_docstrings(text), PYTHON)
    found = []
    for line in code.split("\n"):
        tokens = " ".join(TOKEN.findall(line))
        if tokens:
            tokens = re.sub(r"^from girih( \. \w+)* import ", "from girih import ", tokens)
            found.append(" " * (len(line) - len(line.lstrip())) + tokens)
    return restore("\n".join(found))


def source_text(name: str, text: str) -> str:
    """The part of a file's text that counts for its hash."""
    if name.endswith((".cpp", ".h", ".cu", ".cuh", ".cu.in")):
        return cpp_tokens(text)
    return python_lines(text) if name.endswith(".py") else text
