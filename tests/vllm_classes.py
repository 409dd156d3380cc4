"""What vLLM's classes and functions look like, read off their source, in the version that this process imports.

Everything is text made from vLLM's syntax trees, never from values, so that two versions can be compared in two
processes, and a field counts whether it is a dataclass's, pydantic's or only set in `__init__`. Types are followed
through annotations, those under `if TYPE_CHECKING` included.

Used by: vllm_interface.py (describe), vllm_reads.py (types of what our code reads).
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import sys
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

SEQUENCES = {
    "list", "List", "set", "Set", "frozenset", "deque", "Sequence", "Iterable", "Iterator", "Collection", "Generator",
}  # fmt: skip
MAPPINGS = {"dict", "Dict", "Mapping", "MutableMapping", "defaultdict", "OrderedDict"}
WRAPPERS = {"Optional", "ClassVar", "Final", "Annotated", "InitVar", "SkipValidation"}


@dataclass(frozen=True)
class Instance:
    """An object of one of these vLLM classes."""

    classes: tuple[type, ...]


@dataclass(frozen=True)
class ClassObject:
    """A vLLM class itself."""

    cls: type


@dataclass(frozen=True)
class Function:
    """A vLLM function, by the name under which it is imported."""

    module: str
    name: str


@dataclass(frozen=True)
class Module:
    """A module of vLLM."""

    module: ModuleType


@dataclass(frozen=True)
class Bound:
    """A method or function about to be called."""

    returns: Type | None


@dataclass(frozen=True)
class Items:
    """A container; `key` for mappings."""

    item: Type | None
    key: Type | None = None


@dataclass(frozen=True)
class Parts:
    """A tuple of known length."""

    parts: tuple[Type | None, ...]


@dataclass(frozen=True)
class Opaque:
    """A value that came from vLLM and is not of a class of vLLM's: a number, a tensor, JSON."""


@dataclass(frozen=True)
class Unknown:
    """A value that came from vLLM; its type could not be found out."""


Type = Instance | ClassObject | Function | Module | Bound | Items | Parts | Opaque | Unknown
OPAQUE, UNKNOWN = Opaque(), Unknown()


@dataclass(frozen=True)
class Member:
    """One name of a class."""

    text: str
    """Kind, and signature or annotation."""
    type: Type | None
    is_abstract: bool = False


def locate(path: str) -> Any:
    """The object at "module:qualified.name". Raises ImportError or AttributeError."""
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def path_of(cls: type) -> str:
    """The "module:qualified.name" of a class."""
    return f"{cls.__module__}:{cls.__qualname__}"


def is_vllm(value: Any) -> bool:
    """Whether a class, function or module is vLLM's."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
    return str(name).split(".", maxsplit=1)[0] == "vllm"


def member_of(cls: type, name: str) -> Member | None:
    """A name of a class or of those that it inherits from."""
    for owner in cls.__mro__:
        if is_vllm(owner) and (found := members_of(owner).get(name)):
            return found
    return None


@cache
def members_of(cls: type) -> dict[str, Member]:
    """All names that the body or the methods of one class define, in the order of the source."""
    found: dict[str, Member] = {}
    node = _class_node(cls)
    if node is None:
        return found
    module = sys.modules[cls.__module__]
    is_enum = any(base.__name__ == "Enum" for base in cls.__mro__)
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            text = f"field: {_text(item.annotation)}"
            found[item.target.id] = Member(text, type_of(item.annotation, module))
        elif isinstance(item, ast.Assign):
            for target in item.targets:
                if isinstance(target, ast.Name):
                    kind = Instance((cls,)) if is_enum else OPAQUE
                    found[target.id] = Member("attribute", kind)
        elif isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            member = _method(item, module)
            if item.name not in found or not _is_setter(item):
                found[item.name] = member
    for item in node.body:
        if isinstance(item, ast.FunctionDef):
            for name, member in _set_on_self(item, module):
                found.setdefault(name, member)
    return found


def signature_of(module: str, name: str) -> str | None:
    """Signature of a module's function, "class" or "value" for other things, None when there is none of that name."""
    value = getattr(importlib.import_module(module), name, None)
    if value is None:
        return None
    if inspect.isclass(value):
        return "class"
    if inspect.isfunction(value):
        node = ast.parse(inspect.cleandoc("\n" + inspect.getsource(value))).body[0]
        assert isinstance(node, ast.FunctionDef)
        return _signature(node)
    return "value"


def returned_by(function: Function) -> Type | None:
    """Type of what a function of vLLM returns."""
    value = getattr(importlib.import_module(function.module), function.name)
    node = ast.parse(inspect.cleandoc("\n" + inspect.getsource(value))).body[0]
    assert isinstance(node, ast.FunctionDef)
    return type_of(node.returns, sys.modules[value.__module__]) if node.returns else UNKNOWN


def type_of(annotation: ast.expr, module: ModuleType) -> Type | None:
    """Type that an annotation in a module of vLLM names; None for None."""
    if isinstance(annotation, ast.Constant):
        if annotation.value is None:
            return None
        if isinstance(annotation.value, str):
            return type_of(ast.parse(annotation.value, mode="eval").body, module)
        return OPAQUE
    if isinstance(annotation, ast.BinOp):
        return _either(type_of(annotation.left, module), type_of(annotation.right, module))
    if isinstance(annotation, ast.Subscript):
        return _subscripted(annotation, module)
    if not isinstance(annotation, ast.Name | ast.Attribute):
        return OPAQUE
    value = _named(annotation, module)
    if value is Any or value is None:
        return UNKNOWN
    if inspect.isclass(value):
        return Instance((value,)) if is_vllm(value) else OPAQUE
    return OPAQUE if hasattr(value, "__supertype__") or not is_vllm(value) else UNKNOWN


def _subscripted(annotation: ast.Subscript, module: ModuleType) -> Type | None:
    name = _text(annotation.value).rsplit(".", maxsplit=1)[-1]
    inside = annotation.slice
    parts = inside.elts if isinstance(inside, ast.Tuple) else [inside]
    if name in SEQUENCES:
        return Items(type_of(parts[0], module))
    if name in ("tuple", "Tuple"):
        if len(parts) == 2 and isinstance(parts[1], ast.Constant) and parts[1].value is ...:
            return Items(type_of(parts[0], module))
        return Parts(tuple(type_of(part, module) for part in parts))
    if name in MAPPINGS:
        return Items(type_of(parts[1], module), type_of(parts[0], module))
    if name in WRAPPERS:
        return type_of(parts[0], module)
    if name in ("type", "Type"):
        found = type_of(parts[0], module)
        return ClassObject(found.classes[0]) if isinstance(found, Instance) else OPAQUE
    return OPAQUE


def _either(one: Type | None, other: Type | None) -> Type | None:
    if isinstance(one, Instance) and isinstance(other, Instance):
        return Instance(one.classes + other.classes)
    for candidate in (one, other):
        if not isinstance(candidate, Opaque | None):
            return candidate
    return one or other


def _named(node: ast.Name | ast.Attribute, module: ModuleType) -> Any:
    """The object that a name means in a module, also when it is imported for type checkers only."""
    if isinstance(node, ast.Attribute):
        if not isinstance(node.value, ast.Name | ast.Attribute):
            return None
        return getattr(_named(node.value, module), node.attr, None)
    for scope in (vars(module), vars(builtins)):
        if node.id in scope:
            return scope[node.id]
    source = _checked_imports(module).get(node.id)
    if source is None:
        return None
    try:
        return locate(source) if ":" in source else importlib.import_module(source)
    except (ImportError, AttributeError):
        return None


@cache
def _checked_imports(module: ModuleType) -> dict[str, str]:
    found = {}
    for block in ast.walk(_tree(module)):
        if not (isinstance(block, ast.If) and "TYPE_CHECKING" in _text(block.test)):
            continue
        for item in ast.walk(block):
            if isinstance(item, ast.ImportFrom) and item.module and not item.level:
                for alias in item.names:
                    found[alias.asname or alias.name] = f"{item.module}:{alias.name}"
            elif isinstance(item, ast.Import):
                for alias in item.names:
                    found[alias.asname or alias.name.split(".")[0]] = alias.name
    return found


@cache
def _tree(module: ModuleType) -> ast.Module:
    return ast.parse(inspect.getsource(module))


def _class_node(cls: type) -> ast.ClassDef | None:
    body: list[ast.stmt] = _tree(sys.modules[cls.__module__]).body
    node: ast.ClassDef | None = None
    for part in cls.__qualname__.split("."):
        named = (n for n in body if isinstance(n, ast.ClassDef) and n.name == part)
        node = next(named, None)
        if node is None:
            return None
        body = node.body
    return node


def _method(node: ast.FunctionDef | ast.AsyncFunctionDef, module: ModuleType) -> Member:
    decorators = [_text(d).rsplit(".", maxsplit=1)[-1] for d in node.decorator_list]
    is_abstract = "abstractmethod" in decorators
    returns = type_of(node.returns, module) if node.returns is not None else UNKNOWN
    words = ["abstract"] if is_abstract else []
    if "property" in decorators or "cached_property" in decorators:
        words.append(f"property -> {_text(node.returns) if node.returns else '?'}")
        return Member(" ".join(words), returns, is_abstract)
    words += [d for d in decorators if d in ("classmethod", "staticmethod")]
    words.append(f"method {_signature(node)}")
    return Member(" ".join(words), Bound(returns), is_abstract)


def _is_setter(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(_text(d).endswith(".setter") for d in node.decorator_list)


def _set_on_self(method: ast.FunctionDef, module: ModuleType) -> list[tuple[str, Member]]:
    annotations = {a.arg: a.annotation for a in [*method.args.args, *method.args.kwonlyargs]}
    found = []
    for node in ast.walk(method):
        targets = node.targets if isinstance(node, ast.Assign) else []
        annotation: ast.expr | None = None
        if isinstance(node, ast.AnnAssign):
            targets, annotation = [node.target], node.annotation
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            annotation = annotations.get(node.value.id)
        for target in targets:
            if (
                isinstance(target, ast.Attribute)
                and isinstance(target.value, ast.Name)
                and target.value.id == "self"
            ):
                text = f"set on self: {_text(annotation)}" if annotation else "set on self"
                kind = type_of(annotation, module) if annotation else _made_by(node, module)
                found.append((target.attr, Member(text, kind)))
    return found


def _made_by(node: ast.AST, module: ModuleType) -> Type | None:
    """Type of `self.x = SomeClass(…)`."""
    value = getattr(node, "value", None)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name | ast.Attribute):
        made = _named(value.func, module)
        if inspect.isclass(made):
            return Instance((made,)) if is_vllm(made) else OPAQUE
    return UNKNOWN


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    returns = f" -> {_text(node.returns)}" if node.returns else ""
    arguments = ast.parse(f"def f({ast.unparse(node.args)}): ...").body[0]
    assert isinstance(arguments, ast.FunctionDef)
    for argument in ast.walk(arguments.args):
        if isinstance(argument, ast.arg) and argument.annotation is not None:
            argument.annotation = ast.Name(_text(argument.annotation))
    return f"({ast.unparse(arguments.args)}){returns}"


def _text(node: ast.expr) -> str:
    """Source of an annotation, the same with and without quotes."""

    class Unquote(ast.NodeTransformer):
        def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
            return node if _text(node.value).endswith("Literal") else self.generic_visit(node)

        def visit_Constant(self, node: ast.Constant) -> ast.AST:
            if not isinstance(node.value, str):
                return node
            try:
                return ast.parse(node.value, mode="eval").body
            except SyntaxError:
                return node

    return ast.unparse(Unquote().visit(ast.parse(ast.unparse(node), mode="eval")))
