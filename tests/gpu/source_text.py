"""Source files without comments, docstrings and formatting."""

import ast
import re
from collections.abc import Callable

# A literal, in the group `text`, or a comment.
CPP = re.compile(
    r"""(?P<text>R"(?P<end>\w*)\(.*?\)(?P=end)"|"(?:\\.|[^"\\])*"|(?<!\w)'(?:\\.|[^'\\])+')"""
    r"|//(?:\\\n|[^\n])*|/\*.*?\*/",
    re.DOTALL,
)
PYTHON = re.compile(
    r"(?P<text>(?P<quotes>\"{3}|'{3}|[\"'])(?:\\.|.)*?(?P=quotes))|#[^\n]*",
    re.DOTALL,
)
OWN_INCLUDE = re.compile(r'# include ("|< girih /)')
LITERAL = r"\0\d+\0"  # stands for one while a text is cut into tokens


def with_literals_apart(text: str, syntax: re.Pattern) -> tuple[str, Callable[[str], str]]:
    """The text without comments and with a mark for each literal, and the function that puts them back."""
    literals: list[str] = []

    def marked(match: re.Match) -> str:
        if match["text"] is None:
            return " "
        literals.append(match["text"])
        return f"\0{len(literals) - 1}\0"

    def restored(some: str) -> str:
        return re.sub(LITERAL, lambda mark: literals[int(mark[0][1:-1])], some)

    return syntax.sub(marked, text), restored


def cpp_tokens(text: str) -> str:
    """C++ or CUDA, one space between tokens; a directive of the preprocessor has a line of its own.

    Includes of the project's files are left out: those files count themselves.
    """
    code, restored = with_literals_apart(text, CPP)
    lines = [""]
    for line in code.replace("\\\n", " ").split("\n"):
        tokens = " ".join(re.findall(rf"{LITERAL}|\w+|[^\w\s]", line))
        if OWN_INCLUDE.match(restored(tokens)):
            continue
        if tokens.startswith("#"):
            lines += [tokens, ""]
        else:
            lines[-1] = f"{lines[-1]} {tokens}".strip()
    return restored("\n".join(line for line in lines if line))


def without_docstrings(text: str) -> str:
    lines = text.split("\n")
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            docstring = node.body[0]
            lines[docstring.lineno - 1 : docstring.end_lineno] = [""] * (
                docstring.end_lineno - docstring.lineno + 1
            )
    return "\n".join(lines)


def python_lines(text: str) -> str:
    """Python without blank lines, each line with its indentation and one space between tokens.

    Names of the modules that names are imported from are left out.
    """
    code, restored = with_literals_apart(without_docstrings(text), PYTHON)
    found = []
    for line in code.split("\n"):
        tokens = " ".join(re.findall(rf"{LITERAL}|\w+|[^\w\s]", line))
        if tokens:
            found.append(
                " " * (len(line) - len(line.lstrip())) + re.sub("^from .* import ", "import ", tokens)
            )
    return restored("\n".join(found))


def source_text(name: str, text: str) -> str:
    """What counts of a file's text, by the file's name."""
    if name.endswith((".cpp", ".h", ".cu", ".cuh", ".cu.in")):
        return cpp_tokens(text)
    return python_lines(text) if name.endswith(".py") else text
