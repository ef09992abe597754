"""Private names of torch's in source code."""

import ast


def _bindings(nodes):
    """Return what each name that is imported from torch stands for."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def _imported(nodes):
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _dotted(node):
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return (node.id, parts[::-1]) if isinstance(node, ast.Name) else (None, [])


def _is_private(name):
    parts = name.split(".")
    return parts[0] == "torch" and any(part.startswith("_") and not part.startswith("__") for part in parts)


def private_names(path):
    """Return the private names of torch's in a file, each in full: imported, or reached from what is imported."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    known = {name: full for name, full in _bindings(nodes) if full.split(".")[0] == "torch"}
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    outer = (_dotted(node) for node in nodes if isinstance(node, ast.Attribute) and id(node) not in inner)
    reached = {".".join([known[base], *parts]) for base, parts in outer if base in known}
    # A module that is imported to reach into is named by what is reached.
    names = {name for name in {*_imported(nodes), *reached} if _is_private(name)}
    return {n for n in names if not any(other.startswith(f"{n}.") for other in names)}
